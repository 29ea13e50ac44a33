"""The actors of a run: who is there, on which hosts and GPUs, with which logs."""

import asyncio
import json
import shutil
from collections.abc import Sequence

from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.core.waiting import together
from torchtitan_rl.hosts.cluster import Cluster
from torchtitan_rl.hosts.host import Host, RemoteHost
from torchtitan_rl.models.hf import SHAPES_FILE, tensor_shapes
from torchtitan_rl.observability.run_folder import RunFolder
from torchtitan_rl.observability.timeline import Timeline
from torchtitan_rl.platform import DeviceType, device_type
from torchtitan_rl.run.host_weights import HostWeights
from torchtitan_rl.run.placements import check_gpus_of_hosts, describe, place_actors
from torchtitan_rl.run.starting_model import model_folder
from torchtitan_rl.supervision.environments import Environments
from torchtitan_rl.supervision.generators import Generators
from torchtitan_rl.supervision.graders import Graders
from torchtitan_rl.supervision.references import References
from torchtitan_rl.supervision.spawn import (
    Spawned,
    spawn_environment,
    spawn_generator,
    spawn_grader,
    spawn_reference,
    spawn_trainer,
)
from torchtitan_rl.weight_sync.transport import Ends


class ActorSet:
    """Spawns the actors side by side, and ends every process they live on.

    Example:
        actors = ActorSet(config, folder, interactive=False)
        await actors.start()
        samples = await actors.generators.sample(requests)
        await actors.stop()
    """

    environments: Environments | None = None
    """Only if a task has tools, or answers the model."""
    references: References | None = None
    """Only if a loss compares with the starting model."""

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        *,
        interactive: bool,
        cluster: Cluster,
        timeline: Timeline | None = None,
    ) -> None:
        self._config, self._folder, self._cluster = config, folder, cluster
        self._model = model_folder(config)
        self._placements = place_actors(config, cluster)
        self._trainer: Spawned | None = None
        deadline, waited = config.supervision.deadline_seconds, config.cluster.wait_seconds
        self.generators = Generators(
            self._spawn_generator,
            config.generator.replicas,
            deadline_seconds=deadline,
            ready=lambda number: _ready(self._placements.generators[number].hosts),
            host_seconds=waited,
            bring=HostWeights(self._placements).bring,
            timeline=timeline,
        )
        self.graders = Graders(
            self._spawn_grader,
            deadline_seconds=deadline,
            ready=lambda _: _ready(self._placements.grader.hosts),
            host_seconds=waited,
            timeline=timeline,
        )
        if interactive and not config.rollout.train_from:
            self.environments = Environments(
                self._spawn_environment,
                deadline_seconds=deadline,
                ready=lambda _: _ready(self._placements.environment.hosts),
                host_seconds=waited,
                timeline=timeline,
            )
        if config.has_reference:
            self.references = References(
                self._spawn_reference,
                deadline_seconds=deadline,
                ready=lambda _: _ready(self._placements.reference.hosts),
                host_seconds=waited,
                timeline=timeline,
            )

    async def start(self, *, training: bool = True) -> None:
        """Spawn them all, or only those that roll out and grade; each is ready when this
        returns. Colocated generators are asleep then: the trainer has the first turn."""
        if self._config.colocated and training:
            starting = [self._start_in_turn(), self.graders.start()]
        else:
            starting = [self._start_trainer()] if training else []
            if not self._config.rollout.train_from:
                starting += [self.generators.start(), self.graders.start()]
        if self.environments:
            starting.append(self.environments.start())
        if self.references and training:
            starting.append(self.references.start())
        await together(*starting)

    async def check_files(self, *, training: bool = True) -> None:
        """Refuse hosts that lack GPUs or files which their actors need: before anybody waits for
        them."""
        check_gpus_of_hosts(self._placements, has_reference=self.references is not None)
        computing = [*self._placements.trainer.hosts] if training else []
        if training:
            await self._cluster.check_shared(self._folder.path, computing, "the run's folder")
        if self.references and training:
            await self._check_model(self._placements.reference.hosts, "reference")
        if training:
            await self._check_model(computing, "trainer")

    def describe_hosts(self) -> list[str]:
        """Lines about which actors live on which hosts; none if all are on this one."""
        if not self._cluster.remote:
            return []
        placed = self._placements.used(
            environment=self.environments is not None, reference=self.references is not None
        )
        used = {host.name for _, placement in placed for host in placement.hosts}
        idle = [host.name for host in self._cluster.remote if host.name not in used]
        lines = [f"{name}: {describe(placement)}" for name, placement in placed]
        if idle:
            lines.append(
                f"note: no actor is on {', '.join(idle)}: raise generator.replicas, or choose "
                "hosts with cluster.roles"
            )
        return lines

    async def _check_model(self, hosts: Sequence[Host], who: str) -> None:
        await self._cluster.check_model(hosts, self._model, who)

    @property
    def device(self) -> DeviceType:
        """The device that the actors compute on."""
        compute = self._placements.trainer.hosts[0].compute
        return compute.device if compute else device_type()

    @property
    def trainer(self) -> Spawned:
        """The trainer's mesh, once it has started."""
        assert self._trainer is not None, "the trainer has not started"
        return self._trainer

    @property
    def ends(self) -> Ends:
        """Between what weights travel."""
        placed, config = self._placements, self._config
        generating = {gpu for each in placed.generators for gpu in each.gpus[0] or ()}
        return Ends(
            hosts=self.trainer.machines | self.generators.pool.machines,
            device=self.device,
            trainer_ranks=placed.trainer.processes,
            tensor_parallel=config.generator.tensor_parallel_degree,
            shared_gpus=len(generating & set(placed.trainer.gpus[0] or ())),
        )

    def take_deaths(self) -> dict[str, float]:
        """How many actors of each kind died since the last call, as metrics."""
        died: dict[str, float] = {
            "generators/died": self.generators.pool.take_deaths(),
            "graders/died": self.graders.pool.take_deaths(),
        }
        if self.environments:
            died["environment/died"] = self.environments.pool.take_deaths()
        if self.references:
            died["reference/died"] = self.references.pool.take_deaths()
        return died

    async def stop(self) -> None:
        """Stop every process of the run."""
        kinds = (self.generators, self.graders, self.environments, self.references)
        await asyncio.gather(
            *(kind.pool.stop() for kind in kinds if kind is not None),
            *([self._trainer.stop()] if self._trainer else []),
            return_exceptions=True,
        )
        # What the `file` transport leaves if its process is killed before it has cleaned up.
        shutil.rmtree(self._folder.weights, ignore_errors=True)

    async def _start_in_turn(self) -> None:
        """Start the generators, and the trainer when they have given their memory back."""
        await self.generators.start()
        await self.generators.sleep()
        await self._start_trainer()

    async def _start_trainer(self) -> None:
        config = self._config
        self._trainer = await spawn_trainer(
            config.trainer,
            model=str(self._model),
            steps=config.steps,
            checkpoint_folder=str(self._folder.checkpoints),
            tokens_folder=str(self._folder.tokens),
            weights_folder=str(self._folder.weights),
            keep=config.checkpoint.keep,
            async_mode=config.checkpoint.async_mode,
            seed=config.seed,
            resume=config.resume or bool(config.fork_from),
            placement=self._placements.trainer,
            log_file=self._folder.log_file("trainer"),
        )

    async def _spawn_generator(self, number: int) -> Spawned:
        config, placement = self._config, self._placements.generators[number]
        return await spawn_generator(
            config.generator,
            model=await self._model_on(placement.hosts[0]),
            seed=config.seed,
            placement=placement,
            log_file=self._folder.log_file(f"generator-{number}" if number else "generator"),
        )

    async def _model_on(self, host: Host) -> str:
        """Path of the model for a generator on a host. Where the folder is not there, what a
        generator needs of it besides weights is sent; those come from the trainer."""
        if not isinstance(host, RemoteHost) or await host.has_files_of(self._model):
            return str(self._model)
        shapes = json.dumps(tensor_shapes(self._model)).encode()
        return await host.send_small_files(self._model, **{SHAPES_FILE: shapes})

    async def _spawn_grader(self, _number: int) -> Spawned:
        config, log_file = self._config, self._folder.log_file("grader")
        return await spawn_grader(
            config.rollout.grader,
            config.task,
            seed=config.seed,
            placement=self._placements.grader,
            log_file=log_file,
        )

    async def _spawn_environment(self, _number: int) -> Spawned:
        config, log_file = self._config, self._folder.log_file("environment")
        return await spawn_environment(
            config.rollout.environment,
            config.task,
            seed=config.seed,
            placement=self._placements.environment,
            log_file=log_file,
        )

    async def _spawn_reference(self, _number: int) -> Spawned:
        config = self._config
        return await spawn_reference(
            config.trainer.reference,
            model=str(self._model),
            placement=self._placements.reference,
            log_file=self._folder.log_file("reference"),
        )


async def _ready(hosts: Sequence[Host]) -> None:
    """Return when all of these hosts are there."""
    for host in hosts:
        await host.ready()

"""Trainer: torchtitan's model, optimizer and checkpoints with a few endpoints.

SPMD over a mesh of `data_parallel x tensor_parallel` processes. It is blind to the algorithm: it
takes its cells of a grid of per-token streams, calls the configured loss, and returns metrics.

Everything that computes runs on one thread, in the order of the calls. Only a snapshot of the
weights is taken beside it: the next forward and backward pass do not change them, and the optimizer
waits until they are copied.

Resident, it has all its memory; offloaded it has given back what it can, so that generators can
use the same GPUs.
"""

import asyncio
import functools
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from monarch.actor import Actor, concurrent_endpoint
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

from torchtitan_rl.algorithms.echo_loss import echo_loss
from torchtitan_rl.algorithms.echo_share import first_factor, next_factor
from torchtitan_rl.algorithms.gradient_shares import GradientShares, slopes_of
from torchtitan_rl.algorithms.not_finite import NotFinite
from torchtitan_rl.algorithms.objective import Objective, batch_terms, mismatch, objective
from torchtitan_rl.algorithms.policy_loss import LossInputs
from torchtitan_rl.batching.grid import RankCells
from torchtitan_rl.batching.microbatch import Microbatch
from torchtitan_rl.config.checkpoint import AsyncMode
from torchtitan_rl.config.loss import LossConfig
from torchtitan_rl.config.trainer import TrainerConfig
from torchtitan_rl.core.metrics import (
    Mean,
    Metrics,
    Same,
    Sum,
    by_task,
    fetch_numbers,
    flatten,
    merge_metrics,
)
from torchtitan_rl.observability.token_export import TokenExport
from torchtitan_rl.platform import RELEASE_EVERY, memory_in_use, release_freed_memory
from torchtitan_rl.weight_sync.handle import Shard, Transport, WeightHandle
from torchtitan_rl.weight_sync.snapshot import Publisher
from torchtitan_rl.weight_sync.transport import make_publisher, wants_checksums

if TYPE_CHECKING:
    from torchtitan_rl.models.rank import ModelRank, Predicted

ROW_LENGTHS = 32
"""How many lengths of a row the layers see at most, up to the budget of a microbatch. With more,
freed memory would be in pieces of more sizes, and the process would grow."""


def in_order(method: Callable[..., Any]) -> Any:
    """Make an endpoint whose body runs on the trainer's thread, after all calls before it."""

    @functools.wraps(method)
    async def run_in_order(self: "Trainer", *args: Any, **kwargs: Any) -> Any:
        return await asyncio.wrap_future(self._thread.submit(method, self, *args, **kwargs))

    return concurrent_endpoint(run_in_order)


def computes(method: Callable[..., Any]) -> Any:
    """Make an endpoint as `in_order` does, of a body that needs the weights where they are."""

    @functools.wraps(method)
    def run_resident(self: "Trainer", *args: Any, **kwargs: Any) -> Any:
        self.check_resident()
        return method(self, *args, **kwargs)

    return in_order(run_resident)


class Trainer(Actor):
    """One rank of the trainer mesh. See `Trainer.Config` for what can be set.

    Example:
        trainer = await spawn_trainer(
            Trainer.Config(), model="models/tiny", steps=10, checkpoint_folder="checkpoints"
        )
        metrics = merge_metrics(await call_ranks(trainer.actor, "train_step", grid))
        handle = merge_handles(per_rank(await trainer.actor.publish_weights.call()))
    """

    Config: TypeAlias = TrainerConfig

    def __init__(
        self,
        config: TrainerConfig,
        *,
        model: str,
        steps: int,
        checkpoint_folder: str,
        tokens_folder: str,
        weights_folder: str,
        keep: int,
        async_mode: AsyncMode = "disabled",
        seed: int,
    ) -> None:
        self.config = config
        self._model_folder = model
        self._steps = steps
        self._checkpoint_folder, self._keep = checkpoint_folder, keep
        self._async_mode = async_mode
        self._tokens_folder, self._weights_folder = Path(tokens_folder), Path(weights_folder)
        self._seed = seed
        self._thread = ThreadPoolExecutor(1, "trainer")
        self._not_finite = NotFinite()
        self.tokens: TokenExport | None = None
        self._publisher: Publisher | None = None
        self._publishing = asyncio.Lock()
        self._copied: Future[None] = Future()
        """Done when the snapshot under way no longer needs the weights to stay as they are."""
        self._copied.set_result(None)
        self.residence: Literal["resident", "offloaded"] = "resident"
        """Offloaded, it has given back what memory it can, and computes nothing."""

    @computes
    def setup(self, *, resume: bool) -> None:
        """Build everything and load weights: the latest checkpoint if `resume` and there is one,
        else the HF folder."""
        config = self.config
        # Heavy, and only needed here: the controller imports this module for the class.
        from torchtitan_rl.models.checkpoint import Checkpoints
        from torchtitan_rl.models.offload import HostMemory
        from torchtitan_rl.models.rank import ModelRank

        self.build(
            ModelRank(
                self._model_folder,
                config.parallelism,
                dtype=config.dtype,
                seed=self._seed,
                activation_checkpoint=config.activation_checkpoint,
                compile=config.compile,
                row_multiple=max(1, config.tokens_per_microbatch // ROW_LENGTHS),
            )
        )
        self.checkpoints = Checkpoints(
            folder=self._checkpoint_folder,
            keep=self._keep,
            async_mode=self._async_mode,
            model=self.model,
            optimizers=self.optimizers,
            lr_schedulers=self.lr_schedulers,
            state=self.state,
            adapter=self.rank.adapter,
        )
        self.checkpoints.load(resume=resume)
        self._host = HostMemory()
        self._set_up_optimizers()
        if config.export_tokens and self.rank.leads:
            self.tokens = TokenExport(self._tokens_folder, self.rank.dp_rank)

    def build(self, rank: "ModelRank") -> None:
        """Take a model, whose weights need not be there yet, and all that is made from it alone. A
        trace, which is no actor, begins here."""
        from torchtitan_rl.models.checkpoint import TrainState
        from torchtitan_rl.models.shards import LocalWeights

        self.rank, self.model = rank, rank.model
        optimizer = self.config.optimizer
        container = default_adamw(
            lr=optimizer.lr,
            betas=tuple(optimizer.betas),
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
        )
        self.optimizers = container.build(model_parts=[self.model])
        schedule = LRSchedulersContainer.Config(**asdict(self.config.lr_scheduler))
        self.lr_schedulers = schedule.build(optimizers=self.optimizers, training_steps=self._steps)
        self.weights = LocalWeights(self.model, rank.spec, rank.adapter)
        self.state = TrainState()

    def _set_up_optimizers(self) -> None:
        """Give the optimizers the numbers of the config: a checkpoint brings those of the run that
        wrote it, and the schedule would set the learning rate only after the next step."""
        config = self.config.optimizer
        own = {"betas": tuple(config.betas), "eps": config.eps, "weight_decay": config.weight_decay}
        for optimizer, schedule in zip(self.optimizers, self.lr_schedulers, strict=True):
            rates = zip(schedule.base_lrs, schedule.get_last_lr(), strict=True)
            for group, (base, now) in zip(optimizer.param_groups, rates, strict=True):
                group.update(own, initial_lr=base, lr=now)

    @computes
    def steps_done(self) -> int:
        """Controller steps that made the weights: 0, or those of the checkpoint that was loaded."""
        return self.state.step

    @computes
    def train_step(self, *grids: RankCells, step: int = 0) -> Metrics:
        """One optimizer step on this rank's cells of each grid, a part of the global batch; returns
        its share of the metrics. `step` is the controller's, by which exported tokens are named."""
        if self.tokens:
            self.tokens.clear()
        learning_rate = self.lr_schedulers.schedulers[0].get_last_lr()[0]
        # The first part sees the weights the step starts with: there, o is t itself.
        for cell in (cell for grid in grids[1:] for cell in self._cells(grid)):
            with self.rank.replaying(cell, on=self.config.router_replay):
                cell.streams["old_logprobs"] = self.rank.logprobs(cell)
        metrics = merge_metrics([self.update(grid) for grid in grids])
        self.lr_schedulers.step()
        self.state.policy_version += 1
        if self.state.policy_version % RELEASE_EVERY == 0:
            release_freed_memory()
        if self.tokens:
            self.tokens.write(step)
        metrics["train/learning_rate"] = Same(learning_rate)
        return self._of_rank(metrics)

    @computes
    def measure(self, grid: RankCells) -> Metrics:
        """Return this rank's share of what a step on the grid would measure, without taking it."""

        def forward(cell: Microbatch) -> Pass:
            with self.rank.replaying(cell, on=self.config.router_replay):
                return self._forward(cell, grid, self.config.loss)

        with torch.no_grad():
            cells = self._cells(grid, self._echo_factor)
            return self._of_rank(self._measured(map(forward, cells)))

    def _of_rank(self, metrics: Metrics) -> Metrics:
        """The metrics that this rank reports. Of ranks that share a model, and so compute the same
        values, only one reports: sums would count twice."""
        return metrics if self.rank.leads else {}

    @computes
    def gradients(
        self, grid: RankCells, *, loss: LossConfig | None = None
    ) -> dict[str, torch.Tensor]:
        """The full gradient of the batch by parameter name, without a step, and with echo weights
        as they are. For tests and study."""
        self._accumulate(grid, loss or self.config.loss)
        gradients = self.rank.full_gradients()
        self.optimizers.zero_grad()
        return gradients

    @computes
    def logprobs(self, cell: Microbatch) -> torch.Tensor:
        """[tokens] logprobs of the tokens that train under the current weights, else NaN; experts
        are the live router's, whatever `router_replay` says."""
        return self.rank.logprobs(cell)

    @concurrent_endpoint
    async def publish_weights(
        self, *, transport: Transport = "shm", dtype: torch.dtype | None = None
    ) -> WeightHandle:
        """Snapshot what this rank has of the weights, under their HF names, in `dtype` or as they
        are. The next call starts meanwhile."""
        async with self._publishing:
            copied: Future[None] = Future()
            try:
                taken = self._thread.submit(self._hold_weights, copied, transport)
                publisher, shards, version, mark = await asyncio.wrap_future(taken)
                return await asyncio.to_thread(
                    publisher.publish,
                    shards,
                    version,
                    dtype=dtype,
                    mark=mark,
                    copied=lambda: copied.set_result(None),
                )
            finally:
                if not copied.done():  # it never came to copying: the optimizer must not wait
                    copied.set_result(None)

    def _hold_weights(
        self, copied: "Future[None]", transport: Transport
    ) -> tuple[Publisher, list[Shard], int, Any]:
        """A publisher, the weights of now, and what the device has to do before they are; the
        optimizer waits until they are copied."""
        self.check_resident()
        publisher, shards = self._open_publisher(transport), self.weights.shards()
        self._copied = copied
        return publisher, shards, self.state.policy_version, publisher.mark()

    def _open_publisher(self, transport: Transport) -> Publisher:
        if self._publisher is not None and self._publisher.transport != transport:
            self._publisher.close()
            self._publisher = None
        if self._publisher is None:
            config, device = self.config.weight_sync, self.rank.device
            self._publisher = make_publisher(
                transport,
                folder=Path(config.folder or self._weights_folder) / f"rank-{dist.get_rank()}",
                device=str(device),
                checksums=wants_checksums(config, transport, device.type),
                threads=torch.get_num_threads(),
            )
        return self._publisher

    @in_order
    def sleep(self) -> int:
        """Give back what memory can be given back until `wake`; returns how many bytes that were.

        On a GPU those are weights and optimizer states, which go to host memory, and what the
        allocator keeps. On a CPU they have no other place to go, so only freed memory is given
        back: that of gradients and activations.
        """
        if self.residence == "offloaded":
            return 0
        self._copied.result()  # a snapshot is being taken of the weights
        held = memory_in_use()
        self.optimizers.zero_grad()
        if self.offloads:
            self._host.offload(self._movable())
        release_freed_memory()
        self.residence = "offloaded"
        return held - memory_in_use()

    @in_order
    def wake(self) -> None:
        """Have weights and optimizer states back where they were."""
        self._host.restore()
        self.residence = "resident"

    @property
    def offloads(self) -> bool:
        """Whether weights and optimizer states move to host memory as it sleeps: a CPU's are there
        already."""
        return self.rank.device.type != "cpu"

    def _movable(self) -> Iterator[torch.Tensor]:
        """Weights and optimizer states of this rank."""
        self.rank.reshard()
        yield from self.model.parameters()
        yield from self.optimizer_states()

    def optimizer_states(self) -> Iterator[torch.Tensor]:
        """What the optimizer keeps from step to step."""
        for optimizer in self.optimizers:
            for state in optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, torch.Tensor))

    def check_resident(self) -> None:
        """Raise an error if the trainer is offloaded."""
        if self.residence == "offloaded":
            raise RuntimeError("the trainer is offloaded: call `wake` first")

    @computes
    def save(self, step: int, *, wait: bool = True) -> None:
        """Write a checkpoint of everything a resumed run needs, as of `step` finished steps; with
        `wait`, return when it is on disk."""
        self.state.step = step
        self.checkpoints.save(step, wait=wait)
        self._flush()

    @computes
    def export_hf(self, folder: str) -> None:
        """Write the weights, config and tokenizer as an HF folder."""
        self.checkpoints.export_hf(Path(folder), source=Path(self._model_folder))
        self._flush()

    def _flush(self) -> None:
        """Put on disk what a run leaves there, before its processes end."""
        if self.tokens:
            self.tokens.flush()

    def _cells(self, grid: RankCells, echo_factor: float = 1.0) -> list[Microbatch]:
        self.rank.check_own(grid)
        return [cell.with_echo_scaled(echo_factor) for cell in grid.cells]

    def _accumulate(self, grid: RankCells, loss: LossConfig, echo_factor: float = 1.0) -> Metrics:
        """Accumulate the gradient of a batch; returns this rank's part of the metrics."""
        self._not_finite = NotFinite()
        shares = self._gradient_shares(grid, loss)
        cells = self._cells(grid, echo_factor)
        try:
            metrics = self._measured(
                self._forward_backward(cell, grid, loss, shares, last=number == len(cells))
                for number, cell in enumerate(cells, 1)
            )
        except BaseException:
            self.rank.discard_gradients()
            raise
        if shares:
            dist.all_reduce(shares.total)
            for name, share in shares.shares().items():
                metrics[f"grad_share/{name}"] = Mean(share, 1.0)
        return metrics

    def _gradient_shares(self, grid: RankCells, loss: LossConfig) -> GradientShares | None:
        """A place for what each term gives to the gradient; None if there is only one term."""
        terms = loss.terms if grid.loss_tokens else ()
        terms = (*terms, "echo") if grid.echo_tokens else terms
        if len(terms) < 2:
            return None
        return GradientShares(terms, dim=self.rank.head.in_features, device=self.rank.device)

    def _measured(self, passes: "Iterable[Pass]") -> Metrics:
        """Metrics of this rank's microbatches, and its part of the terms of the loss: these are
        divided by all tokens of the batch, so that what the ranks have adds up."""
        metrics: list[Metrics] = []
        terms: list[Metrics] = []
        for passed in passes:
            metrics.append(passed.metrics)
            terms.append({name: Sum(term.detach()) for name, term in passed.terms.items()})
            del passed  # with its tensors, before the next one is made
        numbers = fetch_numbers([*metrics, *terms])
        loss = flatten(merge_metrics(numbers[len(metrics) :]))
        loss["total"] = sum(loss.values())
        weight = 1.0 / self.config.parallelism.dp_degree
        losses: Metrics = {f"loss/{name}": Mean(value, weight) for name, value in loss.items()}
        return merge_metrics([*numbers[: len(metrics)], losses])

    @property
    def _echo_factor(self) -> float:
        """What echo weights are multiplied by, so that Echo has no more than its share."""
        return (self.state.echo_factor or 1.0) if self.config.loss.echo_share < 1 else 1.0

    def _find_echo_factor(self, grid: RankCells) -> None:
        """Before the first update that has both RL and Echo: a backward pass without a step."""
        most = self.config.loss.echo_share
        if self.state.echo_factor or most == 1 or not (grid.echo_tokens and grid.loss_tokens):
            return
        tokens, self.tokens = self.tokens, None
        measured = self._accumulate(grid, self.config.loss)
        self.tokens = tokens
        self.optimizers.zero_grad()
        if (share := _echo_share(measured)) is not None:
            self.state.echo_factor = first_factor(share, most=most)

    def _follow_echo_share(self, measured: Metrics) -> None:
        """After an update: what it measured decides the factor of the next one."""
        share, factor = _echo_share(measured), self.state.echo_factor
        if share is not None and factor:
            most = self.config.loss.echo_share
            self.state.echo_factor = next_factor(factor, share, most=most)

    def update(self, grid: RankCells) -> Metrics:
        """One optimizer step, on the thread of the caller; `train_step` is the endpoint."""
        self._find_echo_factor(grid)
        factor = self._echo_factor
        metrics = self._accumulate(grid, self.config.loss, factor)
        grad_norm = self.rank.clip_gradients(self.config.max_grad_norm)
        if not torch.isfinite(grad_norm):
            self.optimizers.zero_grad()
            raise FloatingPointError(
                f"the gradient norm is {grad_norm.item()} at policy version "
                f"{self.state.policy_version}; this update changed no weight. "
                f"{self._not_finite.first_of_ranks()}"
            )
        if found := self._not_finite.found:  # a constant may be NaN, and have no gradient
            self.optimizers.zero_grad()
            raise FloatingPointError(
                f"the loss is not finite at policy version {self.state.policy_version}: {found[0]}"
            )
        self._not_finite = NotFinite()  # forget the microbatches
        started = time.perf_counter()
        self._copied.result()
        blocked = time.perf_counter() - started
        self.optimizers.step()
        self.optimizers.zero_grad()
        if grid.echo_tokens and self.config.loss.echo_share < 1:
            self._follow_echo_share(metrics)
            metrics["echo_factor"] = Mean(factor, 1.0)
        return {
            **metrics,
            "train/grad_norm": Mean(grad_norm.item(), 1.0),
            "sync/blocked_seconds": Mean(blocked, 1.0),
        }

    def _forward_backward(
        self,
        cell: Microbatch,
        grid: RankCells,
        loss: LossConfig,
        shares: GradientShares | None,
        *,
        last: bool,
    ) -> "Pass":
        """Accumulate the gradient of one microbatch; that of the `last` completes the batch's."""
        self.rank.expect_backward(last=last, sync=self.config.gradient_sync)
        # Around the backward pass too: activation checkpointing runs the routers again.
        with self.rank.replaying(cell, on=self.config.router_replay):
            passed = self._forward(cell, grid, loss, keep_hidden=shares is not None)
            self._not_finite.watch(loss, passed.terms, passed.inputs, cell.names)
            predicted = passed.predicted
            slopes = slopes_of(passed.terms, passed.logprobs)
            # A cell of padding still runs backward: FSDP's collectives need every rank.
            predicted.logprobs.backward(slopes.sum(0))
        if shares and predicted.hidden is not None:
            shares.add(slopes, predicted.hidden)
        if self.tokens:
            self.tokens.add(cell, predicted.logprobs, predicted.entropies, passed.output)
        return passed

    def _forward(
        self, cell: Microbatch, grid: RankCells, loss: LossConfig, *, keep_hidden: bool = False
    ) -> "Pass":
        """A microbatch's share of the loss of the batch, and what was measured on the way."""
        predicted = self.rank.predict(cell, keep_hidden=keep_hidden)
        # Cut off from the model: each term's slopes are asked for before the one backward pass.
        logprobs = predicted.logprobs.detach().requires_grad_(torch.is_grad_enabled())
        cut_off = replace(predicted, logprobs=logprobs, hidden=None)
        rl, echo = cut_off.where(predicted.by_rl), cut_off.where(~predicted.by_rl)
        inputs = _inputs(rl)
        output = objective(loss, inputs)
        echoed = echo_loss(echo.logprobs, echo.streams.get("echo_alpha"))
        terms = batch_terms(
            output.terms,
            echoed.loss_sum,
            loss_tokens=grid.loss_tokens,
            echo_tokens=grid.echo_tokens,
        )
        values = {"entropy": rl.entropies}
        if inputs.generator_logprobs is not None:
            values |= mismatch(inputs)
        if (versions := rl.streams.get("token_versions")) is not None:
            values["policy_age"] = self.state.policy_version - versions
        measured = by_task(values, cell.tasks, rl.sequence_ids)
        metrics: Metrics = {**output.metrics, **echoed.metrics, **measured}
        return Pass(terms, logprobs, metrics, predicted, output, inputs)


@dataclass(slots=True)
class Pass:
    """A forward pass over a microbatch."""

    terms: dict[str, torch.Tensor]
    """The microbatch's share of each term of the batch's loss."""
    logprobs: torch.Tensor
    """[tokens] logprobs that the terms are computed from, cut off from the model."""
    metrics: Metrics
    predicted: "Predicted"
    output: Objective
    """Losses and metrics of RL, on the predicted tokens that train by it."""
    inputs: LossInputs
    """What RL's loss was computed from."""


def _echo_share(metrics: Metrics) -> float | None:
    """Echo's share of a gradient; None if it was the only term, or there was no gradient."""
    return metrics["grad_share/echo"].values()[""] if "grad_share/echo" in metrics else None


def _inputs(predicted: "Predicted") -> LossInputs:
    logprobs, streams = predicted.logprobs, predicted.streams
    return LossInputs(
        logprobs=logprobs,
        old_logprobs=streams.get("old_logprobs", logprobs.detach()),
        advantages=streams["advantage"],
        weights=streams["weight"],
        sequence_ids=predicted.sequence_ids.to(logprobs.device, non_blocking=True),
        generator_logprobs=streams.get("token_logprobs"),
        ref_logprobs=streams.get("ref_logprobs"),
        sequences=predicted.sequences,
    )

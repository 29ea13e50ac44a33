"""From a config to a finished run: the checks before any process starts, signals, and the end."""

import asyncio
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from monarch.actor import ActorError

from torchtitan_rl.config import RunConfig
from torchtitan_rl.config.models import SMOLLM2_FOLDER
from torchtitan_rl.config.resume import fixed_settings, free_settings
from torchtitan_rl.core.waiting import Interrupted
from torchtitan_rl.hosts.cluster import Cluster, PlannedHosts
from torchtitan_rl.hosts.launchers.launcher import chosen_launcher
from torchtitan_rl.hosts.link import HostLostError
from torchtitan_rl.hosts.messages import HostError
from torchtitan_rl.models.makers import smollm2
from torchtitan_rl.models.makers.tiny import write_tiny_model
from torchtitan_rl.observability.console import console, error_console, print_error, print_summary
from torchtitan_rl.observability.run_folder import RunFolder, describe_runs
from torchtitan_rl.observability.run_lock import RunLock
from torchtitan_rl.run.checks import check_installation, notices, resolved
from torchtitan_rl.run.controller import Controller
from torchtitan_rl.run.dry_run import dry_run
from torchtitan_rl.run.fork import resolve_fork
from torchtitan_rl.run.grace import grace_seconds
from torchtitan_rl.run.placements import describe as describe_placement
from torchtitan_rl.run.placements import place_actors
from torchtitan_rl.run.starting_model import model_folder
from torchtitan_rl.run.warm_start import check_demonstrations, ensure_starting_model
from torchtitan_rl.supervision.spawn import adopt_orphans, end_all_processes
from torchtitan_rl.tasks.trial import build_task, try_rewards

MOST_FAILURES = 20
"""How often in a row hosts may be lost without a new checkpoint before the run ends."""


def launch(config: RunConfig, *, dry: bool = False) -> int:
    """Check a config, train, and end every process; returns the exit code of the command. `dry`: a
    dry run in place of training."""
    lock = RunLock(run_path(config))
    try:
        if not dry:
            config = claim(config, lock)
        try_task(config)
        if not ensure_small_model(config):
            return 2
        check(config)
        if not dry and finished(config):
            return 0
        if dry and chosen_launcher(config.cluster) != "here":
            return show_hosts(config)
        adopt_orphans()
        return launch_dry_run(config) if dry else launch_run(config, lock)
    except (ValueError, HostError) as error:
        print_error("error", str(error))
        return 2
    except KeyboardInterrupt:
        return 130
    finally:  # when all processes of the run are gone
        lock.release()


def run_path(config: RunConfig) -> Path:
    """The folder of a run."""
    return Path(config.output_dir) / config.run_name


def claim(config: RunConfig, lock: RunLock) -> RunConfig:
    """Make sure that the run's folder is for this process alone, and in the state that was asked
    for; returns the config with what a fork starts from."""
    if not config.run_name:
        raise ValueError(
            f"--resume needs the --run_name of the run to continue. "
            f"{describe_runs(config.output_dir)}"
        )
    if config.resume:  # before a folder is made for its lock
        RunFolder(run_path(config), resume=True)
    lock.acquire()
    RunFolder(run_path(config), resume=config.resume)
    return resolve_fork(config)


def launch_run(config: RunConfig, lock: RunLock) -> int:
    """Train, and end every process; returns the exit code."""
    folder = run_path(config)
    try:
        asyncio.run(train(config, lock))
    except (Interrupted, KeyboardInterrupt, asyncio.CancelledError):
        console.print(f"stopped; {how_to_go_on(folder)}", markup=False)
        return 130
    except Exception as error:
        print_error("the run failed", describe(error))
        error_console.print(f"{saved_traceback(folder)}{how_to_go_on(folder)}", markup=False)
        return 1
    finally:
        end_all_processes()
    return 0


def saved_traceback(folder: Path) -> str:
    """Write the traceback of the error that is handled to the run's logs; returns where, for a
    message. Empty if there are no logs, or no room for them."""
    log = folder / "logs" / "controller.log"
    try:
        log.write_text(traceback.format_exc())
    except OSError:
        return ""
    return f"logs: {log.parent}; "


def show_hosts(config: RunConfig) -> int:
    """Print what a run on several hosts would start, and where; nothing is started."""
    cluster = Cluster(config.cluster, run=config.run_name)
    for line in cluster.describe():
        console.print(line, markup=False)
    if config.cluster.hosts:
        placements = place_actors(config, PlannedHosts(config.cluster))
        for name, placement in placements.used(environment=False, reference=config.has_reference):
            console.print(f"{name}: {describe_placement(placement)}", markup=False)
        console.print("hosts were not asked: with GPUs, actors may go to others", markup=False)
    else:
        console.print("actors are placed when the hosts are known", markup=False)
    console.print(
        "nothing was started; to sample a prompt of each task on this host, leave the hosts out",
        markup=False,
    )
    return 0


def launch_dry_run(config: RunConfig) -> int:
    """Sample and grade a prompt of each task, and end every process; returns the exit code."""
    try:
        asyncio.run(dry_run(config, stop_signals))
    except (Interrupted, KeyboardInterrupt, asyncio.CancelledError):
        return 130
    except Exception as error:
        print_error("the dry run failed", describe(error))
        return 1
    finally:
        end_all_processes()
    console.print("the dry run went well: nothing was trained, nothing is saved", markup=False)
    return 0


def describe(error: BaseException) -> str:
    """What went wrong, in words. The traceback, of an actor's error the actor's, is in the logs."""
    where = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    if isinstance(error, ActorError):
        return describe(error.exception) + where
    said = str(error) if isinstance(error, RuntimeError) else f"{type(error).__name__}: {error}"
    return said + where


def how_to_go_on(folder: Path) -> str:
    """What the user can do after a run that did not end by itself."""
    if (folder / "config.json").exists():
        return f"the same command with --run_name {folder.name} --resume continues"
    return "the same command starts again: the run itself had not begun"


def try_task(config: RunConfig) -> None:
    """Refuse a task that cannot work: before a model is fetched for it, and any process starts."""
    task = build_task(config.task, seed=config.seed)
    if config.rollout.train_from:  # it grades nothing
        return
    for notice in try_rewards(task, seconds=config.rollout.grader.timeout_seconds):
        console.print(f"note: {notice}", markup=False)


def ensure_small_model(config: RunConfig) -> bool:
    """The model that recipes for a laptop name is made when it is first asked for. False: it could
    not be made, which has been said."""
    if Path(config.model) != Path(SMOLLM2_FOLDER):
        return True
    if not smollm2.why_to_make(Path(config.model)):
        return True
    # By a process of its own: this one would keep what it imports, 0.5 GB, for the whole run.
    make = [sys.executable, "-m", "torchtitan_rl", "model", "--folder", config.model]
    return subprocess.run(make).returncode == 0


def check(config: RunConfig) -> None:
    """Everything that can be found wrong, or worth a word, before a process starts."""
    for notice in (*check_installation(config), *notices(config)):
        console.print(f"note: {notice}", markup=False)
    with tempfile.TemporaryDirectory() as temporary:
        trial = config
        if not config.model and config.warm_start and not model_folder(config).exists():
            # The model that the warm start will make has this shape.
            stand_in = write_tiny_model(
                Path(temporary) / "model",
                seed=0,
                weights=False,
                experts=config.warm_start.experts,
            )
            trial = replace(config, model=str(stand_in))
        controller = Controller(trial)
        if trial is not config:
            check_demonstrations(controller)
    given, asked = len(controller.heldout), config.evaluation.prompts
    if given < asked and not config.rollout.train_from:
        console.print(
            f"note: evaluations are of {given} held-out prompts: task {config.task.name!r} has "
            f"fewer than evaluation.prompts ({asked})",
            markup=False,
        )
    final = resolved(config)
    controller.folder.changes(
        final.to_dict(), fixed=fixed_settings(final), free=free_settings(final)
    )


def finished(config: RunConfig) -> bool:
    """Whether a run that is to be resumed has nothing left to do; says so."""
    if not config.resume:
        return False
    folder = RunFolder(run_path(config), resume=True)
    done = folder.latest_checkpoint() or 0
    if done < config.steps or not folder.model.exists():
        return False
    console.print(
        f"{folder.relative} has done its {done} steps; continue with a higher --steps", markup=False
    )
    print_summary(folder)
    return True


async def train(config: RunConfig, lock: RunLock) -> None:
    """Connect the hosts of the run, make the starting model if there is none yet, and train."""
    async with AsyncExitStack() as stack:
        with stop_signals():
            cluster = Cluster(config.cluster, run=config.run_name)
            await stack.enter_async_context(cluster)
        await outlast_hosts(cluster, lambda: ensure_starting_model(config, stop_signals, cluster))
        await train_on(cluster, config, lock)


async def train_on(cluster: Cluster, config: RunConfig, lock: RunLock) -> None:
    """Train on these hosts. If hosts of the trainer are lost, go on from the last checkpoint when
    they are back."""
    tried = False

    async def attempt() -> None:
        nonlocal tried
        resume = config.resume or (tried and (run_path(config) / "config.json").exists())
        tried = True
        controller = Controller(replace(config, resume=resume), lock=lock, cluster=cluster)
        with stop_signals(controller):
            async with controller:
                await controller.run()

    folder = RunFolder(run_path(config), resume=config.resume)
    await outlast_hosts(cluster, attempt, reached=folder.latest_checkpoint)


async def outlast_hosts(
    cluster: Cluster,
    attempt: Callable[[], Awaitable[None]],
    *,
    reached: Callable[[], int | None] = lambda: None,
) -> None:
    """Make an attempt at something, and another whenever it has failed because hosts were lost,
    when they are back; but not for ever, if what is `reached` stays where it is."""
    failures, last = 0, reached()
    while True:
        try:
            await attempt()
            return
        except Exception as error:
            failures = 1 if reached() != last else failures + 1
            last = reached()
            if (lost := lost_host(error)) is None:
                raise
            if failures == MOST_FAILURES:
                error.add_note(f"{failures} times, without a new checkpoint")
                raise
            console.print(f"{lost}; waiting for hosts", markup=False)
        with stop_signals():
            await cluster.wait_for_all()


def lost_host(error: BaseException | None) -> HostLostError | None:
    """The error about a lost host that has led to an error, if one has."""
    while error is not None and not isinstance(error, HostLostError):
        error = error.__cause__ or error.__context__
    return error


@contextmanager
def stop_signals(controller: Controller | None = None) -> Iterator[None]:
    """Ctrl-C and SIGTERM stop the run in order; a second one, or a hang, stops it at once. Without
    a controller there is nothing to save, and the first one does."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    timers: list[asyncio.TimerHandle] = []

    def on_signal() -> None:
        if controller is None or controller.interrupted.is_set():
            task.cancel()
            return
        console.print("stopping (Ctrl-C once more: at once) ...", markup=False)
        controller.interrupted.set()
        grace = grace_seconds(controller.config, controller.longest_training)
        timers.append(loop.call_later(grace, task.cancel))

    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    except Exception as error:
        stopped = controller is not None and controller.interrupted.is_set()
        if stopped and (lost := lost_host(error)):  # nothing can be saved any more
            console.print(f"{lost}; what came after the last checkpoint is lost", markup=False)
            raise Interrupted from error
        raise
    finally:
        for timer in timers:
            timer.cancel()
        for number in numbers:
            loop.remove_signal_handler(number)

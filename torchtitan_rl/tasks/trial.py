"""Trial of a task before a run: it is built, gives examples, and grades canned text.

Reward functions of the user's own are tried in another process, as they run in one of their own
later: they may hang, or end it.
"""

import contextlib
import copy
import os
import pickle
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, Any

import cloudpickle

from torchtitan_rl.config.task import TaskConfig
from torchtitan_rl.core.errors import describe_error
from torchtitan_rl.core.types import Completion, Rollout, Turn
from torchtitan_rl.platform.parent import die_with
from torchtitan_rl.tasks.checked import TaskError, build, heldout_examples, train_example
from torchtitan_rl.tasks.rewards import RewardError, check_rewards
from torchtitan_rl.tasks.task import Example, Task

BUILD_SECONDS = 600.0
"""How long a task may take to build: it may have to read its data."""
BUILT = b"!"
"""First byte that the trial's process sends; what a reward may take counts from here."""
CANNED = "This is a trial."


@dataclass(frozen=True, slots=True)
class Trial:
    """Samples of one example that the reward function is tried on."""

    task: str
    rollouts: list[Rollout]
    expected_answer: Any


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is wrong with a reward function."""

    said: str
    always: bool
    """Whether it failed on every text that it was tried on."""


def build_task(config: TaskConfig, *, seed: int) -> Task:
    """The task, with its settings, its tools and its first example checked; an error of its code
    says where that is."""
    task = build(config, seed=seed)
    for member in task.members().values():
        _ = member.tools  # each is described, or the reason why it cannot be is raised
        member.check()
        train_example(member, 0)
    return task


def try_rewards(task: Task, *, seconds: float) -> list[str]:
    """Call the reward functions of the user's own with canned text: two samples of a training
    example, one of a held-out one. One that cannot work is refused; returns what is worth a word.

    `seconds` is how long a reward function may take.
    """
    own = {name: member for name, member in task.members().items() if not is_built_in(member)}
    if not own:
        return []
    verdicts = _verdicts(task, trials(own), seconds)
    for verdict in verdicts:
        if verdict.always:
            raise TaskError(verdict.said)
    return [f"{verdict.said}; a group for which it does is dropped" for verdict in verdicts]


def is_built_in(task: Task) -> bool:
    """Whether the reward function came with this package."""
    return type(task).reward.__module__.startswith(f"{__package__}.")


def trials(tasks: Mapping[str, Task]) -> list[Trial]:
    """What the reward functions of these tasks are tried on."""
    found = []
    for name, task in tasks.items():
        example, heldout = train_example(task, 0), heldout_examples(task, 1)[0]
        for one, texts in ((example, [right(example), CANNED]), (heldout, [right(heldout)])):
            rollouts = [canned_rollout(one, text, number) for number, text in enumerate(texts)]
            found.append(Trial(name, rollouts, one.expected_answer))
    return found


def right(example: Example) -> str:
    """A text that may be right: the expected answer."""
    return str(example.expected_answer)


def canned_rollout(example: Example, text: str, sample: int) -> Rollout:
    """A rollout in which the model says the text, calls no tool, and ends."""
    tokens = list(range(len(text.split()) or 1))
    completion = Completion(
        policy_version=0,
        prompt_idx=0,
        prompt_token_ids=[0],
        text=text,
        token_ids=tokens,
        token_logprobs=[-1.0] * len(tokens),
    )
    messages = [*example.messages, {"role": "assistant", "content": text}]
    state = copy.deepcopy(example.state)
    return Rollout([Turn(completion)], messages, state=state, group_id="trial", sample=sample)


# ---- in the process that a user has started ------------------------------------------------------


def _verdicts(task: Task, wanted: list[Trial], seconds: float) -> list[Verdict]:
    """What the trial's process found; its death, or a hang, is a verdict too."""
    names = ", ".join(sorted({repr(trial.task) for trial in wanted}))
    ours, theirs = os.pipe()
    with tempfile.TemporaryFile() as said, os.fdopen(ours, "rb", buffering=0) as results:
        process = _start(theirs, said, cloudpickle.dumps((task.config, task.seed, wanted)))
        os.close(theirs)
        try:
            built = _read(results, BUILD_SECONDS, most=1) == BUILT
            found = _read(results, seconds * len(wanted)) if built else b""
        except TimeoutError as error:
            late = f"gave no answer in {error} s"
            return [Verdict(f"reward function of task {names}, on trial, {late}", always=True)]
        finally:
            process.kill()
            process.wait()
        if found:
            return pickle.loads(found)
        what = f"reward function of task {names}, on trial," if built else f"building task {names}"
        said.seek(0)
        last = said.read().decode(errors="replace").strip().splitlines()[-1:]
        return [Verdict(": ".join([f"{what} ended its process", *last]), always=True)]


def _start(results: int, said: IO[bytes], request: bytes) -> subprocess.Popen:
    path = os.pathsep.join(path or os.getcwd() for path in sys.path)
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, str(results), str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=said,
        stderr=said,
        pass_fds=[results],
        env={**os.environ, "PYTHONPATH": path},
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin:
        process.stdin.write(request)
    return process


def _read(source: IO[bytes], seconds: float, most: int = -1) -> bytes:
    """All bytes up to the end, or `most` of them; none if the process has ended before."""
    deadline, read = time.monotonic() + seconds, b""
    while most < 0 or len(read) < most:
        left = max(deadline - time.monotonic(), 0.0)
        if not select.select([source], [], [], left)[0]:
            raise TimeoutError(f"{seconds:g}")
        if not (more := source.read(most if most > 0 else 2**16)):
            break
        read += more
    return read


# ---- in the trial's process ----------------------------------------------------------------------


def main() -> None:
    """`python -m torchtitan_rl.tasks.trial <results> <parent>`, the task and trials on stdin."""
    results, parent = os.fdopen(int(sys.argv[1]), "wb", buffering=0), int(sys.argv[2])
    die_with(parent)
    config, seed, wanted = pickle.load(sys.stdin.buffer)
    task: Task = config.build(seed=seed)
    members = task.members()
    results.write(BUILT)
    verdicts = [verdict for trial in wanted for verdict in judge(members[trial.task], trial)]
    results.write(pickle.dumps(verdicts))


def judge(task: Task, trial: Trial) -> list[Verdict]:
    """What is wrong with the reward function, as one verdict or none. If it raises, each sample is
    tried alone: a reward function may raise on some texts, and works nevertheless."""
    said = _failure(task, trial, trial.rollouts)
    if said is None:
        return []
    if isinstance(said, RewardError):
        return [Verdict(str(said), always=True)]
    alone = [_failure(task, trial, [rollout]) for rollout in trial.rollouts]
    return [Verdict(said, always=len(alone) > 1 and None not in alone)]


def _failure(task: Task, trial: Trial, rollouts: list[Rollout]) -> str | RewardError | None:
    """How the reward function fails: by raising, or by what it returns."""
    texts = " and ".join(repr(rollout.text[:40]) for rollout in rollouts)
    whose = f"reward function of task {trial.task!r}, on trial with {texts},"
    try:
        rewards = task.reward(copy.deepcopy(rollouts), trial.expected_answer)
        check_rewards(rewards, len(rollouts), whose, task.reward)
    except RewardError as error:
        return error
    except BaseException as error:  # SystemExit too
        return f"{whose} raised {describe_error(error, type(task).__module__)}"
    return None


if __name__ == "__main__":
    from torchtitan_rl.tasks import trial  # so that pickles name it, and not __main__

    trial.main()

"""Contracts of the actors: what each endpoint takes, returns and may raise, and what happens then.

An actor of your own needs no base class but Monarch's `Actor`. It has the endpoints of its
protocol, each decorated with Monarch's `endpoint` or `concurrent_endpoint`. `check_contract`
refuses a class that lacks one, and names it, before anything is started.

Three things are the same for all of them:

- `setup` is called once, before anything else. An error of it ends the start of the actor.
- An actor is replaced if an endpoint raises `core.errors.ActorBrokenError` or does not return
  within `supervision.deadline_seconds`, or if a process ends. The failure policy of its kind (see
  `supervision.dispatch`) decides what becomes of the calls that were under way.
- Any other error of an endpoint is about that one call; the actor is called again.
"""

import inspect
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from torchtitan_rl.config.sampling import SamplingConfig
from torchtitan_rl.core.errors import TorchtitanRLError
from torchtitan_rl.core.types import (
    Completion,
    Message,
    Outcome,
    Prompt,
    Rollout,
    ScoredCompletion,
)
from torchtitan_rl.tasks.rewards import RewardError
from torchtitan_rl.tasks.task import Reward
from torchtitan_rl.tasks.tools.tool import ToolCall, ToolFailure

if TYPE_CHECKING:  # the grader's process has no torch
    import torch

    from torchtitan_rl.batching.grid import RankCells
    from torchtitan_rl.core.metrics import Metrics
    from torchtitan_rl.weight_sync.handle import Transport, WeightHandle

# ---- generators --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """A request to the generators for one completion."""

    prompt_token_ids: list[int]
    sampling: SamplingConfig
    """How to sample the completion; `n` is 1."""
    group_id: str
    """Requests of one group go to one generator, as long as its cache of their prefix is good."""
    seed_name: str
    """The seed of the sample derives from this name, `seed_number` and the run's seed."""
    seed_number: int = 0


@dataclass(frozen=True, slots=True)
class SampleFailure:
    """A request that failed."""

    kind: Literal["failed", "empty"]
    """`failed`: an error, named in the reason; `empty`: no token was sampled."""
    reason: str


Sample = Completion | SampleFailure
"""The result of a SampleRequest."""


class GeneratorProtocol(Protocol):
    """Samples completions of prompts. Made as `Class(config, model=…, seed=…, **kwargs)`: the
    generator's config, the HF folder to start from, the run's seed, and `generator.kwargs`.

    Calls overlap if the endpoints are concurrent ones. When a generator dies, its unfinished
    requests run again on another one. Its successor gets the current weights before it gets work.
    """

    async def setup(self) -> None:
        """Load the model of the folder."""

    async def generate(
        self,
        prompts: list[Prompt],
        *,
        sampling_config: SamplingConfig | list[SamplingConfig] | None = None,
        group_ids: list[str] | None = None,
        sample_numbers: list[int] | None = None,
    ) -> list[Completion]:
        """`n` completions of each prompt, ordered by prompt, then sample.

        A run gives token ids, and for each other argument a list with an item for each prompt. It
        asks for one sample per prompt (n is 1). A backend that samples at random should
        derive the seed of a sample from the run's seed, its group id and its sample number, and
        from nothing else. The run can then be repeated.

        After an error every prompt of the call runs again by itself. The rollout of a prompt that
        fails alone is lost, with the error as the reason.
        """
        ...

    async def cancel(self, group_ids: list[str]) -> None:
        """End the calls of these groups: nobody waits for them any more. May do nothing."""

    async def pull_weights(self, handle: "WeightHandle") -> int:
        """Serve the published weights from now on; returns their version.

        Completions that are sampled later carry that version as their `policy_version`. A backend
        whose completions do not depend on the weights only stores the version. An error ends the
        run: no generator may continue with unknown weights.
        """
        ...


class ColocatedGeneratorProtocol(Protocol):
    """What a generator has beside `GeneratorProtocol` to share its GPUs with the trainer. Both
    calls may come again for a generator that is asleep, or awake, already."""

    async def sleep(self) -> int:
        """Give back the memory of weights and KV cache until `wake`; returns how many bytes that
        were. Nothing is under way; calls of `generate` that come meanwhile raise an error."""
        ...

    async def wake(self, handle: "WeightHandle") -> int:
        """Serve the published weights from now on, as `pull_weights` does; returns their
        version."""
        ...


# ---- graders -----------------------------------------------------------------------------------


@dataclass(slots=True)
class UngradedGroup:
    """The samples of one prompt, and what the reward function needs to know about it."""

    completions: list[Completion] | list[Rollout]
    expected_answer: Any
    group_id: str = "?"
    task: str | None = None
    """The task's name, in a mixture of tasks."""


GroupRewards = list[Reward] | RewardError
"""A reward for each sample of a group, or why the group has none."""


class GraderProtocol(Protocol):
    """Calls the task's reward function. Made as `Class(config, task=…, seed=…)`.

    If the grader dies over a call, the call is made again, one group at a time. A group over which
    the grader dies again fails, and only that one.
    """

    async def setup(self) -> None:
        """Build the task."""

    async def score(
        self,
        completions: list[Completion] | list[Rollout],
        expected_answer: Any,
        *,
        group_id: str = "?",
        task: str | None = None,
    ) -> list[ScoredCompletion]:
        """The samples of one group with their rewards, in order: for scripts and notebooks. A
        reward function that fails is raised as RewardError."""
        ...

    async def rewards(self, groups: list[UngradedGroup]) -> list[GroupRewards]:
        """The rewards of each group, in order. A reward function that fails is no error of the
        call: its group gets a RewardError in the place of its rewards."""
        ...


# ---- environments ------------------------------------------------------------------------------


@dataclass(slots=True)
class EnvironmentRequest:
    """The model's last message, and the conversation that it belongs to."""

    task: str
    """Name of the task, one of `Task.members`."""
    messages: list[Message]
    """The whole conversation, up to the model's last message."""
    calls: list[ToolCall]
    """Tool calls of the last message; if there are none, the task is asked for an answer."""
    state: dict[str, Any]
    seconds: float | None = None
    """What is left of the rollout's time. It includes waiting, and calls that are made again
    because the environment died. None: no limit."""


@dataclass(slots=True)
class EnvironmentResponse:
    """What the model is shown next."""

    messages: list[Message]
    """Messages to add to the conversation; none ends it."""
    state: dict[str, Any]
    outcomes: list[Outcome]
    """The outcome of each call."""
    failure: str = ""
    """Why there is no answer from the task, if it should have given one."""
    tool_failures: list[ToolFailure | None] = field(default_factory=list)
    """How the tool of each call failed. None if it did not fail: it returned a result, the call was
    wrong, or the conversation had no time left for it."""


class EnvironmentProtocol(Protocol):
    """Makes tool calls, and answers for the task. Made as `Class(config, task=…, seed=…)`.

    An environment keeps no conversation: all state comes with a request and goes with its response.
    If it dies over a call, its successor makes the call again. If that dies too, each conversation
    of the call continues by itself, and the one that kills ends as `environment_failed`.
    """

    async def setup(self) -> None:
        """Build the task and start what its tools need."""

    async def respond(self, requests: list[EnvironmentRequest]) -> list[EnvironmentResponse]:
        """A response to each request, in order. A tool that fails is no error of the call: the
        model is shown it, and the outcome of the tool call says how."""
        ...


# ---- trainer and reference ---------------------------------------------------------------------


class TrainerProtocol(Protocol):
    """One rank of the trainer's mesh. Made as `Class(config, model=…, steps=…, checkpoint_folder=…,
    tokens_folder=…, weights_folder=…, keep=…, async_mode=…, seed=…, **kwargs)`.

    An error of any endpoint ends the run, and so does a rank that ends. The run can be resumed from
    its latest checkpoint.
    """

    async def setup(self, *, resume: bool) -> None:
        """Load the latest checkpoint if `resume`, else the model."""

    async def steps_done(self) -> int:
        """Number of the run's steps that were done when the loaded weights were saved."""
        ...

    async def train_step(self, *grids: "RankCells", step: int = 0) -> "Metrics":
        """One optimizer step on this rank's cells of each grid; returns its measurements."""
        ...

    async def measure(self, grid: "RankCells") -> "Metrics":
        """What a step on these cells would measure; nothing is trained."""
        ...

    async def publish_weights(
        self, *, transport: "Transport", dtype: "torch.dtype | None"
    ) -> "WeightHandle":
        """A snapshot of this rank's weights. Generators can read it until the next but one."""
        ...

    async def save(self, step: int, *, wait: bool = True) -> None:
        """Write a checkpoint from which `setup(resume=True)` goes on exactly. Without `wait` it may
        be written later, but of the state of now; with it, it is complete, also if it was begun by
        an earlier call."""

    async def export_hf(self, folder: str) -> None:
        """Write the weights as an HF folder."""


class ColocatedTrainerProtocol(Protocol):
    """What a rank of the trainer has beside `TrainerProtocol` to share its GPUs with generators.
    Both calls may come again for a trainer that is asleep, or awake, already."""

    async def sleep(self) -> int:
        """Give back what memory can be given back until `wake`; returns how many bytes that were.
        No other call comes meanwhile. A snapshot that was published stays readable."""
        ...

    async def wake(self) -> None:
        """Have all back as it was."""


class ReferenceProtocol(Protocol):
    """One rank of the frozen reference model. Made as `Class(config, model=…)`.

    If it dies over a call, its successor makes the call again, up to three times.
    """

    async def setup(self) -> None:
        """Load the model."""

    async def logprobs(self, grid: "RankCells") -> "list[torch.Tensor]":
        """[tokens] logprobs for each of this rank's cells of a grid."""
        ...


# ---- checking a class --------------------------------------------------------------------------


class ContractError(TorchtitanRLError, ValueError):
    """A class that cannot be used as an actor of its kind."""


def check_contract(actor_class: type, protocol: type, *, what: str) -> None:
    """Refuse a class that lacks an endpoint of its protocol, or an argument of one.

    Example:
        check_contract(MyGenerator, GeneratorProtocol, what="generator.backend 'mine:MyGenerator'")
    """
    methods = [name for name in vars(protocol) if not name.startswith("_")]
    missing = [name for name in methods if not hasattr(actor_class, name)]
    if missing:
        raise ContractError(f"{what} has no endpoint {', '.join(missing)}; see docs/backends.md")
    for name in methods:
        method = getattr(getattr(actor_class, name), "_method", None)  # Monarch's EndpointProperty
        if method is None:
            raise ContractError(
                f"{what}: {name} is no endpoint; decorate it with monarch.actor.concurrent_endpoint"
            )
        if lacks := _lacking(inspect.signature(getattr(protocol, name)), inspect.signature(method)):
            raise ContractError(f"{what}: {name} does not take {', '.join(lacks)}")


def _lacking(wanted: inspect.Signature, has: inspect.Signature) -> list[str]:
    """Keyword arguments that a run gives and the method does not take."""
    kinds = {parameter.kind for parameter in has.parameters.values()}
    if inspect.Parameter.VAR_KEYWORD in kinds:
        return []
    return [
        parameter.name
        for parameter in wanted.parameters.values()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and parameter.name not in has.parameters
    ]

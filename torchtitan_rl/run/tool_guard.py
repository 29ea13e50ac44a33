"""Whether failing tool calls are chance, and whether the tool or the model is to blame."""

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from torchtitan_rl.actors.interfaces import EnvironmentRequest, EnvironmentResponse
from torchtitan_rl.config.supervision import SupervisionConfig
from torchtitan_rl.core.errors import TorchtitanRLError
from torchtitan_rl.core.types import Outcome
from torchtitan_rl.observability.console import console
from torchtitan_rl.tasks.tools.tool import ToolCall, ToolFailure

FEW_CALLS = 16
"""Fewer calls than this that all fail may be chance."""
LONGEST_SHOWN = 200
"""Characters of a call, or of the message that answered it, on the console."""


class BrokenToolError(TorchtitanRLError, RuntimeError):
    """A tool does nothing but fail; the message says how, at which line and for which call."""


class ToolGuard:
    """Watches the tool calls of a run; warns when all of them go wrong, and raises when a tool does
    nothing but fail.

    Calls that the model got wrong never end a run: it is to learn. A tool that is to blame itself
    ends it after `supervision.most_failed_tool_calls` in a row. A tool that refuses every call with
    an exception that may be about the arguments ends it after `most_untrainable_steps` steps.

    Example:
        guard = ToolGuard(SupervisionConfig())
        guard.note(requests, responses)
        guard.check_step()
    """

    def __init__(self, config: SupervisionConfig) -> None:
        self._most_calls = config.most_failed_tool_calls
        self._most_steps = config.most_untrainable_steps
        self._tools: defaultdict[tuple[str, str], _Tool] = defaultdict(_Tool)
        self._models: defaultdict[str, _Model] = defaultdict(_Model)
        self.warns_of_model = True
        """Whether to warn when the model gets every call wrong."""

    def note(
        self,
        requests: Sequence[EnvironmentRequest],
        responses: Sequence[EnvironmentResponse],
    ) -> None:
        """Count the calls of these requests."""
        for request, response in zip(requests, responses, strict=True):
            told = [str(message.get("content", "")) for message in response.messages]
            for number, (call, outcome) in enumerate(
                zip(request.calls, response.outcomes, strict=True)
            ):
                failure = response.tool_failures[number]
                if outcome == "ok" or failure:
                    self._tools[request.task, call.name].note(call, failure)
                shown = told[number] if number < len(told) else ""
                self._models[request.task].note(outcome, shown)

    def check_step(self) -> None:
        """Judge the calls since the last check, at the end of a step's rollouts."""
        for (task, name), tool in self._tools.items():
            if tool.failed:
                tool.steps_in_a_row = 0 if tool.ok else tool.steps_in_a_row + 1
            if tool.steps_in_a_row >= self._most_steps:
                raise BrokenToolError(
                    f"every call of tool {name!r} of task {task!r} failed for "
                    f"{tool.steps_in_a_row} steps in a row: {tool.first}. {UNCLEAR}"
                )
        self.check()

    def check(self) -> None:
        """Judge the calls since the last check."""
        for (task, name), tool in self._tools.items():
            if tool.in_a_row >= self._most_calls:
                raise BrokenToolError(
                    f"tool {name!r} of task {task!r} failed in {tool.in_a_row} calls in a row: "
                    f"{tool.first}. The tool is to blame, and not the model, whose calls were well "
                    "formed. If its arguments are what is wrong, let the tool raise "
                    "torchtitan_rl.ArgumentsError; or raise supervision.most_failed_tool_calls"
                )
            if said := tool.warning():
                console.print(f"warning: tool {name!r} of task {task!r} {said}", markup=False)
        for task, model in self._models.items():
            if self.warns_of_model and (said := model.warning()):
                console.print(f"warning: task {task!r}: {said}", markup=False)

    def failures(self) -> list[str]:
        """The tools that have failed by their own fault, each with a failure."""
        return [
            f"tool {name!r} of task {task!r} failed: {tool.first}"
            for (task, name), tool in self._tools.items()
            if tool.first and tool.clear
        ]


UNCLEAR = (
    "Either the tool has a bug, or the model never gives it arguments that it takes: look at the "
    "call. A tool that raises torchtitan_rl.ArgumentsError says that the arguments are wrong"
)


@dataclass(slots=True)
class _Tool:
    """The calls of one tool that were in order."""

    in_a_row: int = 0
    """Calls in a row that failed, with the tool to blame."""
    steps_in_a_row: int = 0
    """Steps in which every call failed."""
    first: str = ""
    """A failure, with the call."""
    clear: bool = True
    """Whether the tool is to blame for the failure in `first`."""
    warned: bool = False
    ok: int = 0
    """Calls that were answered, since the last check; `failed` are the others."""
    failed: int = 0

    def note(self, call: ToolCall, failure: ToolFailure | None) -> None:
        if failure is None:
            self.ok += 1
            self.in_a_row = self.steps_in_a_row = 0
            return
        self.failed += 1
        self.in_a_row += failure.clear
        if not self.first or (failure.clear and not self.clear):
            arguments = json.dumps(call.arguments, ensure_ascii=False, default=repr)
            self.first = f"{failure.said}, called with {cut(arguments)}"
            self.clear = failure.clear

    def warning(self) -> str:
        """What to say of the calls since the last check, if anything; once for each tool."""
        ok, failed, first = self.ok, self.failed, self.first
        self.ok = self.failed = 0
        if ok:
            self.first = ""
        always = failed >= FEW_CALLS and not ok
        # Of arguments that a tool does not take now and then, the line of the step says enough.
        if self.warned or not failed or not (always or self.clear):
            return ""
        self.warned = True
        if not always:
            return f"failed in {failed} of {ok + failed} calls: {first}"
        blame = "The tool is to blame, and not the model" if self.clear else UNCLEAR
        return f"failed in each of {failed} calls: {first}. {blame}"


@dataclass(slots=True)
class _Model:
    """The calls of a task's tools, by how the model did."""

    outcomes: Counter[Outcome] = field(default_factory=Counter)
    """Calls by outcome, since the last check."""
    first: str = ""
    """The message that answered the first call that was wrong."""
    warned: bool = False

    def note(self, outcome: Outcome, told: str) -> None:
        self.outcomes[outcome] += 1
        if outcome in ("malformed", "unknown") and not self.first:
            self.first = told

    def warning(self) -> str:
        """What to say if the model got every call wrong; once, until it gets one right."""
        counts, first = self.outcomes, self.first
        self.outcomes, self.first = Counter(), ""
        wrong = counts["malformed"] + counts["unknown"]
        if counts.total() > wrong:
            self.warned = False
        elif wrong >= FEW_CALLS and not self.warned:
            self.warned = True
            return (
                f"the model got each of {wrong} tool calls wrong ({counts['malformed']} malformed, "
                f"{counts['unknown']} of unknown tools), so no tool is to blame; the model was "
                f"shown: {cut(first)}"
            )
        return ""


def cut(text: str) -> str:
    """A text for one line of the console."""
    line = " ".join(text.split())
    return line if len(line) <= LONGEST_SHOWN else f"{line[:LONGEST_SHOWN]} …"

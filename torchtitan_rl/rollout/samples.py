"""Samples on the console: what the model was asked, said and should have said, and its reward."""

import json
import unicodedata
from collections.abc import Iterable, Sequence

from torchtitan_rl.core.types import Message, Status
from torchtitan_rl.observability.console import console
from torchtitan_rl.rollout.metrics import graded
from torchtitan_rl.rollout.record import RolloutRecord

LONGEST_TEXT = 600
"""Most characters of a message that are shown; of a longer one, the start and the end."""
MOST_LINES = 12
"""Most lines of a message that are shown."""
MARGIN = " " * 10


class SampleReporter:
    """Shows a sample at the first step, when all rewards of a step are equal, and at each
    evaluation: always the same held-out prompt, so that one can see it change.

    While rewards stay equal, a sample is shown after 1, 2, 4, 8 … steps, each time another one.

    Example:
        reporter = SampleReporter()
        reporter.of_step(0, records)
        reporter.of_evaluation(10, evaluated)
    """

    def __init__(self, *, on: bool = True) -> None:
        self._on, self._first, self._equal_steps = on, True, 0

    def of_step(self, step: int, records: Sequence[RolloutRecord]) -> None:
        """Show one of these rollouts, if there is a reason."""
        samples = graded(records)
        if not self._on or not samples:
            return
        first, self._first = self._first, False
        equal = len(samples) > 1 and len({sample.reward for sample in samples}) == 1
        self._equal_steps = self._equal_steps + 1 if equal else 0
        if equal and _power_of_two(self._equal_steps):
            what = f"all {len(samples)} samples of step {step} have the reward"
            shown = samples[(self._equal_steps - 1) % len(samples)]
            show(f"{what} {shown.reward:g}; one of them", shown)
        elif first:
            show(f"a sample of step {step}", samples[0])

    def of_evaluation(self, steps_done: int, records: Sequence[RolloutRecord]) -> None:
        """Show the first of these rollouts."""
        samples = graded(records)
        if self._on and samples:
            steps = f"{steps_done} step{'s' * (steps_done != 1)}"
            show(f"a held-out sample after {steps}, greedy", samples[0])


def show(title: str, record: RolloutRecord) -> None:
    """Print a sample."""
    lines = [f"{title}: {record.group}", *sample_lines(record)]
    console.print("\n".join(lines), markup=False)


def show_lines(text: str) -> None:
    """Print a text in full, indented."""
    lines = harmless(text).split("\n")
    console.print("\n".join(f"  │ {line}" for line in lines), markup=False)


def sample_lines(record: RolloutRecord) -> list[str]:
    """A sample as lines of a console.

    Example:
        prompt    user: What is 3 + 4?
        said      The sum is 7.
        expected  7
        reward    0, wrong
    """
    prompt, said = split_messages(record.messages, record.turns)
    return [
        *_entry("prompt", map(_with_role, prompt)),
        *_entry("said", map(_said, said)),
        *_entry("expected", [harmless(str(record.expected_answer))]),
        *_entry("reward", [reward_line(record)]),
    ]


def split_messages(
    messages: Sequence[Message], turns: int
) -> tuple[Sequence[Message], Sequence[Message]]:
    """The messages of a prompt, and those of the conversation after it: from the first of the
    model's own turns on.

    Example:
        >>> split_messages([{"role": "user"}, {"role": "assistant"}], turns=1)
        ([{'role': 'user'}], [{'role': 'assistant'}])
    """
    own = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
    start = own[-turns] if 0 < turns <= len(own) else len(messages)
    return messages[:start], messages[start:]


def reward_line(record: RolloutRecord) -> str:
    """The reward of a sample, and what else one should know of it."""
    if record.reward is None:
        return f"none: {record.failure or record.status}"
    parts = ", ".join(f"{name} {value:g}" for name, value in record.reward_parts.items())
    words = [f"{record.reward:g}", "correct" if record.correct else "wrong"]
    if len(record.reward_parts) > 1:
        words[0] += f" ({parts})"
    if record.advantage is not None:
        words.append(f"advantage {record.advantage:.3g}")
    if record.status == Status.TRUNCATED:
        words.append(f"cut off after {record.tokens} tokens")
    elif record.status != Status.FINISHED:
        words.append(f"ended by {record.status.replace('_', ' ')}")
    if record.tool_calls:
        words.append(f"tool calls: {', '.join(record.tool_calls)}")
    return ", ".join(words)


def _said(message: Message) -> str:
    """A message of the conversation; the model's own needs no name."""
    return _text(message) if message.get("role") == "assistant" else _with_role(message)


def _with_role(message: Message) -> str:
    name = f" {message['name']}" if message.get("name") else ""
    return f"{message.get('role', '?')}{name}: {_text(message)}"


def _text(message: Message) -> str:
    """What a message says, its tool calls included."""
    content = message.get("content") or ""
    said = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    calls = [
        f"→ {call['function']['name']}"
        f"({json.dumps(call['function']['arguments'], ensure_ascii=False, default=repr)})"
        for call in message.get("tool_calls") or ()
    ]
    return harmless("\n".join(filter(None, [shortened(said), *calls]))) or "(nothing)"


def harmless(text: str) -> str:
    """The text without control characters, which a terminal would obey.

    Example:
        >>> harmless("a\\x1b[2Jb\\tc")
        'a�[2Jb\\tc'
    """
    kept = "\n\t"
    return "".join(c if c in kept or unicodedata.category(c) != "Cc" else "�" for c in text)


def _entry(label: str, texts: Iterable[str]) -> list[str]:
    lines = [line for text in texts for line in text.split("\n")] or ["(nothing)"]
    indented = [f"  {label:<{len(MARGIN)}}{lines[0]}", *(f"  {MARGIN}{one}" for one in lines[1:])]
    return [line.rstrip() for line in indented]


def shortened(text: str) -> str:
    """The start and the end of a text that is too long for a console.

    Example:
        >>> len(shortened("x" * 10_000)) < 700
        True
    """
    text = text.strip()
    lines = text.splitlines()
    if len(lines) > MOST_LINES:
        half = MOST_LINES // 2
        left_out = f"… [{len(lines) - 2 * half} lines left out]"
        text = "\n".join([*lines[:half], left_out, *lines[-half:]])
    if len(text) > LONGEST_TEXT:
        half = LONGEST_TEXT // 2
        left_out = f" … [{len(text) - 2 * half} characters left out] … "
        text = text[:half] + left_out + text[-half:]
    return text


def _power_of_two(number: int) -> bool:
    return number & (number - 1) == 0

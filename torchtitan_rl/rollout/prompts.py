"""From a task's examples to prompt groups that are ready to be rolled out."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torchtitan_rl.config.rollout import RolloutConfig
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.rollout.groups import PromptGroup
from torchtitan_rl.rollout.renderer import ChatRenderer
from torchtitan_rl.rollout.stream_plan import index_name
from torchtitan_rl.tasks.checked import heldout_examples, train_example
from torchtitan_rl.tasks.task import Example, Task

MOST_NAMED = 10
"""Prompts that an error names; of the others it says how many there are."""
SEAMS = 16
"""Tokens that a text may have more in its place than by itself."""


class PromptGroups:
    """Makes groups: each with its task, its prompt in tokens, and how to sample it.

    Example:
        groups = PromptGroups(config, tasks, renderer)("train", examples, first=384)
        groups[0].id  # "sum_digits/train/384"; in place of a failed one: ".../train/spare-12-0"
    """

    def __init__(
        self, config: RunConfig, tasks: Mapping[str, Task], renderer: ChatRenderer
    ) -> None:
        self._config, self._tasks, self._renderer = config, tasks, renderer
        for task in tasks.values():
            self._check_lengths(task)

    def __call__(
        self,
        split: str,
        examples: Sequence[Example],
        first: int = 0,
        *,
        evaluation: Literal["greedy", "sampled"] | None = None,
    ) -> list[PromptGroup]:
        """A group for each example, numbered from `first` on; for an `evaluation` one of a single
        completion."""
        groups = []
        for i, example in enumerate(examples, first):
            task = self._tasks[example.task or self._config.task.name]
            sampling = self._config.sampling_of(task.config)
            if evaluation:
                sampling = replace(sampling, n=1, logprobs=False)
            if evaluation == "greedy":
                sampling = replace(sampling, temperature=0.0)
            prompt = self._renderer.render(example.messages, tools=task.shown_tools)
            name = f"{task.name}/{split}/{index_name(i)}"
            group = PromptGroup(name, task, example, sampling, prompt)
            check_prompt(group, self._config.limits)
            groups.append(group)
        return groups

    def train(self, task: Task, first: int, count: int = 1) -> list[PromptGroup]:
        """The groups of `count` training examples, from number `first` on."""
        examples = [train_example(task, index) for index in range(first, first + count)]
        return self("train", examples, first)

    def heldout(self, task: Task, count: int) -> list[PromptGroup]:
        """The groups to evaluate on, sampled greedily."""
        return self("heldout", heldout_examples(task, count), evaluation="greedy")

    def heldout_samples(self, task: Task, count: int) -> list[PromptGroup]:
        """The groups to evaluate on, each to be sampled once, as in training."""
        return self("heldout-sampled", heldout_examples(task, count), evaluation="sampled")

    def _check_lengths(self, task: Task) -> None:
        """Refuse a file with prompts that leave no room for a completion: the first of them to
        come up would end the run, hours after it began."""
        sampled = 1 if task.interactive else self._config.sampling_of(task.config).max_tokens
        room = self._config.limits.max_tokens - sampled
        longer = list(self._longer(task, room))
        if not longer:
            return
        shared, what = self._shared(task, longer[0].example)
        raising = "generator.engine.max_model_len (and rollout.max_tokens, if it is set)"
        if shared > room:
            raise ValueError(
                f"task {task.name!r}: {what} are {shared} tokens, in every prompt, and beside "
                f"{sampled} to sample a rollout has room for {room}. Shorten them, raise "
                f"{raising}, or sample fewer"
            )
        lines = [f"  {one.where}: {one.tokens} tokens" for one in longer[:MOST_NAMED]]
        if len(longer) > MOST_NAMED:
            lines.append(f"  and {len(longer) - MOST_NAMED} more")
        raise ValueError(
            f"task {task.name!r} has {len(longer)} prompts of more than {room} tokens: beside "
            f"{sampled} to sample, a rollout has no room for more. Of each prompt, {shared} tokens "
            f"are {what}. Raise {raising}, sample fewer, or leave these lines out:\n"
            + "\n".join(lines)
        )

    def _shared(self, task: Task, example: Example) -> tuple[int, str]:
        """Tokens that a prompt has without the question, and what they are."""
        asked = [
            {**message, "content": ""} if message["role"] == "user" else message
            for message in example.messages
        ]
        parts = ["the chat format"]
        if task.shown_tools:
            parts.insert(0, "the description of its tools (show_tools)")
        if any(message["role"] == "system" for message in example.messages):
            parts.insert(0, "the instructions (system message)")
        what = " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
        return len(self._renderer.render(asked, tools=task.shown_tools).token_ids), what

    def _longer(self, task: Task, room: int) -> Iterator["LongPrompt"]:
        """The examples whose prompts are longer than that."""
        around = None
        for where, example in task.all_examples():
            texts = [str(message["content"]) for message in example.messages]
            if around is None:
                bare = [{**message, "content": ""} for message in example.messages]
                around = len(self._renderer.render(bare, tools=task.shown_tools).token_ids)
            # A token has at least a byte: that decides for most texts, and a count for nearly all.
            if around + sum(len(text.encode()) for text in texts) + SEAMS <= room:
                continue
            if around + sum(map(self._renderer.count, texts)) + SEAMS <= room:
                continue
            shown = self._renderer.render(example.messages, tools=task.shown_tools)
            if len(shown.token_ids) > room:
                yield LongPrompt(where, len(shown.token_ids), example)


@dataclass(frozen=True, slots=True)
class LongPrompt:
    """An example whose prompt is too long."""

    where: str
    """File and line it is from."""
    tokens: int
    example: Example


def check_prompt(group: PromptGroup, limits: RolloutConfig) -> None:
    """Refuse a prompt that leaves no room: for a word in a conversation, for a whole completion in
    a task of one turn, which would be cut short unnoticed."""
    prompt = len(group.shown.token_ids)
    sampled = 1 if group.task.interactive else group.sampling.max_tokens
    if prompt + sampled > limits.max_tokens:
        hint = ""
        if group.task.shown_tools:
            hint = "; or leave the description of its tools out, with show_tools=False of the task"
        raise ValueError(
            f"the prompt of group {group.id} has {prompt} tokens; with {sampled} to sample that is "
            f"more than a rollout may have, {limits.max_tokens}: raise "
            f"generator.engine.max_model_len (and rollout.max_tokens, if it is set){hint}"
        )

"""Chat messages to token ids, through the `renderers` package."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan_rl.algorithms.echo import Attribution
from torchtitan_rl.conversation import Turn
from torchtitan_rl.models.hf import ModelFolderError, read_hf_config
from torchtitan_rl.types import Message


@dataclass(slots=True)
class Rendered:
    """Messages as tokens, up to where the model's turn starts."""

    token_ids: list[int]
    attributions: list[Attribution | None] | None
    """Where each token comes from; None for a token between messages, or if nobody knows."""


class ChatRenderer:
    """The renderer and tokenizer of one HF folder.

    Example:
        >>> renderer = ChatRenderer("outputs/models/tiny")                   # doctest: +SKIP
        >>> renderer.prompt([{"role": "user", "content": "47 85"}])          # doctest: +SKIP
        [257, 84, 82, ...]
    """

    def __init__(self, folder: str | Path, *, thinking: bool = False) -> None:
        from renderers import Qwen3RendererConfig, create_renderer
        from transformers import AutoTokenizer

        config = read_hf_config(folder)
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
            # By model type: the package's own choice goes by hub names, which a folder has not.
            known = {"qwen3": Qwen3RendererConfig(enable_thinking=thinking)}
            self._renderer = create_renderer(self.tokenizer, known.get(config["model_type"]))
        except (OSError, ValueError, AssertionError) as error:
            raise ModelFolderError(
                f"{folder} has no tokenizer that can render chat messages: {error}"
            ) from error

    def prompt(self, messages: list[Message]) -> list[int]:
        """Token ids of the conversation up to where the model's turn starts."""
        return list(self._renderer.render(messages, add_generation_prompt=True).token_ids)

    def render(
        self, messages: list[Message], *, tools: list[dict[str, Any]] | None = None
    ) -> Rendered:
        """The conversation, from its start; `tools` are OpenAI-style specs."""
        rendered = self._renderer.render(messages, tools=tools, add_generation_prompt=True)
        return Rendered(list(rendered.token_ids), _attributions(rendered))

    def extend(
        self, turn: Turn, messages: list[Message], *, tools: list[dict[str, Any]] | None = None
    ) -> Rendered | None:
        """What the model is shown next: the turn's tokens as they were, then new messages. None if
        the chat's format asks for the whole conversation to be rendered again."""
        bridged = self._renderer.bridge_to_next_turn(
            turn.prompt_token_ids, turn.token_ids, messages, tools=tools
        )
        if bridged is None:
            return None
        added = _attributions(bridged)
        if added is None or turn.attributions is None:
            return Rendered(list(bridged.token_ids), None)
        return Rendered(list(bridged.token_ids), turn.attributions + added[turn.length :])

    def completion(self, text: str) -> list[int]:
        """Token ids of a completion with the end-of-turn token the model would have sampled."""
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        return [*ids, self._renderer.get_stop_token_ids()[0]]


def _attributions(rendered: Any) -> list[Attribution | None] | None:
    if len(rendered.is_content) != len(rendered.token_ids):
        return None
    names = rendered.message_tool_names or [None] * len(rendered.message_roles)
    return [
        None if index < 0 else Attribution(rendered.message_roles[index], content, names[index])
        for index, content in zip(rendered.message_indices, rendered.is_content, strict=True)
    ]

"""Chat messages to token ids, through the `renderers` package."""

from pathlib import Path
from typing import Any

from torchtitan_rl.algorithms.echo import Attribution
from torchtitan_rl.conversation import Rendered, Turn
from torchtitan_rl.models.hf import ModelFolderError, read_hf_config
from torchtitan_rl.tasks.tools import ToolCall
from torchtitan_rl.types import Message


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
        self._control_tokens = [
            token.content
            for token in self.tokenizer.added_tokens_decoder.values()
            if token.special or token.content.startswith("<")
        ]

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

    def check_tools(self, task: str) -> None:
        """Refuse a model whose tool calls nobody can read."""
        if not getattr(self._renderer, "supports_tools", True):
            raise ModelFolderError(
                f"task {task!r} has tools, but the model's chat format has no tool calls that can "
                "be read; use a model that the renderers package knows, such as Qwen3"
            )

    def parse(self, token_ids: list[int]) -> tuple[Message, list[ToolCall]]:
        """What the model has sampled as a message, and the tools it calls in it, well or badly."""
        try:
            parsed = self._renderer.parse_response(token_ids)
        except (ValueError, RecursionError) as error:  # untrusted JSON: endless digits or brackets
            text = self.tokenizer.decode(token_ids, skip_special_tokens=True)
            problem = f"the call cannot be read: {type(error).__name__}"
            return {"role": "assistant", "content": text}, [ToolCall("", None, problem)]
        message: Message = {"role": "assistant", "content": parsed.content}
        if parsed.reasoning_content:
            message["reasoning_content"] = parsed.reasoning_content
        calls = [_tool_call(call) for call in parsed.tool_calls]
        if calls:
            message["tool_calls"] = [
                {"type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                for c in calls
            ]
        return message, calls

    def reply(self, message: Message) -> list[int]:
        """Token ids the model would have sampled to say this, its end of turn included."""
        question: Message = {"role": "user", "content": "?"}
        # Between two questions: the last message of a chat may be rendered in another way.
        shown = self._renderer.render([question, message, question])
        own = [i for i, index in enumerate(shown.message_indices) if index == 1]
        last = max(i for i in own if shown.sampled_mask[i])
        opening = self.prompt([question])[own[0] :]
        ids = list(shown.token_ids)[own[0] : last + 1]
        if ids[: len(opening)] != opening:
            raise ValueError(f"the chat format does not say {message!r} after its own opening")
        return ids[len(opening) :]

    def harmless(self, text: str) -> str:
        """The text with no token in it that means something to the chat: untrusted text must not be
        able to end a message and start another."""
        for token in self._control_tokens:
            text = text.replace(token, f"{token[0]}\u200b{token[1:]}")
        return text


def _tool_call(parsed: Any) -> ToolCall:
    if parsed.status.value == "ok" and isinstance(parsed.name, str):
        return ToolCall(parsed.name, parsed.arguments)
    name = parsed.name if isinstance(parsed.name, str) else ""
    return ToolCall(name, parsed.raw, problem=f"malformed call ({parsed.status.value})")


def _attributions(rendered: Any) -> list[Attribution | None] | None:
    if len(rendered.is_content) != len(rendered.token_ids):
        return None
    names = rendered.message_tool_names or [None] * len(rendered.message_roles)
    return [
        None if index < 0 else Attribution(rendered.message_roles[index], content, names[index])
        for index, content in zip(rendered.message_indices, rendered.is_content, strict=True)
    ]

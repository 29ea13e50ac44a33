"""Chat messages to token ids, through the `renderers` package."""

from pathlib import Path
from typing import Any

from torchtitan_rl.core.types import Attribution, Message, Turn
from torchtitan_rl.models.hf import ModelFolderError, read_hf_config
from torchtitan_rl.rollout.sequences import Rendered, origins
from torchtitan_rl.tasks.tools.tool import ToolCall

MAX_DEPTH = 32
"""How deeply the arguments of a tool call may be nested."""


class QuickTokenizer:
    """A Hugging Face tokenizer that encodes at the speed of what is beneath it: a renderer encodes
    many short strings, and each costs ten times less without the layers between."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self._backend = tokenizer, tokenizer.backend_tokenizer

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def __call__(
        self, text: str, add_special_tokens: bool = True, return_offsets_mapping: bool = False
    ) -> dict[str, Any]:
        encoded = self._backend.encode(text, add_special_tokens=add_special_tokens)
        return {"input_ids": encoded.ids, "offset_mapping": encoded.offsets}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


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
        from transformers.utils import logging

        logging.set_verbosity_error()  # prompts that are too long get an error of our own
        config = read_hf_config(folder)
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
            # By model type: the package's own choice goes by hub names, which a folder has not.
            qwen3 = Qwen3RendererConfig(enable_thinking=thinking)
            known = {"qwen3": qwen3, "qwen3_moe": qwen3}
            fast = self.tokenizer.is_fast
            self._quick = QuickTokenizer(self.tokenizer) if fast else self.tokenizer
            self._renderer = create_renderer(self._quick, known.get(config["model_type"]))
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

    def count(self, text: str) -> int:
        """Tokens of a text by itself, ten times faster than a conversation is rendered."""
        return len(self._quick.encode(text, add_special_tokens=False))

    def render(
        self, messages: list[Message], *, tools: list[dict[str, Any]] | None = None
    ) -> Rendered:
        """The conversation, from its start; `tools` are OpenAI-style specs."""
        rendered = self._renderer.render(messages, tools=tools, add_generation_prompt=True)
        return Rendered(list(rendered.token_ids), _attributions(rendered))

    def extend(
        self, turn: Turn, messages: list[Message], *, tools: list[dict[str, Any]] | None = None
    ) -> Rendered | None:
        """The next prompt of a conversation: the turn's tokens as they were, then new messages.
        None if the chat's format asks for the whole conversation to be rendered again."""
        bridged = self._renderer.bridge_to_next_turn(
            turn.prompt_token_ids, turn.token_ids, messages, tools=tools
        )
        whole = turn.prompt_token_ids + turn.token_ids
        # A turn that goes on after an end of turn is cut back to that.
        if bridged is None or list(bridged.token_ids[: turn.length]) != whole:
            return None
        added = _attributions(bridged)
        # A turn that could not be attributed leaves those after it as they are.
        known = None if added is None else origins(turn) + added[turn.length :]
        return Rendered(list(bridged.token_ids), known)

    def check_tools(self, task: str) -> None:
        """Refuse a model whose tool calls nobody can read."""
        if not getattr(self._renderer, "supports_tools", True):
            raise ModelFolderError(
                f"task {task!r} has tools, but the model's chat format has no tool calls that can "
                "be read; use a model that the renderers package knows, such as Qwen3"
            )

    def parse(self, token_ids: list[int]) -> tuple[Message, list[ToolCall]]:
        """Sampled tokens as a message, and the tool calls in it, well-formed or not."""
        try:
            parsed = self._renderer.parse_response(token_ids)
            calls = [self._tool_call(call) for call in parsed.tool_calls]
        except (ValueError, RecursionError) as error:  # untrusted JSON: endless digits or brackets
            text = self.tokenizer.decode(token_ids, skip_special_tokens=True)
            problem = f"the call cannot be read: {type(error).__name__}"
            return {"role": "assistant", "content": text}, [ToolCall("", None, problem)]
        message: Message = {"role": "assistant", "content": self.harmless(parsed.content)}
        if parsed.reasoning_content:
            message["reasoning_content"] = self.harmless(parsed.reasoning_content)
        if calls:
            message["tool_calls"] = [
                {"type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                for c in calls
            ]
        return message, calls

    def _tool_call(self, parsed: Any) -> ToolCall:
        name = self.harmless(parsed.name) if isinstance(parsed.name, str) else ""
        if parsed.status.value == "ok" and name:
            return ToolCall(name, self._defused(parsed.arguments))
        problem = f"malformed call ({parsed.status.value})"
        return ToolCall(name, self.harmless(parsed.raw), problem)

    def _defused(self, value: Any, depth: int = 0) -> Any:
        """JSON with harmless strings; what is nested too deeply to travel is refused."""
        if depth > MAX_DEPTH:
            raise ValueError(f"arguments are nested more than {MAX_DEPTH} deep")
        match value:
            case str():
                return self.harmless(value)
            case list():
                return [self._defused(item, depth + 1) for item in value]
            case dict():
                return {
                    self.harmless(key): self._defused(item, depth + 1)
                    for key, item in value.items()
                }
        return value

    def reply(self, message: Message) -> list[int]:
        """Token ids the model would have sampled to say this, its end of turn included."""
        if not message.get("tool_calls") and not message.get("reasoning_content"):
            ids = self.tokenizer.encode(message["content"], add_special_tokens=False)
            return [*ids, self._renderer.get_stop_token_ids()[0]]
        question: Message = {"role": "user", "content": "?"}
        # With a tool's answer after it: the last message of a chat may be rendered differently,
        # and before a question its reasoning is left out.
        shown = self._renderer.render([question, message, {"role": "tool", "content": "!"}])
        own = [i for i, index in enumerate(shown.message_indices) if index == 1]
        last = max(i for i in own if shown.sampled_mask[i])
        opening = self.prompt([question])[own[0] :]
        ids = list(shown.token_ids)[own[0] : last + 1]
        if ids[: len(opening)] != opening:
            raise ValueError(f"the chat format does not say {message!r} after its own opening")
        return ids[len(opening) :]

    def harmless(self, text: str) -> str:
        """Valid text with no token in it that means something to the chat: untrusted text must not
        be able to end a message and start another."""
        text = text.encode(errors="replace").decode()  # lone surrogates, which JSON can spell
        for token in self._control_tokens:
            text = text.replace(token, f"{token[0]}\u200b{token[1:]}")
        return text


def _attributions(rendered: Any) -> list[Attribution | None] | None:
    if len(rendered.is_content) != len(rendered.token_ids):
        return None
    names = rendered.message_tool_names or [None] * len(rendered.message_roles)
    return [
        None if index < 0 else Attribution(rendered.message_roles[index], content, names[index])
        for index, content in zip(rendered.message_indices, rendered.is_content, strict=True)
    ]

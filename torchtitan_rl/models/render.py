"""Chat messages to token ids, through the `renderers` package."""

from pathlib import Path

from torchtitan_rl.models.hf import ModelFolderError, read_hf_config
from torchtitan_rl.tasks.task import Message


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

    def completion(self, text: str) -> list[int]:
        """Token ids of a completion with the end-of-turn token the model would have sampled."""
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        return [*ids, self._renderer.get_stop_token_ids()[0]]

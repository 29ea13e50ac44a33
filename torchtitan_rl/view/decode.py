"""Text of single tokens, with every byte visible."""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any


class Decoder:
    """Decodes single tokens with a run's tokenizer; without one, a token shows as its number.

    Example:
        Decoder(Path("outputs/run")).pieces([791, 3363])  # ["The", " city"]
    """

    def __init__(self, folder: Path) -> None:
        self._tokenizer: Any = None
        self.problem = ""
        self._cache: dict[int, str] = {}
        paths = [folder / "tokenizer.json", folder / "model" / "tokenizer.json"]
        path = next((path for path in paths if path.is_file()), None)
        if path is None:
            self.problem = "this run has no tokenizer.json: tokens are shown as numbers"
            return
        from tokenizers import Tokenizer  # imported late: the page shows before it is needed

        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare ones
            self.problem = f"{path.name} cannot be read ({error}): tokens are shown as numbers"
            return
        self._byte_level = "ByteLevel" in _decoder_types(self._tokenizer)
        self._special = set(self._tokenizer.get_added_tokens_decoder())

    def pieces(self, ids: Sequence[Any]) -> list[str]:
        """The text of each token."""
        for i in set(ids) - self._cache.keys():
            self._cache[i] = self._piece(i)
        return [self._cache[i] for i in ids]

    def _piece(self, i: Any) -> str:
        known = self._tokenizer is not None and isinstance(i, int) and 0 <= i < 2**32
        token = self._tokenizer.id_to_token(i) if known else None
        if token is None:
            return f"⟨{i}⟩"
        if i in self._special:
            return token
        if self._byte_level:
            return byte_level_text(token)
        return sentencepiece_text(token)


def _decoder_types(tokenizer: Any) -> set[str]:
    """Types of a tokenizer's decoder, or of the decoders that it applies in sequence."""
    if tokenizer.decoder is None:
        return set()
    state = json.loads(tokenizer.decoder.__getstate__())
    return {part.get("type", "") for part in [state, *state.get("decoders", [])]}


@cache
def _bytes_of_characters() -> dict[str, int]:
    """GPT-2's characters for the 256 bytes: printable bytes stand for themselves, the others are
    characters from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


def byte_level_text(token: str) -> str:
    """Text of a byte-level token; bytes that are no UTF-8 by themselves as \\x...

    Example:
        >>> byte_level_text("Ġhi"), byte_level_text("ðŁ")
        (' hi', '\\\\xf0\\\\x9f')
    """
    table = _bytes_of_characters()
    if not all(character in table for character in token):
        return token
    return bytes(table[character] for character in token).decode("utf-8", "backslashreplace")


def sentencepiece_text(token: str) -> str:
    """Text of a SentencePiece token: `▁` is a space, and `<0xE2>` a byte.

    Example:
        >>> sentencepiece_text("▁hi"), sentencepiece_text("<0x0A>"), sentencepiece_text("<0xE2>")
        (' hi', '\\n', '\\\\xe2')
    """
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)]).decode("utf-8", "backslashreplace")
        except ValueError:
            return token
    return token.replace("▁", " ")

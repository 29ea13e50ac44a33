"""HF folders on disk: written whole or not at all."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

COMPANION_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)
"""What an HF folder holds beside its weights."""


@contextmanager
def atomic_folder(folder: str | Path) -> Iterator[Path]:
    """A temporary folder that takes the name `folder` when the block ends without an error.

    Whoever looks sees no folder or a whole one, also after Ctrl-C or SIGKILL half-way.
    """
    final = Path(folder)
    final.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{final.name}-", dir=final.parent))
    try:
        yield temporary
        temporary.chmod(0o755)
        if final.exists():
            shutil.rmtree(final)
        temporary.rename(final)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def copy_companion_files(source: str | Path, target: str | Path) -> None:
    """Copy config and tokenizer of one HF folder to another."""
    for name in COMPANION_FILES:
        if (file := Path(source) / name).is_file():
            shutil.copy(file, Path(target) / name)

"""Fixtures that several modules share. Meshes and engines are made once per module."""

from pathlib import Path

import pytest

from torchtitan_rl.models.tiny import write_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A randomly initialised tiny Qwen3 as an HF folder."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", seed=0)

"""Fixtures that several modules share. Meshes and engines are made once per module."""

from pathlib import Path

import pytest

from tests.models.support import noisy_copy
from torchtitan_rl.models.tiny import write_tiny_model

LONG = ("runs", "actors", "examples", "weight_sync", "models", "view", "test_readme.py")
"""What takes longest, in few tests. Else one process would be left alone with it at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    items.sort(key=lambda item: item.path.relative_to(here).parts[0] not in LONG)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A randomly initialised tiny Qwen3 as an HF folder."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", seed=0)


@pytest.fixture(scope="session")
def moe_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3-MoE as an HF folder: 8 experts, top 2, a dense first layer, noise on it all."""
    folder = tmp_path_factory.mktemp("models")
    return noisy_copy(write_tiny_model(folder / "moe", seed=0, experts=8), folder / "noisy")

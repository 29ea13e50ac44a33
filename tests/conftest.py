"""Fixtures that several modules share. Meshes and engines are made once per module."""

import os
import signal
from pathlib import Path

import pytest

# Before torch is imported: with two threads each, the processes of `-n 2` have more threads than
# cores, and OpenMP's wait for each other in loops (measured: a small forward pass takes 70 times as
# long). Actors set their own number of threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.models.support import noisy_copy
from torchtitan_rl.models.makers.tiny import write_tiny_model

# A shell's background job ignores Ctrl-C, and so would whatever the tests start.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

LONGEST = (
    *("actors/test_trainer.py", "run/test_whole_runs.py", "hosts/test_runs.py", "test_readme.py"),
    *("run/test_tool_runs.py", "supervision/test_graders.py", "run/test_async_runs.py", "examples"),
    *("engines/vllm/test_routing.py", "engines/vllm/test_tensor_parallel.py"),
    *("models/test_ranks.py", "run/test_sync_runs.py", "engines/vllm/test_engine.py", "run"),
    *("actors", "engines", "cuda", "weight_sync", "supervision", "hosts"),
    *("rollout/test_loop.py", "view", "test_docs.py", "config", "models", "cli"),
)
"""Files and folders that take longest, the longest first. Else one process would be left alone with
one of them at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=place)


def place(item: pytest.Item) -> int:
    """Place of a test in the order: that of its file in LONGEST; the rest comes last."""
    path = item.path.relative_to(Path(__file__).parent)
    own = [i for i, name in enumerate(LONGEST) if path.is_relative_to(name)]
    return min(own, default=len(LONGEST))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A randomly initialised tiny Qwen3 as an HF folder."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", seed=0)


@pytest.fixture(scope="session")
def moe_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3-MoE as an HF folder: 8 experts, top 2, a dense first layer, noise on it all."""
    folder = tmp_path_factory.mktemp("models")
    return noisy_copy(write_tiny_model(folder / "moe", seed=0, experts=8), folder / "noisy")

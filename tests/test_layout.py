"""Rules of the house that a machine can check."""

import ast
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = [
    path
    for path in subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "*.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    if (ROOT / path).is_file()
]


def test_there_are_files_to_check():
    assert len(FILES) > 40


@pytest.mark.parametrize("path", FILES)
def test_no_file_is_longer_than_400_lines(path):
    assert len((ROOT / path).read_text().splitlines()) <= 400


PURE = ("types", "algorithms", "batching", "plugins")
IMPURE = ("monarch", "vllm", "torchtitan_rl.actors", "torchtitan_rl.run.controller")


@pytest.mark.parametrize(
    "path", [p for p in FILES if p.removeprefix("torchtitan_rl/").startswith(PURE)]
)
def test_algorithms_and_batching_import_no_actor(path):
    tree = ast.parse((ROOT / path).read_text())
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        assert not [n for n in names if n.startswith(IMPURE)]

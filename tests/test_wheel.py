"""The wheel: it has everything that a user without a clone needs, and works in an empty folder.

It is built by the real pip and setuptools, from a copy, without a network.
"""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import torchtitan_rl

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "torchtitan_rl", source / "torchtitan_rl", ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    built = subprocess.run(
        [*command, "--no-index", "-w", str(folder), str(source)], capture_output=True, text=True
    )
    assert built.returncode == 0, built.stdout + built.stderr
    [path] = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def test_everything_of_the_package_is_in_it(wheel):
    here = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "torchtitan_rl").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    packed = {name for name in wheel.namelist() if name.startswith("torchtitan_rl/")}
    assert packed == here
    assert {"torchtitan_rl/py.typed", "torchtitan_rl/recipes/tiny.py"} <= packed
    assert "torchtitan_rl/view/static/index.html" in packed


def test_its_metadata_is_complete(wheel):
    info = f"torchtitan_rl-{torchtitan_rl.__version__}.dist-info"
    metadata = wheel.read(f"{info}/METADATA").decode()
    assert f"\nVersion: {torchtitan_rl.__version__}\n" in metadata
    for name in ("License-Expression: BSD-3-Clause", "Keywords", "Classifier", "Summary"):
        assert re.search(rf"^{name}", metadata, re.MULTILINE), name
    assert (ROOT / "README.md").read_text().splitlines()[0] in metadata
    assert (
        "torchtitan-rl = torchtitan_rl.cli.main:entry"
        in wheel.read(f"{info}/entry_points.txt").decode()
    )
    assert "the torchtitan_rl authors" in wheel.read(f"{info}/licenses/LICENSE").decode()


def test_an_empty_folder_suffices(wheel, tmp_path):
    wheel.extractall(tmp_path / "installed")
    (tmp_path / "empty").mkdir()
    code = "import torchtitan_rl.cli.main as cli; print(cli.__file__); cli.entry()"
    run = subprocess.run(
        [sys.executable, "-c", code, "list"],
        cwd=tmp_path / "empty",
        env={**os.environ, "PYTHONPATH": str(tmp_path / "installed")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.startswith(str(tmp_path / "installed"))
    assert "\ngrpo_sum_digits_tiny " in run.stdout

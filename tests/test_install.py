"""scripts/install.sh, as far as it goes without fetching anything."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def project(tmp_path):
    """A copy of what the script reads; `bin` comes first on its PATH."""
    for name in ("scripts", "requirements"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "bin").mkdir()
    return tmp_path


def install(project, platform, **env):
    path = f"{project / 'bin'}:{os.environ['PATH']}"
    return subprocess.run(
        [project / "scripts" / "install.sh", platform],
        env={**os.environ, "PATH": path, **env},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_for_a_gpu_a_c_compiler_is_needed(project):
    run = install(project, "cuda", CC="no-such-compiler")
    assert run.returncode == 1
    assert "no C compiler (no-such-compiler) found, which Triton needs on a GPU" in run.stderr
    assert not (project / ".venv").exists()


def test_for_a_gpu_the_headers_of_python_are_needed(project):
    python = project / "bin" / "python3.11"
    lacking = '#!/bin/sh\ncase "$2" in *Python.h*) exit 1;; esac\nexec "{}" "$@"\n'
    python.write_text(lacking.format(sys.executable))
    python.chmod(0o755)
    run = install(project, "cuda")
    assert run.returncode == 1
    assert "no Python.h of Python 3" in run.stderr
    assert "apt-get install python3-dev" in run.stderr
    assert not (project / ".venv").exists()

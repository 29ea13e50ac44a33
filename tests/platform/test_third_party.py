"""Monarch and torchtitan are prepared before anything of this package imports them."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import torchtitan_rl

PACKAGE = Path(torchtitan_rl.__file__).parent
ENTRIES = {"platform"}
"""Packages that import one only in processes whose environment has been prepared."""


def test_every_package_that_imports_one_prepares_it_first():
    importing = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            if any(name.partition(".")[0] in ("monarch", "torchtitan") for name in names):
                importing.add(path.relative_to(PACKAGE).parts[0])
    assert {"actors", "models", "supervision", "weight_sync"} <= importing
    for package in importing - ENTRIES:
        assert "\nprepare()\n" in (PACKAGE / package / "__init__.py").read_text(), package


@pytest.mark.parametrize("module", ["models.spec", "run.launch"])
def test_torchtitan_is_adapted_and_monarch_set_up_whatever_comes_first(module):
    code = f"""
import importlib.abc, os, sys

class Watch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "monarch":  # which reads its settings now
            assert os.environ["HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY"] == "1s"

sys.meta_path.insert(0, Watch())
import torchtitan_rl.{module}
from torchtitan.tools.utils import device_type
from torchtitan_rl.platform import device_type as ours
assert device_type == ours(), device_type
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_torchtitan_that_was_imported_too_early_is_refused():
    code = """
import sys, types
utils = types.ModuleType("torchtitan.tools.utils")
utils.device_type = "cuda"
sys.modules["torchtitan"], sys.modules["torchtitan.tools.utils"] = types.ModuleType("x"), utils
import torchtitan_rl.models
"""
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={"TORCHTITAN_RL_PLATFORM": "cpu"},
    )
    assert "import torchtitan_rl.models first" in run.stderr

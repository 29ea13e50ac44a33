"""The README and the pages of docs/, and the python blocks in them."""

import ast
import inspect
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
}
TEXT = "\n".join(PAGES.values())
BLOCKS = re.findall(r"^```python\n(.*?)^```", TEXT, flags=re.DOTALL | re.MULTILINE)


def block(name: str) -> str:
    """The python block that starts with the comment `# name`."""
    [found] = [code for code in BLOCKS if code.startswith(f"# {name}\n")]
    return found


def command(part: str) -> list[str]:
    """Arguments for `python` that run the first command of the pages with this text in it."""
    commands = re.findall(r"^((?:torchtitan-rl|python) .*)$", TEXT, flags=re.MULTILINE)
    program, *arguments = next(line for line in commands if part in line).split()
    return arguments if program == "python" else ["-m", "torchtitan_rl", *arguments]


async def run_block(name: str, **names: Any) -> dict[str, Any]:
    """Run a block that awaits, as a notebook does; returns its names."""
    code = compile(block(name), name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    result = eval(code, names)
    assert inspect.isawaitable(result)
    await result
    return names

"""Runs a notebook's cells as Jupyter would, in a process of its own, and prints what came of it.

python run_notebook.py NOTEBOOK EXPRESSION ...

The last line is a JSON list of the expressions' values after the last cell.
"""

import ast
import asyncio
import inspect
import json
import sys
from pathlib import Path
from typing import Any


async def run(notebook: Path) -> dict[str, Any]:
    """The names that the cells leave behind; `await` works at the top of a cell, as in IPython."""
    names: dict[str, Any] = {"__name__": "__main__"}
    cells = json.loads(notebook.read_text())["cells"]
    for number, cell in enumerate(cells):
        if cell["cell_type"] != "code":
            continue
        # By cell, so that a traceback says which; and definitions know what is defined later.
        code = compile(
            "".join(cell["source"]),
            f"{notebook.name}, cell {number}",
            "exec",
            flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT,
        )
        result = eval(code, names)
        if inspect.isawaitable(result):
            await result
    return names


if __name__ == "__main__":
    left = asyncio.run(run(Path(sys.argv[1])))
    print(json.dumps([eval(expression, left) for expression in sys.argv[2:]]))

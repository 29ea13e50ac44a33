"""Code that only a machine with GPUs runs: how many lines of it there are, and which of them the
tests execute here, where there is no GPU.

    python scripts/cuda_lines.py             # runs the CUDA suite, and names what it leaves out
    python scripts/cuda_lines.py 4f75f0b     # only counts, in another commit

A line is a statement in a branch that is taken on CUDA alone, or in a function of WHOLE. A choice
within a statement (`a if device_type() == "cuda" else b`) counts as one line, which is executed
when it is decided as on CUDA.
"""

import ast
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SUITE = (
    *("tests/cuda", "tests/platform"),
    *("tests/weight_sync/test_gpu_parts.py", "tests/weight_sync/test_side_stream.py"),
    "tests/weight_sync/test_transports.py",
)
WHOLE = {
    "models/cuda/attention.py": (),  # all of them
    "platform/nvml.py": (),
    "platform/flash_attention.py": (),
    "platform/__init__.py": ("why_no_cuda", "_visible_gpus"),
    "platform/doctor.py": ("judge_driver", "judge_gpu_memory"),
    "weight_sync/pair.py": ("NcclPair", "_no_watchdog"),
    "weight_sync/receiving.py": ("_OnDevice", "_receive_on_device"),
    "engines/vllm/routing.py": ("ReturnedRouting",),
}
"""Functions, and classes with all of theirs, that only CUDA needs."""
ON_CPU = {"all(near)", "not totals", "machine.torch_cuda is None"}
"""Conditions that hold on a CPU, besides comparisons with "cpu" and "cuda"."""
ON_CUDA = {
    *("torch.cuda.is_available()", "machine.uses_gpus", "a.is_cuda", "self.data.is_cuda"),
    *("core.batch_queue", "address in self._pinned", "(why := why_no_cuda(torch.version.cuda))"),
}
ELSEWHERE = {"chosen == 'cpu'", "self.asked != 'cpu'", "tensor.device.type == 'cpu'"}
"""Comparisons that do not tell CUDA from a CPU."""


@dataclass
class Line:
    """A statement, or a choice within one."""

    path: str
    first: int
    last: int
    choice: ast.expr | None = None
    wanted: bool = True
    """Value of the choice on CUDA."""


def implied(test: ast.expr, value: bool) -> bool:
    """Whether a condition has this value on CUDA alone."""
    if isinstance(test, ast.UnaryOp) and decided_as(test) is None:
        return implied(test.operand, not value)
    if isinstance(test, ast.BoolOp):
        decides = any if isinstance(test.op, ast.And) == value else all
        return decides(implied(part, value) for part in test.values)
    return decided_as(test) is value


def decided_as(test: ast.expr) -> bool | None:
    """Value on CUDA of a condition that is not made of others; None: it is not about the device."""
    text = ast.unparse(test)
    if text in ELSEWHERE:
        return None
    if isinstance(test, ast.Compare) and text.endswith(("== 'cuda'", "!= 'cpu'")):
        return True
    if isinstance(test, ast.Compare) and text.endswith(("== 'cpu'", "!= 'cuda'")):
        return False
    return True if text in ON_CUDA else False if text in ON_CPU else None


def lines_of(path: str, source: str) -> list[Line]:
    """The lines of a module, given by its path in the package."""
    return [*_lines_of(path, ast.parse(source).body, path in WHOLE and not WHOLE[path])]


def _lines_of(path: str, body: list[ast.stmt], cuda: bool, inside: bool = False) -> Iterator[Line]:
    """`cuda`: only CUDA runs this block; `inside`: it is part of a function."""
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            whole = cuda or statement.name in WHOLE.get(path, ())
            function = not isinstance(statement, ast.ClassDef)
            yield from _lines_of(path, statement.body, whole, inside or function)
            continue
        if not inside or _is_docstring(statement):
            continue
        blocks = [b for b in (getattr(statement, n, []) for n in ("body", "finalbody")) if b]
        blocks += [handler.body for handler in getattr(statement, "handlers", ())]
        other = getattr(statement, "orelse", [])
        last = blocks[0][0].lineno - 1 if blocks else statement.end_lineno
        test = getattr(statement, "test", None) if blocks else None
        if cuda:
            yield Line(path, statement.lineno, max(statement.lineno, last or 0))
        else:
            yield from _choices(path, statement, [*blocks, other], test)
        for block in blocks:
            yield from _lines_of(path, block, cuda or bool(test and implied(test, True)), True)
        elsewhere = bool(test and implied(test, False))
        yield from _lines_of(path, other, cuda or elsewhere, True)
        if elsewhere and isinstance(blocks[0][-1], ast.Return | ast.Raise | ast.Continue):
            cuda = True


def _choices(
    path: str, statement: ast.stmt, blocks: list[list[ast.stmt]], test: ast.expr | None
) -> Iterator[Line]:
    """Choices within a statement; the condition of a branch is none."""
    if test is not None and (implied(test, True) or implied(test, False)):
        return
    inner = {node for block in blocks for part in block for node in ast.walk(part)}
    for node in ast.walk(statement):
        if not isinstance(node, ast.expr) or node in inner:
            continue
        if (wanted := decided_as(node)) is not None:
            yield Line(path, node.lineno, node.lineno, node, wanted)


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def all_lines(commit: str = "") -> list[Line]:
    """The lines of the package, as it is here or in a commit."""

    def git(*command: str) -> str:
        return subprocess.run(
            ["git", "-C", ROOT, *command], capture_output=True, text=True, check=True
        ).stdout

    package = "torchtitan_rl"
    if not commit:
        files = {str(p.relative_to(ROOT)): p.read_text() for p in (ROOT / package).rglob("*.py")}
    else:
        names = git("ls-tree", "-r", "--name-only", commit, package).split()
        files = {n: git("show", f"{commit}:{n}") for n in names if n.endswith(".py")}
    return [
        line
        for name, source in sorted(files.items())
        for line in lines_of(name.removeprefix(f"{package}/"), source)
    ]


# ---- what is executed ----------------------------------------------------------------------------


def trace(folder: Path) -> None:
    """Have this process note what it executes, and write it to a new file as it ends."""
    import atexit

    lines = all_lines()
    places: dict[str, dict[int, list[int]]] = {}
    for number, line in enumerate(lines):
        own = places.setdefault(str(ROOT / "torchtitan_rl" / line.path), {})
        for place in range(line.first, line.last + 1):
            own.setdefault(place, []).append(number)
    choices = {
        number: compile(ast.Expression(line.choice), "choice", "eval")
        for number, line in enumerate(lines)
        if line.choice is not None
    }
    executed: set[int] = set()

    def on_call(frame: Any, event: str, value: Any) -> Any:
        return on_line if frame.f_code.co_filename in places else None

    def on_line(frame: Any, event: str, value: Any) -> Any:
        if event == "line":
            for number in places[frame.f_code.co_filename].get(frame.f_lineno, ()):
                if number not in executed and is_executed(number, frame):
                    executed.add(number)
        return on_line

    def is_executed(number: int, frame: Any) -> bool:
        if number not in choices:
            return True
        try:
            found = eval(choices[number], frame.f_globals, frame.f_locals)
        except (NameError, AttributeError):  # the line of another choice, or not yet decided
            return False
        return bool(found) is lines[number].wanted

    def write() -> None:
        sys.settrace(None)
        (folder / f"{os.getpid()}.json").write_text(json.dumps(sorted(executed)))

    atexit.register(write)
    threading.settrace(on_call)
    sys.settrace(on_call)


def run_suite() -> set[int]:
    """Run the CUDA suite; returns the numbers of the lines that it executed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        script = f"import sys\nsys.path.append({str(ROOT / 'scripts')!r})\n"
        script += f"import cuda_lines, pathlib\ncuda_lines.trace(pathlib.Path({name!r}))\n"
        (folder / "sitecustomize.py").write_text(script)
        path = os.pathsep.join(filter(None, (name, os.environ.get("PYTHONPATH"))))
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *SUITE]
        env = {**os.environ, "PYTHONPATH": path}
        subprocess.run(command, cwd=ROOT, env=env, check=True)
        return {n for file in folder.glob("*.json") for n in json.loads(file.read_text())}


def main(commit: str = "") -> None:
    lines = all_lines(commit)
    executed = set() if commit else run_suite()
    totals = Counter(line.path for line in lines)
    done = Counter(line.path for number, line in enumerate(lines) if number in executed)
    for path, total in totals.items():
        print(f"{total:4}" if commit else f"{done[path]:4} of {total:4}", path)
    print(f"{len(lines)} lines" if commit else f"{len(executed)} of {len(lines)} lines executed")
    for number, line in enumerate([] if commit else lines):
        if number not in executed:
            text = (ROOT / "torchtitan_rl" / line.path).read_text().splitlines()[line.first - 1]
            print(f"not executed: {line.path}:{line.first}: {text.strip()}")


if __name__ == "__main__":
    main(*sys.argv[1:])

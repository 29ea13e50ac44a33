"""Makes requirements/cuda.txt from what pip has resolved; CONTRIBUTING.md says how.

python scripts/lock_cuda.py report.json > requirements/cuda.txt
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

REQUIREMENTS = Path(__file__).parents[1] / "requirements"
LEFT_OUT = {
    # Nothing here imports these.
    *("wandb", "cwevals", "distro", "platformdirs", "supervisor", "fastapi-cli", "rich-toolkit"),
    *("fastapi-cloud-cli", "fastar", "rignore", "sentry-sdk", "agent-detector", "detect-installer"),
    # oss-harmony has the same module.
    "openai-harmony",
}
NEWER_PYTHON = {"six": 'six==1.17.0; python_version > "3.11"'}
"""What vLLM asks for with Python 3.12 only, where pip resolves with 3.11."""
EXACT = {"torch"}
"""Packages of which an index may also have a build for the CPU, `2.13.0+cpu`: pip takes that for
the newer one, and `==` allows it."""
HEADER = """\
# CUDA lock: every package the project needs on a machine with NVIDIA GPUs, torch included.
# scripts/install.sh installs it, and dev.txt, with --no-deps. Resolved for x86_64.
# Made by scripts/lock_cuda.py: see "The lock files" in CONTRIBUTING.md.
"""


def name_of(line: str) -> str:
    """Name of a pinned package, as an index has it.

    Example:
        >>> name_of("typing_extensions==4.16.0")
        'typing-extensions'
    """
    return re.sub(r"[-_.]+", "-", line.partition("==")[0].strip()).lower()


def names_in(file: str) -> set[str]:
    """Names of the packages that a lock pins."""
    return {name_of(line) for line in (REQUIREMENTS / file).read_text().splitlines()}


def lines(report: dict[str, Any]) -> Iterator[str]:
    """The lines of the lock, by name, without the tools that only dev.txt has."""
    left_out = LEFT_OUT | (names_in("dev.txt") - names_in("cpu.txt"))
    pins = dict(NEWER_PYTHON)
    for item in report["install"]:
        package = item["metadata"]
        name = name_of(package["name"])
        pins[name] = f"{package['name']}{'===' if name in EXACT else '=='}{package['version']}"
    yield from (pins[name] for name in sorted(pins.keys() - left_out))


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        print(HEADER + "\n".join(lines(json.load(file))))

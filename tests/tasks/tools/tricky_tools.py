"""A task whose tools do whatever tools can do wrong. Imports little: workers are forked from it."""

import asyncio
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import psutil

from torchtitan_rl.core.types import Message, Rollout
from torchtitan_rl.tasks.task import Example, Reward, Task
from torchtitan_rl.tasks.tools.tool import ArgumentsError, tool


class Plain(Task):
    """Has no tools and answers nobody."""

    @dataclass(kw_only=True, slots=True)
    class Config(Task.Config):
        name: str = "plain"

    config: Config

    def train_example(self, index: int) -> Example:
        return Example([], None)

    def heldout_examples(self, count: int) -> list[Example]:
        return []

    def reward(
        self, completions: Sequence[Rollout], expected_answer: Any
    ) -> Sequence[Reward | float]:
        return [0.0] * len(completions)


class Secret:
    """Cannot be pickled."""

    def __reduce__(self):
        raise TypeError("secrets do not travel")


class Unreadable:
    """Can be pickled, and not read again."""

    def __reduce__(self):
        return (int, ("not a number",))


class Tricky(Plain):
    @dataclass(kw_only=True, slots=True)
    class Config(Plain.Config):
        name: str = "tricky"
        broken: bool = False

    config: Config
    garbage: ClassVar[dict[str, Any]] = {
        "none": None,
        "bytes": b"caf\xc3\xa9 \xff",
        "surrogate": "a\ud800b",
        "nested surrogate": ["\udfff"],
        "set": {1},
        "function": len,
        "tuple keys": {(1, 2): 3},
        "nan": float("nan"),
        "json": {"é": [1, 2.5, None, True]},
        "empty": "",
    }

    def __init__(self, config: Config, *, seed: int = 0) -> None:
        super().__init__(config, seed=seed)
        if config.broken:
            raise KeyError("no data")
        self.built_in = os.getpid()

    @tool
    def add(self, a: int, b: int = 1) -> int:
        """Add two numbers."""
        return a + b

    @tool
    def count(self, state: dict[str, Any], then: Literal["", "raise", "hang", "exit"] = "") -> int:
        """Count calls in the state, and then perhaps fail."""
        state["calls"] = state.get("calls", 0) + 1
        state.setdefault("log", []).append(then)
        match then:
            case "raise":
                raise RuntimeError("after the change")
            case "hang":
                time.sleep(600)
            case "exit":
                os._exit(3)
        return state["calls"]

    @tool
    def fail(self, message: str = "", kind: str = "ValueError") -> str:
        """Raise."""
        raise {
            "ValueError": ValueError,
            "SystemExit": SystemExit,
            "ArgumentsError": ArgumentsError,
        }[kind](message)

    @tool
    def hang(self, how: Literal["sleep", "power", "regex"] = "sleep") -> str:
        """Never return; two of the ways keep the GIL."""
        match how:
            case "power":
                return str(9**9**9)
            case "regex":
                return str(re.match(r"(a+)+$", "a" * 64 + "b"))
        time.sleep(600)
        return "woken"

    @tool
    def die(self, how: Literal["exit", "segfault"]) -> None:
        """End the process."""
        if how == "exit":
            os._exit(0)
        os.kill(os.getpid(), 11)

    @tool
    def large(self, megabytes: int, character: str = "x") -> str:
        """Return many characters."""
        return character * (megabytes * 2**20)

    @tool
    def odd(self, what: str) -> Any:
        """Return something that is no text."""
        if what == "itself":
            itself: list[Any] = []
            itself.append(itself)
            return itself
        return self.garbage[what]

    @tool
    def hide(self, state: dict[str, Any], what: Literal["secret", "unreadable", "large"]) -> str:
        """Put into the state what cannot travel."""
        state["hidden"] = {"secret": Secret, "unreadable": Unreadable}.get(what, bytes)()
        if what == "large":
            state["hidden"] = bytes(2**27)
        return "hidden"

    @tool
    def where(self) -> list[int]:
        """This process, the one that built the task, and a random number."""
        return [os.getpid(), self.built_in, random.getrandbits(60)]

    @tool
    def child(self, pid_file: str) -> str:
        """Start a process that does not end, tell its id, and hang."""
        sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path(pid_file + ".part").write_text(f"{os.getpid()} {sleeper.pid} {os.getppid()}")
        os.rename(pid_file + ".part", pid_file)
        return str(re.match(r"(a+)+$", "a" * 64 + "b"))

    @tool
    async def wait(
        self,
        state: dict[str, Any],
        then: Literal["return", "raise", "exit", "cancel", "hang", "deaf", "die"] = "return",
    ) -> int:
        """Wait without a process."""
        state["waited"] = True
        await asyncio.sleep(0)
        match then:
            case "raise":
                raise ValueError("waited in vain")
            case "exit":
                sys.exit("bye")
            case "cancel":
                raise asyncio.CancelledError
            case "die":
                os._exit(3)  # of the actor itself
            case "hang":
                await asyncio.sleep(600)
            case "deaf":
                for _ in range(1000):
                    try:
                        await asyncio.sleep(600)
                    except asyncio.CancelledError:
                        state["deaf"] = True
        return os.getpid()

    def answer(self, messages: list[Message], state: dict[str, Any]) -> list[Message]:
        said = messages[-1]["content"]
        state["answered"] = said
        match said:
            case "raise":
                raise LookupError("nobody there")
            case "hang":
                time.sleep(600)
            case "exit":
                os._exit(1)
            case "text":
                return "hello"  # type: ignore[return-value]
            case "no role":
                return [{"content": "hello"}]
            case "no content":
                return [{"role": "user", "content": None}]
            case "long":
                return [{"role": "user", "content": "x" * 10_000_000}]
            case "bye":
                return []
        return [{"role": "user", "content": f"{said}? \ud800"}]


class Waiting(Plain):
    """Answers without a process."""

    @dataclass(kw_only=True, slots=True)
    class Config(Plain.Config):
        name: str = "waiting"

    config: Config

    async def answer(  # type: ignore[override]
        self, messages: list[Message], state: dict[str, Any]
    ) -> list[Message]:
        await asyncio.sleep(0)
        return [{"role": "user", "content": "waited"}]


class Several(Plain):
    """All of them."""

    @dataclass(kw_only=True, slots=True)
    class Config(Plain.Config):
        name: str = "several"

    config: Config

    def members(self) -> dict[str, Task]:
        parts: list[Task] = [
            config.build(seed=self.seed)
            for config in (Plain.Config(), Tricky.Config(), Waiting.Config())
        ]
        return {part.name: part for part in parts}


def ended(process: psutil.Process) -> bool:
    """Whether a process is no more; who has to reap it may not have done so yet."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not condition():
            await asyncio.sleep(0.02)

"""A task that is wrong in as many ways as there are; imported by the trial's process, too."""

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

from torchtitan_rl.tasks.task import Example, Reward, Task
from torchtitan_rl.tasks.tools.tool import tool


class Misbehaving(Task):
    """Does what its setting says."""

    @dataclass(kw_only=True, slots=True)
    class Config(Task.Config):
        name: str = "misbehaving"
        how: str = ""

    config: Config

    def __init__(self, config, *, seed=0):
        super().__init__(config, seed=seed)
        if config.how == "no task":
            raise KeyError("data")

    def train_example(self, index):
        match self.config.how:
            case "example raises":
                return {}["lost"]
            case "dict":
                return {"messages": [], "expected_answer": 7}
            case "text":
                return Example("What is 3 + 4?", 7)
            case "no role":
                return Example([{"content": "What is 3 + 4?"}], 7)
            case "state":
                return Example([{"role": "user", "content": "3 + 4"}], 7, state=None)
        return Example([{"role": "user", "content": "What is 3 + 4?"}], 7, state={"calls": 0})

    def heldout_examples(self, count):
        match self.config.how:
            case "nothing held out":
                return []
            case "held-out text":
                return ["What is 3 + 4?"]
        return [Example([{"role": "user", "content": "What is 4 + 4?"}], 8)]

    def demonstration(self, example, rng):
        return {}[example.expected_answer]

    def reward(self, completions, expected_answer):
        match self.config.how:
            case "none":
                return None
            case "count":
                return [1.0]
            case "type":
                return [c.text == "7" and "right" for c in completions]
            case "nan":
                return [Reward(float("nan"), False) for _ in completions]
            case "raises":
                return [c.answer for c in completions]
            case "raises on some":
                return [float(int(c.text) == expected_answer) for c in completions]
            case "exits":
                raise SystemExit(3)
            case "dies":
                print("no license", flush=True)
                os._exit(3)
            case "hangs":
                threading.Event().wait(60)
        return [float(c.text == str(expected_answer)) for c in completions]


class BadTool(Misbehaving):
    """Has a tool whose argument can be checked and not described."""

    @dataclass(kw_only=True, slots=True)
    class Config(Misbehaving.Config):
        name: str = "bad_tool"

    config: Config

    @tool
    def apply(self, function: Callable[[int], int]) -> str:
        """Apply a function."""
        return str(function(1))

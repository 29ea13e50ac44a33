"""A task with a tool that works, or fails."""

from dataclasses import dataclass

from torchtitan_rl.tasks.task import Example, Task
from torchtitan_rl.tasks.tools.tool import tool


class Lookup(Task):
    """In which country is a city?"""

    @dataclass(kw_only=True, slots=True)
    class Config(Task.Config):
        name: str = "lookup"
        show_tools: bool = False
        broken: bool = False

    config: Config

    @tool
    def lookup(self, city: str) -> str:
        """Say in which country a city is."""
        if self.config.broken:
            raise ConnectionError("the atlas is gone")
        return {"Rome": "Italy", "Oslo": "Norway"}[city]

    def train_example(self, index):
        return Example([{"role": "user", "content": "Where is Rome?"}], "Italy")

    def heldout_examples(self, count):
        return [self.train_example(0)]

    def reward(self, completions, expected_answer):
        return [float(c.text == expected_answer) for c in completions]

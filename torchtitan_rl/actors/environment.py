"""stub"""

from dataclasses import dataclass
from typing import Any

from monarch.actor import Actor
from torchtitan.config import Configurable

from torchtitan_rl.tasks.tools import ToolCall
from torchtitan_rl.types import Message, Outcome


@dataclass(slots=True)
class Request:
    task: str
    messages: list[Message]
    calls: list[ToolCall]
    state: dict[str, Any]
    seconds: float | None = None


@dataclass(slots=True)
class Response:
    messages: list[Message]
    state: dict[str, Any]
    outcomes: list[Outcome]
    failure: str = ""


class Environment(Actor, Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        timeout_seconds: float = 30.0
        concurrent_calls: int = 16
        max_result_chars: int = 8192

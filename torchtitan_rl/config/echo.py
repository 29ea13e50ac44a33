"""Echo: which tokens that the policy did not sample also train, by cross-entropy."""

import math
from dataclasses import dataclass, field
from typing import Literal

from torchtitan_rl.core.plugins import check_name

Role = Literal["system", "user", "assistant", "tool"]
ROLES: tuple[Role, ...] = ("system", "user", "assistant", "tool")


@dataclass(kw_only=True, slots=True)
class RoleEcho:
    """Echo what messages of a role say."""

    alpha: float = 1.0
    """Weight of an echoing token's cross-entropy; 0 only takes the token out of RL."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.alpha):
            raise ValueError(f"echo alpha must be a finite number; got {self.alpha}")


@dataclass(kw_only=True, slots=True)
class ToolEcho(RoleEcho):
    """Echo what tools answer."""

    tool_names: tuple[str, ...] | None = None
    """Tools whose answers echo; None: all tools, named or not."""

    def __post_init__(self) -> None:
        # By name: with slots, the class that super() knows is not the one that is used.
        RoleEcho.__post_init__(self)
        if self.tool_names is None:
            return
        if isinstance(self.tool_names, str) or not self.tool_names:
            raise ValueError(
                f"echo.tool.tool_names must name at least one tool, or be None for all; got "
                f"{self.tool_names!r}"
            )
        self.tool_names = tuple(sorted(self.tool_names))  # a set is as good, but no JSON


@dataclass(kw_only=True, slots=True)
class EchoConfig:
    """Which tokens of a rollout echo; a role that is None does not."""

    system: RoleEcho | None = None
    """Echo what system messages say."""
    user: RoleEcho | None = None
    """Echo what user messages say: the prompt, and what someone answers."""
    assistant: RoleEcho | None = None
    """Cross-entropy on the model's own samples, in place of RL on them, and on what the first
    prompt shows of the assistant."""
    tool: ToolEcho | None = None
    """Echo what tools answer."""
    filter: str = ""
    """`package.module:function` of a rollout that says, turn by turn, which tokens may echo."""
    filter_kwargs: dict[str, float | str] = field(default_factory=dict)
    """Keyword arguments of the echo filter."""

    def __post_init__(self) -> None:
        if not any(getattr(self, role) for role in ROLES):
            raise ValueError("echo needs at least one of system, user, assistant, tool")
        if self.filter:
            check_name(self.filter, (), what="echo filter")

"""Titles of worker processes, so that `ps` and `top` tell them apart."""

import os

from setproctitle import setproctitle, setthreadtitle

TITLE_VARIABLE = "TORCHTITAN_RL_TITLE"
"""Environment variable with the title of a worker and of what it starts."""


def make_title(who: str, run: str) -> str:
    """The title of a worker: `torchtitan-rl trainer <run>`."""
    return f"torchtitan-rl {who} {run}"


def show_title(part: str = "") -> None:
    """Show this process under the title that it was given; `part` says which part of an actor it
    is, such as `rank 1`. Does nothing in a process without a title."""
    if title := os.environ.get(TITLE_VARIABLE):
        setproctitle(f"{title}, {part}" if part else title)
        # `top` shows 15 characters, which must not be those that all have in common.
        setthreadtitle(title.removeprefix("torchtitan-rl "))

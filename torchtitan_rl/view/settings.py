"""Settings of a run, one per row, as the command line names them."""

from typing import Any

from torchtitan_rl.view.columns import text

MAX_SETTINGS = 2000
MAX_CHARACTERS = 2000
_MAX_DEPTH = 12


def settings_of(config: dict[str, Any]) -> dict[str, str]:
    """The settings of a config by their dotted names; their values as text.

    Example:
        >>> settings_of({"steps": 80, "task": {"tasks": [{"name": "sum"}]}, "stop": []})
        {'steps': '80', 'task.tasks.0.name': 'sum', 'stop': '[]'}
    """
    found: dict[str, str] = {}
    _flatten("", config, found, _MAX_DEPTH)
    return found


def _flatten(name: str, value: Any, found: dict[str, str], depth: int) -> None:
    members = _members(value) if depth else None
    if not members:
        if name and len(found) < MAX_SETTINGS:
            found[name] = text("null" if value is None else value)[:MAX_CHARACTERS]
        return
    for key, member in members:
        _flatten(f"{name}.{key}" if name else key, member, found, depth - 1)


def _members(value: Any) -> list[tuple[str, Any]] | None:
    """Members of an object, or of a list of objects; None for a plain value.

    A list of plain values, such as the betas of an optimizer, is one setting.
    """
    if isinstance(value, dict):
        return [(text(key), member) for key, member in value.items()]
    if isinstance(value, list) and any(isinstance(member, dict) for member in value):
        return [(str(i), member) for i, member in enumerate(value)]
    return None

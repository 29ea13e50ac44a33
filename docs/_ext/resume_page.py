"""The settings that a resumed run may change, read from the fields of the config."""

from torchtitan_rl.config.resume import free_settings
from torchtitan_rl.recipes import grpo_sum_digits_tiny


def resume() -> str:
    """Markdown: a row for each part of the config, with the settings in it that may change."""
    rows: dict[str, list[str]] = {}
    for name in free_settings(grpo_sum_digits_tiny()):
        part = name.partition(".")[0] if "." in name else "the run"
        rows.setdefault(part, []).append(f"`{name}`")
    lines = [f"| {part} | {', '.join(names)} |" for part, names in rows.items()]
    return "\n".join(["| part | settings |", "| --- | --- |", *lines])

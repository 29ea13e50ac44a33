"""The recipes page: what every recipe of this repository is, from what it builds."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from config_fields import MISSING, default_of
from config_page import shown, text

from torchtitan_rl.config import RunConfig
from torchtitan_rl.recipes.registry import built_in_recipes, first_line


@dataclass(frozen=True, slots=True)
class Setting:
    value: Any
    usual: Any
    """The default of its class."""


Settings = dict[str, Setting]


def recipes() -> str:
    """Markdown: a table of all, then a section for each with what it sets."""
    found = built_in_recipes()
    built = {name: recipe() for name, recipe in found.items()}
    lines = [
        "| recipe | task | loss, advantage | steps × prompts × samples | runs on |",
        "| --- | --- | --- | --- | --- |",
        *(row(name, config) for name, config in built.items()),
        "",
    ]
    seen: dict[str, Settings] = {}
    for name, config in built.items():
        settings = flat(config)
        lines += [f"### `{name}`", "", text(first_line(found[name])), ""]
        lines += differences(settings, seen)
        seen[name] = settings
    return "\n".join(lines)


def row(name: str, config: RunConfig) -> str:
    tasks = ", ".join(f"`{part.name}`" for part in config.task.parts())
    algorithm = f"`{config.trainer.loss.name}`, `{config.advantage.name}`"
    size = f"{config.steps} × {config.prompts_per_step} × {config.samples_per_prompt}"
    # Models that the user fetches are for GPUs.
    gpus = sum(map(len, config.gpus)) if config.model.startswith("models/") else 0
    cells = (f"[`{name}`](#{name})", tasks, algorithm, size, f"{gpus} GPUs" if gpus else "a laptop")
    return f"| {' | '.join(cells)} |"


def differences(settings: Settings, earlier: dict[str, Settings]) -> list[str]:
    """What a recipe sets: beyond the defaults, or beyond the earlier recipe that it is most like,
    if that is shorter to say."""
    choices = {"": defaults(), **earlier}
    base = min(choices, key=lambda name: len(changed(settings, choices[name])))
    said = f"As [`{base}`](#{base}), except:" if base else "What it sets beyond the defaults:"
    lines = [said, "", "| setting | value |", "| --- | --- |"]
    for name, value in changed(settings, choices[base]).items():
        lines.append(f"| `{name}` | {shown(value)} |")
    return [*lines, ""]


def changed(settings: Settings, base: Settings) -> dict[str, Any]:
    """The values that differ from the base's; of a part that the base lacks, from its class's."""
    return {
        name: setting.value
        for name, setting in settings.items()
        if setting.value != (base[name].value if name in base else setting.usual)
    }


def defaults() -> Settings:
    """What a recipe need not say."""
    found: Settings = {}
    for field in dataclasses.fields(RunConfig):
        found |= flat_value(field.name, default_of(field), MISSING)
    return found


def flat(config: Any, prefix: str = "") -> Settings:
    """All settings by their dotted names; lists of configs are numbered, as on the command line."""
    found: Settings = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        found |= flat_value(prefix + field.name, value, default_of(field))
    return found


def flat_value(name: str, value: Any, usual: Any) -> Settings:
    if dataclasses.is_dataclass(value):
        own = type(value).__qualname__
        return {name: Setting(Kind(own), Kind(type(usual).__qualname__)), **flat(value, f"{name}.")}
    if isinstance(value, list) and any(map(dataclasses.is_dataclass, value)):
        found: Settings = {}
        for number, one in enumerate(value):
            found |= flat_value(f"{name}.{number}", one, MISSING)
        return found
    return {name: Setting(value, usual)}


class Kind(str):
    """The class of a part of a config, shown without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)

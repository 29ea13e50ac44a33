"""Classes that are built from a `Config` nested in them, as torchtitan's are.

Not torchtitan's own `Configurable`, because that imports torch: a grader and an environment need
none, and importing it takes longer than everything else they do before they are ready.
"""

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, ClassVar

from torchtitan_rl.core.settings import checks_numbers


class Configurable:
    """A class whose objects are made by `Config.build`, with the config as their first argument.

    Example:
        class Coins(Configurable):
            @dataclass(kw_only=True, slots=True)
            class Config(Configurable.Config):
                sides: int = 2

            def __init__(self, config: Config, *, seed: int) -> None: ...

        Coins.Config(sides=6).build(seed=0)
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        _owner: ClassVar[type | None] = None

        def build(self, **runtime: Any) -> Any:
            """An object of the class this config is nested in, made with a copy of the config and
            with what is known only when the run is."""
            if self._owner is None:
                raise TypeError(f"{type(self).__qualname__} is not nested in a Configurable class")
            return self._owner(config=replace(self), **runtime)

        def to_dict(self) -> dict[str, Any]:
            """All settings, as JSON can have them."""
            return to_dict(self)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        config = cls.__dict__.get("Config")
        if config is None:
            return
        if "__slots__" not in vars(config) or not all(f.kw_only for f in fields(config) if f.init):
            raise TypeError(f"{cls.__name__}.Config must be a @dataclass(kw_only=True, slots=True)")
        config._owner = cls
        checks_numbers(config)


def to_dict(config: Any) -> dict[str, Any]:
    """All settings of a config dataclass, as JSON can have them."""
    return {field.name: _plain(getattr(config, field.name)) for field in fields(config)}


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return to_dict(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value if isinstance(value, str | int | float | bool | None) else repr(value)

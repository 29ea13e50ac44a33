"""Built-in generators and trainers by name; actors/backends.py has the classes they stand for."""

from collections.abc import Mapping

from torchtitan_rl.core.plugins import check_keywords, check_limits, check_name

Limits = Mapping[str, tuple[float, float]]

SECONDS = (0.0, 1e9)
SHARE = (0.0, 1.0)

GENERATOR_BACKENDS: dict[str, Limits] = {
    "vllm": {},
    "simulated": {
        "seconds_per_token": SECONDS,
        "seconds_per_pull": SECONDS,
        "failure_rate": SHARE,
        "death_rate": SHARE,
    },
}
"""Keyword arguments of each built-in generator, with the least and largest value."""

TRAINER_BACKENDS: dict[str, Limits] = {
    "torchtitan": {},
    "simulated": {"seconds_per_step": SECONDS, "seconds_per_publish": SECONDS},
}
"""Keyword arguments of each built-in trainer, with the least and largest value."""


def check_backend(
    who: str, name: str, kwargs: Mapping[str, object], backends: Mapping[str, Limits]
) -> None:
    """Refuse an unknown built-in backend, and keyword arguments it does not take. A backend by
    import path is looked at before a run starts its processes."""
    what = f"{who}.backend"
    if check_name(name, backends, what=what, kind="Class"):
        check_keywords(name, backends[name], kwargs, what=what)
        check_limits(f"{who}.kwargs", backends[name], kwargs)

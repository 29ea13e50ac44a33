"""Keyword arguments of a backend of one's own: those it cannot get are refused by name."""

import inspect

import pytest
from monarch._src.actor.proc_mesh import ProcMesh
from monarch.actor import Actor

from torchtitan_rl.actors.backends import SPAWN_ARGUMENTS, check_backends
from torchtitan_rl.actors.simulated import SimulatedGenerator, SimulatedTrainer
from torchtitan_rl.config import GeneratorConfig, TrainerConfig
from torchtitan_rl.supervision.processes import spawn


class OpenGenerator(SimulatedGenerator):
    """Takes any keyword argument, so that nothing but our own check refuses one."""

    def __init__(self, config, **kwargs): ...


class OpenTrainer(SimulatedTrainer):
    def __init__(self, config, **kwargs): ...


class StrictGenerator(SimulatedGenerator):
    def __init__(self, config, *, model, seed, answers="none"): ...


def check(who: str, cls: type, kwargs: dict) -> None:
    own = {"backend": f"{__name__}:{cls.__name__}", "kwargs": kwargs}
    check_backends(
        GeneratorConfig(**own if who == "generator" else {}),
        TrainerConfig(**own if who == "trainer" else {}),
    )


@pytest.mark.parametrize(
    ("who", "cls", "names", "fix"),
    [
        ("generator", OpenGenerator, ["model", "seed"], "remove it from generator.kwargs"),
        (
            "trainer",
            OpenTrainer,
            [
                *("model", "seed", "steps", "keep", "async_mode"),
                *("checkpoint_folder", "tokens_folder", "weights_folder"),
            ],
            "remove it from trainer.kwargs",
        ),
        ("generator", OpenGenerator, SPAWN_ARGUMENTS, "rename the argument of OpenGenerator"),
        ("trainer", OpenTrainer, SPAWN_ARGUMENTS, "rename the argument of OpenTrainer"),
        ("generator", StrictGenerator, ["answer"], "it takes model, seed, answers"),
        ("generator", StrictGenerator, ["config"], "multiple values for argument 'config'"),
    ],
)
def test_an_argument_that_the_class_cannot_get_is_refused(who, cls, names, fix):
    for name in names:
        with pytest.raises(ValueError, match=fix) as refused:
            check(who, cls, {name: 1.0})
        assert f"{who}.backend '{__name__}:{cls.__name__}'" in str(refused.value)
        assert repr(name) in str(refused.value)


def test_all_other_arguments_reach_the_class():
    check("generator", StrictGenerator, {"answers": "canned"})
    check("generator", OpenGenerator, {"steps": 3, "keep": 1})  # a trainer's, not a generator's
    check("trainer", OpenTrainer, {"environment": "x"})


def test_every_name_that_starting_a_process_uses_is_refused():
    ours = inspect.signature(spawn).parameters.values()
    monarchs = inspect.signature(ProcMesh._spawn_nonblocking_on).parameters.values()
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    used = {each.name for each in [*ours, *monarchs] if each.kind not in variable}
    assert used == set(SPAWN_ARGUMENTS)


class WakefulGenerator(Actor):
    """Has all that a generator must have, and cannot sleep."""

    def __init__(self, config, *, model, seed): ...

    setup = SimulatedGenerator.setup
    generate = SimulatedGenerator.generate
    cancel = SimulatedGenerator.cancel
    pull_weights = SimulatedGenerator.pull_weights


def test_a_backend_that_cannot_sleep_is_refused_only_where_it_would_have_to():
    generator = GeneratorConfig(backend=f"{__name__}:WakefulGenerator")
    check_backends(generator, TrainerConfig())
    with pytest.raises(ValueError, match=r"placement colocated: .* has no endpoint sleep, wake"):
        check_backends(generator, TrainerConfig(), colocated=True)

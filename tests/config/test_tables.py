"""What configs know by tables, so that they need no torch, is what the code really has."""

import inspect

import pytest

from torchtitan_rl.actors import backends as actor_backends
from torchtitan_rl.algorithms.advantage import ADVANTAGES
from torchtitan_rl.algorithms.kl import ESTIMATORS
from torchtitan_rl.algorithms.objective import policy_loss
from torchtitan_rl.algorithms.policy_loss import LOSSES
from torchtitan_rl.algorithms.probe import needs_generator_logprobs, try_loss
from torchtitan_rl.config import GeneratorConfig, LossConfig, TrainerConfig
from torchtitan_rl.config.advantage import BUILT_IN_ADVANTAGES
from torchtitan_rl.config.backends import GENERATOR_BACKENDS, TRAINER_BACKENDS
from torchtitan_rl.config.loss import BUILT_IN_LOSSES, KL_ESTIMATORS


def test_every_built_in_is_in_its_table():
    assert LOSSES.keys() == BUILT_IN_LOSSES.keys()
    assert ADVANTAGES.keys() == BUILT_IN_ADVANTAGES.keys()
    assert tuple(ESTIMATORS) == KL_ESTIMATORS
    assert actor_backends.GENERATORS.keys() == GENERATOR_BACKENDS.keys()
    assert actor_backends.TRAINERS.keys() == TRAINER_BACKENDS.keys()


@pytest.mark.parametrize("name", LOSSES)
def test_what_is_known_of_a_built_in_loss_is_true(name):
    known, defaults = BUILT_IN_LOSSES[name], LOSSES[name].__kwdefaults__ or {}
    assert defaults.keys() == known.limits.keys()
    for argument, value in defaults.items():
        least, largest = known.limits[argument]
        assert least <= value <= largest

    def loss(inputs):
        return policy_loss(LossConfig(name=name), inputs)

    try_loss(name, loss, has_reference=False)
    assert needs_generator_logprobs(loss) is known.needs_generator_logprobs


@pytest.mark.parametrize("name", ADVANTAGES)
def test_what_is_known_of_a_built_in_advantage_is_true(name):
    _group, *own = inspect.signature(ADVANTAGES[name]).parameters
    assert tuple(own) == BUILT_IN_ADVANTAGES[name]


def test_what_is_known_of_a_built_in_backend_is_true():
    runtime = {"self", "config", "model", "seed", "steps", "keep", "async_mode"}
    runtime |= {"checkpoint_folder", "tokens_folder", "weights_folder"}
    generators = [
        (GENERATOR_BACKENDS[name], actor_backends.generator_class(GeneratorConfig(backend=name)))
        for name in GENERATOR_BACKENDS
    ]
    trainers = [
        (TRAINER_BACKENDS[name], actor_backends.trainer_class(TrainerConfig(backend=name)))
        for name in TRAINER_BACKENDS
    ]
    for limits, cls in generators + trainers:
        assert inspect.signature(cls.__init__).parameters.keys() - runtime == limits.keys()

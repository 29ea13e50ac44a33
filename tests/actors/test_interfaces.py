"""The contracts of the actors: ours keep them, and a class that does not is refused by name."""

from dataclasses import replace

import pytest
from monarch.actor import Actor, concurrent_endpoint

from tests.support import low_tokens
from torchtitan_rl.actors.environment import Environment
from torchtitan_rl.actors.generator import VLLMGenerator
from torchtitan_rl.actors.grader import Grader
from torchtitan_rl.actors.interfaces import (
    ContractError,
    EnvironmentProtocol,
    GeneratorProtocol,
    GraderProtocol,
    ReferenceProtocol,
    TrainerProtocol,
    check_contract,
)
from torchtitan_rl.actors.reference import Reference
from torchtitan_rl.actors.simulated import SimulatedGenerator, SimulatedTrainer
from torchtitan_rl.actors.trainer import Trainer
from torchtitan_rl.config import GeneratorConfig
from torchtitan_rl.run.checks import check_code


@pytest.mark.parametrize(
    ("actor", "protocol"),
    [
        (VLLMGenerator, GeneratorProtocol),
        (SimulatedGenerator, GeneratorProtocol),
        (Grader, GraderProtocol),
        (Environment, EnvironmentProtocol),
        (Trainer, TrainerProtocol),
        (SimulatedTrainer, TrainerProtocol),
        (Reference, ReferenceProtocol),
    ],
)
def test_our_actors_keep_their_contracts(actor, protocol):
    check_contract(actor, protocol, what=actor.__name__)


class Half(Actor):
    @concurrent_endpoint
    async def setup(self): ...

    @concurrent_endpoint
    async def generate(self, prompts, *, sampling_config=None, group_ids=None): ...


class Undecorated(Half):
    @concurrent_endpoint
    async def generate(self, prompts, **_how): ...

    async def cancel(self, group_ids): ...

    async def pull_weights(self, handle): ...


class Narrow(Half):
    @concurrent_endpoint
    async def cancel(self, group_ids): ...

    @concurrent_endpoint
    async def pull_weights(self, handle): ...


@pytest.mark.parametrize(
    ("actor", "problem"),
    [
        (Half, "mine has no endpoint cancel, pull_weights"),
        (Undecorated, "mine: cancel is no endpoint; decorate it with"),
        (Narrow, "mine: generate does not take sample_numbers"),
    ],
)
def test_a_class_that_breaks_its_contract_is_refused_by_name(actor, problem):
    with pytest.raises(ContractError, match=problem):
        check_contract(actor, GeneratorProtocol, what="mine")


def test_a_run_refuses_such_a_backend_before_it_starts_anything():
    backend = f"{__name__}:Half"
    with pytest.raises(ContractError, match=f"'{backend}' has no endpoint cancel"):
        check_code(replace(low_tokens(), generator=GeneratorConfig(backend=backend)))

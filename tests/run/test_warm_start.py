"""The starting model: made once, from a seed, and taken up again where Ctrl-C left it."""

import asyncio
import contextlib
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support import low_tokens
from torchtitan_rl.actors.generator import VLLMGenerator
from torchtitan_rl.actors.trainer import Trainer
from torchtitan_rl.config import GeneratorConfig, RolloutConfig, TrainerConfig, WarmStartConfig
from torchtitan_rl.core.waiting import Interrupted
from torchtitan_rl.run import warm_start
from torchtitan_rl.run.controller import Controller
from torchtitan_rl.run.starting_model import model_folder
from torchtitan_rl.run.warm_start import (
    Reached,
    demonstration,
    ensure_starting_model,
    work_folder,
)
from torchtitan_rl.tasks.sum_digits import SumDigits


def config_for(folder: Path) -> Controller.Config:
    warm = WarmStartConfig(
        steps=6, demonstrations_per_step=4, evaluate_every=6, cache_dir=str(folder)
    )
    # What is sampled does not matter here.
    generator = GeneratorConfig(backend="simulated", sampling=low_tokens().generator.sampling)
    return replace(
        low_tokens(), model="", warm_start=warm, task=SumDigits.Config(), generator=generator
    )


def sampled_at(temperature: float, n: int = 4) -> GeneratorConfig:
    sampling = replace(low_tokens().generator.sampling, temperature=temperature, n=n)
    return replace(low_tokens().generator, sampling=sampling)


def stop_after(steps: int, seen: list[str]):
    """In place of signal handlers: a Ctrl-C that comes in that step of imitation."""

    @contextlib.contextmanager
    def signals(controller: Controller):
        train, taken = controller.train, 0

        async def counted(episodes):
            nonlocal taken
            taken += 1
            if taken == steps:
                controller.interrupted.set()
            seen.extend(e.group_id for e in episodes)
            return await train(episodes)

        controller.train = counted  # type: ignore[method-assign]
        yield

    return signals


async def test_an_interrupted_warm_start_goes_on_where_it_stopped(tmp_path, capsys):
    config, seen = config_for(tmp_path), []
    with pytest.raises(Interrupted):
        await ensure_starting_model(config, stop_after(4, seen))
    assert not model_folder(config).exists()
    await ensure_starting_model(config, stop_after(100, seen))
    assert seen == [f"demonstration/{i}" for i in range(6 * 4)]
    assert (model_folder(config) / "model.safetensors").is_file()
    assert [f.name for f in tmp_path.iterdir()] == [model_folder(config).name]
    lines = r"imitation step +6 .* held-out accuracy (\S+)% sampled, (\S+)% greedy"
    assert re.search(lines, capsys.readouterr().out)


async def test_imitation_ends_when_samples_are_right_enough_not_greedy_answers(monkeypatch):
    reached = [Reached(0.08, 0.53), Reached(0.31, 0.7), Reached(0.52, 0.8), Reached(0.6, 0.9)]
    judged = iter(reached)

    class Student:
        """A controller that only counts its steps."""

        steps_done, interrupted = 0, asyncio.Event()

        async def train(self, episodes):
            assert not episodes

    async def judge(student):
        return next(judged)

    monkeypatch.setattr(warm_start, "demonstration", lambda student, index: [])
    monkeypatch.setattr(warm_start, "judge", judge)
    student = Student()
    warm = WarmStartConfig(steps=100, evaluate_every=10, enough_accuracy=0.5)
    assert await warm_start.imitate(student, warm) == reached[2]
    assert student.steps_done == 30


async def test_a_model_that_is_there_is_used_as_it_is(tmp_path):
    config = config_for(tmp_path)
    model_folder(config).mkdir(parents=True)
    await ensure_starting_model(config, None)
    assert not list(model_folder(config).iterdir())


async def test_simulated_actors_start_from_a_model_that_no_real_run_is_given(tmp_path):
    simulated = replace(
        config_for(tmp_path),
        trainer=TrainerConfig(backend="simulated", threads=1, kwargs={"seconds_per_step": 1000.0}),
        evaluation=replace(low_tokens().evaluation, every=100),
        prompts_per_step=2,
        steps=1,
        output_dir=str(tmp_path / "outputs"),
        run_name="run",
    )
    await ensure_starting_model(simulated, None)  # without 1000 s a step of imitation
    quick = replace(simulated, trainer=TrainerConfig(backend="simulated", threads=1))
    assert model_folder(quick) == model_folder(simulated)
    async with Controller(quick) as controller:
        await controller.run()
        # A demonstration has no token_versions, and teaches a simulated trainer nothing.
        await controller.train(demonstration(controller, 0))
    real = replace(quick, generator=VLLMGenerator.Config(), trainer=Trainer.Config())
    folders = [quick, replace(quick, trainer=real.trainer), real]
    assert len({model_folder(config) for config in folders}) == 3


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({}, True),
        ({"steps": 7}, True),
        ({"seed": 1}, False),
        ({"rollout": RolloutConfig(thinking=True)}, False),
        ({"task": SumDigits.Config(max_numbers=3)}, False),
        ({"warm_start": WarmStartConfig(lr=1e-3)}, False),
        ({"warm_start": WarmStartConfig(experts=8)}, False),
        ({"generator": sampled_at(0.5)}, False),  # when imitation ends is judged by samples
        ({"generator": sampled_at(1.0, n=16)}, True),
    ],
    ids=str,
)
def test_the_folder_is_that_of_the_settings_that_make_the_model(change, same):
    config = replace(low_tokens(), model="", warm_start=WarmStartConfig(), task=SumDigits.Config())
    assert (model_folder(replace(config, **change)) == model_folder(config)) is same


def test_only_ctrl_c_keeps_what_was_begun(tmp_path):
    with contextlib.suppress(Interrupted), work_folder(tmp_path / "m") as first:
        (first / "begun").touch()
        with work_folder(tmp_path / "m") as second:  # a run beside it makes its own
            assert second != first
        raise Interrupted
    with contextlib.suppress(KeyError), work_folder(tmp_path / "m") as again:
        assert again == first
        assert (again / "begun").exists()
        raise KeyError
    assert not list(tmp_path.iterdir())

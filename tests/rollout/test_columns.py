"""A per-token field of a generator's own is declared once, set once, and found at every stage."""

import importlib
import math
from dataclasses import replace

import pytest

from tests.support import low_tokens
from torchtitan_rl.actors.interfaces import SampleRequest
from torchtitan_rl.batching.grid import make_grid
from torchtitan_rl.config import GeneratorConfig, RolloutConfig, SamplingConfig, TrainerConfig
from torchtitan_rl.core.columns import COLUMNS
from torchtitan_rl.core.waiting import Clock
from torchtitan_rl.observability.json_lines import read_lines
from torchtitan_rl.rollout.episodes import make_batch
from torchtitan_rl.rollout.replay import open_replay
from torchtitan_rl.run.controller import Controller
from torchtitan_rl.view.sequences import page_columns

BACKEND = "tests.rollout.surprising_generator"


@pytest.fixture
def backend(monkeypatch):
    """A backend whose import declares a column, which the test removes at its end."""
    column = importlib.import_module(BACKEND).SURPRISE
    COLUMNS.pop(column.name, None)
    monkeypatch.setitem(COLUMNS, column.name, column)
    return f"{BACKEND}:SurprisingGenerator"


def expected(tokens):
    return [token / 4 for token in tokens]


async def test_a_field_that_the_generator_makes_is_found_wherever_its_tokens_go(
    tmp_path, tiny_model, backend
):
    sampling = SamplingConfig(n=3, max_tokens=8)
    config = replace(
        low_tokens(),
        model=str(tiny_model),
        steps=1,
        prompts_per_step=2,
        generator=GeneratorConfig(backend=backend, sampling=sampling, threads=1),
        trainer=TrainerConfig(backend="simulated", threads=1),
        output_dir=str(tmp_path),
        run_name="run",
    )
    async with Controller(config) as controller:
        request = SampleRequest([1, 2], replace(sampling, n=1), "a group", "a seed")
        [completion] = await controller.actors.generators.sample([request])
        records = await controller.rollouts(0, Clock())
        await controller.save_rollouts(0, records)
        controller.rollout_log.close()

    assert completion.surprise == expected(completion.token_ids)
    lines = list(read_lines(tmp_path / "run" / "rollouts" / "step-000000.jsonl"))
    assert len(lines) == 6
    for _, saved in lines:
        [sequence] = saved["sequences"]
        assert sequence["surprise"] == expected(sequence["token_ids"])
        # The page shows it under its own name, as it knows no declaration.
        shown = page_columns(sequence, 1.0, None)
        assert shown["own"] == ["surprise"]
        assert shown["surprise"][shown["prompt"] :] == sequence["surprise"]

    again = replace(config, rollout=RolloutConfig(train_from=str(tmp_path / "run")))
    replayed = open_replay(again, controller.tasks, {"vocab_size": 1000}).records(0)
    for record in replayed:
        assert record.sequences[0].surprise == expected(record.sequences[0].token_ids)

    live, read = make_batch(records).episodes, make_batch(replayed).episodes
    assert repr(live) == repr(read)
    for episode in live:
        assert episode.surprise == expected(episode.token_ids)

    grid = make_grid(live, dp_degree=len(live) + 1, tokens_per_microbatch=1000)
    [cells] = grid.cells
    rows = grid.read_back([[cell.streams["surprise"]] for cell in cells])
    for episode, row in zip(live, rows, strict=True):
        assert row.tolist() == expected(episode.token_ids)
    [padding] = [cell for cell in cells if not cell.real]
    assert math.isnan(padding.streams["surprise"].item())

"""What the trainer computed, token by token: a record for each sequence, however it was packed."""

import json
import math
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import episode
from torchtitan_rl.algorithms.policy_loss import LossOutput
from torchtitan_rl.batching.grid import make_grid
from torchtitan_rl.batching.schema import loss_mask
from torchtitan_rl.observability import token_export
from torchtitan_rl.observability.token_export import TokenExport, cell_columns, token_records

LISTS = (
    *("tokens", "positions", "rl", "echo", "advantage", "token_logprobs", "trainer_logprobs"),
    *("entropies", "ratios", "mismatches", "masked"),
)


def columns(cell, old=None):
    """Columns of made-up values: logprobs by token id, entropy 0.5, every third token clipped."""
    trained = cell.streams["loss_mask"] | cell.echoes
    logprobs = -cell.streams["tokens"][trained].float()
    if old is not None:
        cell.streams["old_logprobs"] = -cell.streams["tokens"].float() + old
    third = torch.arange(int(cell.streams["loss_mask"].sum())) % 3
    entropies = torch.full_like(logprobs, 0.5)
    output = LossOutput(logprobs.sum(), high=third == 1, low=third == 2)
    return cell_columns(cell, logprobs, entropies, output)


def records_of(episodes, **options):
    grid = make_grid(episodes, **{"dp_degree": 1, "tokens_per_microbatch": 60, **options})
    cells = [cell for row in grid.cells for cell in row if cell.real]
    return {r["name"]: r for cell in cells for r in token_records(cell, columns(cell))}


samples = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 8), st.booleans()), min_size=1, max_size=12
)


@settings(deadline=None)
@given(samples=samples, share=st.booleans(), ranks=st.integers(1, 2))
def test_every_sequence_is_there_once_and_whole(samples, share, ranks):
    """Some sequences echo: these do not share their prompt."""
    episodes = []
    for number, (group, length, echoes) in enumerate(samples):
        prompt = list(range(1, group + 3))
        gaps = [math.nan] * (len(prompt) + length)
        episodes.append(
            episode(
                prompt_token_ids=prompt,
                token_ids=[100 + number] * length,
                token_logprobs=[-0.5] * length,
                advantage=float(number),
                group_id=str(group),
                name=f"{group}/{number}/0",
                echo_alpha=[math.nan, 0.5, *gaps[2:]] if echoes else gaps,
            )
        )
    records = records_of(episodes, share_prompts=share, dp_degree=ranks)
    assert records.keys() == {e.name for e in episodes}
    for e in episodes:
        record = records[e.name]
        assert all(len(record[name]) == e.length for name in LISTS)
        assert record["tokens"] == e.prompt_token_ids + e.token_ids
        assert record["positions"] == list(range(e.length))
        assert record["rl"] == list(map(int, loss_mask(e)))
        assert record["echo"] == [int(not math.isnan(a)) for a in e.echo_alpha]
        for rl, echo, advantage, logprob, token in zip(
            *(record[n] for n in ("rl", "echo", "advantage", "trainer_logprobs", "tokens")),
            strict=True,
        ):
            assert advantage == e.advantage if rl else math.isnan(advantage)
            assert logprob == -token if rl or echo else math.isnan(logprob)


def test_ratios_mismatches_and_masks_are_those_of_the_formulas():
    e = episode(name="sums/train/7/0/0", token_ids=[4, 5, 6], token_logprobs=[-4.0, -5.5, -6.0])
    ((cell,),) = make_grid([e], dp_degree=1, tokens_per_microbatch=60).cells
    [record] = token_records(cell, columns(cell, old=0.25))
    assert record["ratios"][3:] == pytest.approx([math.exp(-0.25)] * 3)
    assert record["mismatches"][3:] == pytest.approx([0.25, 0.75, 0.25])
    assert record["masked"] == [0, 0, 0, 0, 1, -1]
    assert all(map(math.isnan, record["ratios"][:3] + record["mismatches"][:3]))


def test_a_file_is_written_whole_replaced_and_without_numbers_that_json_cannot_say(tmp_path):
    export = TokenExport(tmp_path / "tokens", rank=1)
    grid = make_grid([episode(name="a/0/0")], dp_degree=2, tokens_per_microbatch=60)
    one = torch.tensor([-0.5, -math.inf])
    for advantage in (0.25, 0.5):
        for row in grid.cells:
            for cell in row:  # of the second rank, which has only padding, nothing is written
                cell.streams["advantage"][:] = advantage
                export.add(cell, one, one, LossOutput(one.sum()))
        export.write(step=3)
    export.flush()
    [file] = (tmp_path / "tokens").iterdir()
    assert file.name == "step-000003-rank-1.jsonl"
    [line] = file.read_text().splitlines()
    record = json.loads(line, parse_constant=pytest.fail)
    assert {k: record.pop(k) for k in ("schema", "step", "rank", "name")} == {
        "schema": 2,
        "step": 3,
        "rank": 1,
        "name": "a/0/0",
    }
    assert record.keys() == set(LISTS)
    assert record["advantage"] == [None, None, None, 0.5, 0.5]
    assert record["trainer_logprobs"] == [None, None, None, -0.5, None]
    assert record["masked"] == [0] * 5


def test_what_failed_is_forgotten_and_an_error_is_told(tmp_path, monkeypatch):
    export = TokenExport(tmp_path / "tokens", rank=0)
    ((cell,),) = make_grid([episode()], dp_degree=1, tokens_per_microbatch=60).cells
    export.add(cell, torch.zeros(2), torch.zeros(2), LossOutput(torch.zeros(())))
    export.clear()
    export.write(step=0)
    export.flush()
    assert (tmp_path / "tokens" / "step-000000-rank-0.jsonl").read_text() == ""
    gate = threading.Event()

    def fail(*_):
        gate.wait(60)
        raise OSError("disk full")

    monkeypatch.setattr(token_export, "write_lines", fail)
    export.write(step=1)
    gate.set()
    with pytest.raises(OSError, match="disk full"):
        export.write(step=2)


def test_nothing_is_computed_on_the_thread_that_writes(tmp_path):
    """Operations on that thread would start OpenMP threads of their own, which would take cores
    from the trainer: see `TokenExport`."""
    code = """
import os, torch
from pathlib import Path
from tests.observability.test_token_export import export_one
torch.set_num_threads(2)
export = export_one(Path("."))
before = len(os.listdir("/proc/self/task"))
export.write(step=0)
export.flush()
print(len(os.listdir("/proc/self/task")) - before)
"""
    root = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": str(root)}
    made = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, stdout=subprocess.PIPE, check=True
    )
    assert int(made.stdout) == 1  # that thread


def export_one(folder):
    """Tokens of a long microbatch, not yet written."""
    export = TokenExport(folder, rank=0)
    long = episode(token_ids=[4] * 50_000, token_logprobs=[-1.0] * 50_000)
    ((cell,),) = make_grid([long], dp_degree=1, tokens_per_microbatch=60_000).cells
    each = torch.full([50_000], -0.5)
    export.add(cell, each, each, LossOutput(each.sum(), high=each > 0, low=each < 0))
    return export


def test_a_file_is_held_back_until_somebody_waits_for_it(tmp_path, monkeypatch):
    monkeypatch.setattr(token_export, "HOLD_SECONDS", 3600)
    export = TokenExport(tmp_path, rank=0)
    for step in range(2):
        export.write(step)
        assert not (tmp_path / f"step-{step:06d}-rank-0.jsonl").exists()
    assert (tmp_path / "step-000000-rank-0.jsonl").exists()  # the next step waited for it
    export.flush()
    assert (tmp_path / "step-000001-rank-0.jsonl").exists()


def test_a_file_is_written_if_nobody_waits_for_it(tmp_path, monkeypatch):
    monkeypatch.setattr(token_export, "HOLD_SECONDS", 0.01)
    TokenExport(tmp_path, rank=0).write(step=0)
    while not (tmp_path / "step-000000-rank-0.jsonl").exists():
        threading.Event().wait(0.01)

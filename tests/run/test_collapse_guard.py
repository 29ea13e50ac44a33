"""When a run collapses, and when it only looks like it: on made-up steps, and on recorded runs."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support import low_tokens
from torchtitan_rl.config import (
    KLConfig,
    LossConfig,
    SamplingConfig,
    SupervisionConfig,
    WarmStartConfig,
)
from torchtitan_rl.observability.run_folder import RunFolder
from torchtitan_rl.run.collapse_guard import CollapseError, CollapseGuard

RECORDED = json.loads((Path(__file__).parent / "recorded_runs.json").read_text())
"""Metrics that the guard looks at, of real runs: how each was made is in its `command`."""


def config_for(*, prompts=32, stop=False, **changes):
    config = low_tokens()
    return replace(
        config,
        prompts_per_step=prompts,
        generator=replace(config.generator, sampling=SamplingConfig(n=8, max_tokens=12)),
        supervision=SupervisionConfig(stop_on_collapse=stop),
        **changes,
    )


@pytest.fixture
def guard_of(tmp_path):
    def make(config=None):
        return CollapseGuard(config or config_for(), RunFolder(tmp_path / "run", resume=False))

    return make


def row(accuracy=0.5, *, reward=None, tools=1.0, entropy=0.3, **others):
    """The metrics of a healthy step, with what a test cares about changed."""
    means = {
        "accuracy": (accuracy, math.sqrt(accuracy * (1 - accuracy))),
        "reward": (accuracy if reward is None else reward, 0.5),
        "tool_calls/ok": (tools, 0.5),
        "entropy": (entropy, 0.6),
    }
    made = {f"{name}/all/mean": mean for name, (mean, _) in means.items()}
    made |= {f"{name}/all/std": std for name, (_, std) in means.items()}
    return {**made, "mismatch_kl/all/mean": 1e-9, "train/grad_norm": 0.3, **others}


def said(guard, rows, capsys):
    """What the guard says of these steps: step and text of each warning."""
    found = []
    for step, values in enumerate(rows):
        guard.check(step, values)
        if text := " ".join(capsys.readouterr().out.split()):
            found.append((step, text))
    return found


GONE = {
    "accuracy": ([row(a) for a in (0.5, 0.4, 0.1, 0.01, 0.0)], "accuracy of samples fell from 0.5"),
    "low accuracy": ([row(a) for a in (0.08, 0.03, 0, 0)], "accuracy of samples fell from 0.08"),
    "reward": ([row(0.0, reward=r) for r in (0.6, 0.7, 0.1, 0.1, -0.5)], "the reward fell from"),
    "held out": (
        [row(**({"eval/accuracy": a, "eval/prompts": 150})) for a in (0.53, 0.02)],
        "held-out accuracy fell from 53% to 2%",
    ),
    "tools": (
        [row(0.5 - 0.05 * i, tools=t) for i, t in enumerate((2, 2, 0.4, 0.1, 0.1, 0.1))],
        "tool calls per rollout that succeed fell from 2 to 0.2",
    ),
    "entropy": (
        [row(0.3, entropy=0.4 * 0.3**i) for i in range(8)],
        "entropy of the policy fell from",
    ),
    "mismatch": ([row(**{"mismatch_kl/all/mean": 0.01 * 4**i}) for i in range(6)], "mismatch_kl"),
    "ref_kl": ([row(ref_kl=0.1 * 2**i) for i in range(9)], "ref_kl rose to 3"),
    "gradient": (
        [row(**{"train/grad_norm": 0.3 if i < 5 else 60.0}) for i in range(10)],
        "norm of the gradient rose from 0.3 to",
    ),
}


@pytest.mark.parametrize("kind", GONE)
def test_each_kind_of_collapse_is_said_while_it_happens(kind, guard_of, capsys):
    rows, text = GONE[kind]
    found = said(guard_of(), rows, capsys)
    assert found
    assert text in found[0][1]
    assert found[0][1].startswith("warning: the run is collapsing:")
    assert "lower trainer.optimizer.lr, which is 0.001" in found[0][1]


HEALTHY = {
    "solved": [row(min(0.4 + 0.1 * i, 1.0), entropy=0.3 * 0.4**i) for i in range(12)],
    "better without tools": [row(0.3 + 0.05 * i, tools=2 * 0.4**i) for i in range(10)],
    "negative rewards": [row(0.0, reward=r) for r in (-1, -2, -1.5, -3, -2, -2)],
    "never right": [row(0.0)] * 10,
    "one bad step": [row(0.0 if i == 5 else 0.5) for i in range(10)],
    "one large gradient": [row(**{"train/grad_norm": 30.0 if i == 5 else 0.3}) for i in range(10)],
    "large gradients from the start": [row(**{"train/grad_norm": 50.0})] * 8,
    "off-policy": [row(**{"mismatch_kl/all/mean": 0.02})] * 8,
    "no sample graded": [{"time/step": 1.0}] * 8,
}


@pytest.mark.parametrize("kind", HEALTHY)
def test_nothing_is_said_of_a_run_that_is_well(kind, guard_of, capsys):
    assert said(guard_of(), HEALTHY[kind], capsys) == []


def test_with_few_samples_a_fall_may_be_chance(guard_of, capsys):
    rows = [row(a) for a in (0.15, 0.2, 0.1, 0.0, 0.05, 0.0)]
    assert said(guard_of(config_for(prompts=1)), rows, capsys) == []
    assert said(guard_of(config_for(prompts=64)), rows, capsys)


def test_it_is_said_again_when_it_is_worse_or_has_been_better_meanwhile(guard_of, capsys):
    bad, worse = [row(0.5)] * 3 + [row(0.1)] * 4, [row(0.02)] * 4 + [row(0.0)] * 9
    assert [step for step, _ in said(guard_of(), bad + worse, capsys)] == [5, 9]
    again = bad + [row(0.5)] * 4 + [row(0.1)] * 4
    assert [step for step, _ in said(guard_of(), again, capsys)] == [5, 13]


def test_likely_causes_are_those_that_the_run_shows(guard_of, capsys):
    collapse = [row(a) for a in (0.08, 0.02, 0.0, 0.0)]
    [(_, plain)] = said(guard_of(), collapse, capsys)
    assert "Echo" not in plain
    assert "only 8.0% of samples were right (teach it the form first)" in plain
    config = config_for(
        warm_start=WarmStartConfig(), max_offpolicy_steps=2, trainer=low_tokens().trainer
    )
    loss = LossConfig(echo_share=1.0, ref_kl=KLConfig(coef=0.1))
    config = replace(config, trainer=replace(config.trainer, loss=loss))
    # Where no sample is right any more, RL has no gradient to have a share.
    shown = [{**collapse[0], "grad_share/echo": 0.96}, *collapse[1:]]
    [(_, text)] = said(guard_of(config), shown, capsys)
    assert "Echo has 96% of the gradient (lower trainer.loss.echo_share, which is 1)" in text
    assert "(raise warm_start.steps)" in text
    assert "samples are up to 2 steps old" in text
    assert "ref_kl" not in text


def test_a_setting_stops_the_run_and_the_message_says_how_to_go_on(tmp_path):
    folder = RunFolder(tmp_path / "mine", resume=False)
    for step in (2, 4, 6):
        (folder.checkpoints / f"step-{step}").mkdir(parents=True)
        (folder.checkpoints / f"step-{step}" / ".metadata").touch()
    guard = CollapseGuard(config_for(stop=True), folder)
    for step in range(7):
        guard.check(step, row(0.5 if step < 5 else 0.0))
    with pytest.raises(CollapseError, match=r"stop_on_collapse is set.*--fork_from mine@4"):
        guard.check(7, row(0.0))


def test_without_a_checkpoint_from_before_it_one_starts_again(guard_of, capsys):
    [(_, text)] = said(guard_of(), [row(0.5)] + [row(0.0)] * 3, capsys)
    assert "No checkpoint from before the collapse is kept" in text


def test_a_resumed_run_goes_on_where_it_was(guard_of, capsys):
    rows = [{"step": step, **values} for step, values in enumerate(GONE["accuracy"][0])]
    whole = said(guard_of(), rows, capsys)
    resumed = guard_of()
    resumed.recall(json.loads(json.dumps(rows[:3])))
    assert not capsys.readouterr().out
    found = []
    for each in rows[3:]:
        resumed.check(each["step"], each)
        if text := " ".join(capsys.readouterr().out.split()):
            found.append((each["step"], text))
    assert found == whole


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_runs_are_judged_as_a_person_would(name, guard_of, capsys):
    recorded = RECORDED[name]
    config = config_for(prompts=recorded["samples"] // 8)
    found = said(guard_of(config), recorded["steps"], capsys)
    if recorded["collapses_by"] is None:
        assert found == []
    else:
        assert found
        assert found[0][0] <= recorded["collapses_by"]

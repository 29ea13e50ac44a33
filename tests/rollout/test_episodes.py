"""From scored groups to episodes: what trains by RL, what echoes, and what is not trained."""

import math
from dataclasses import replace

import pytest

from tests.support import ONE_TURN, PROMPT, TWO_TURNS, USER, a_rollout, low_tokens
from tests.support import scored_group as group
from torchtitan_rl.batching.grid import make_grid
from torchtitan_rl.batching.reduction import weigh
from torchtitan_rl.batching.schema import loss_mask
from torchtitan_rl.batching.validation import validate
from torchtitan_rl.config import (
    AdvantageConfig,
    BatchFilterConfig,
    EchoConfig,
    KLConfig,
    LossConfig,
    RoleEcho,
    ToolEcho,
    TrainerConfig,
)
from torchtitan_rl.core.types import Completion, Rollout, ScoredCompletion
from torchtitan_rl.rollout.batch_filter import BatchFilter, trial_episodes
from torchtitan_rl.rollout.episodes import annotate, has_signal, make_batch, make_episodes
from torchtitan_rl.run.controller import Controller

ECHO_TOOLS = EchoConfig(tool=ToolEcho(alpha=0.5))


def annotated(*groups, **changes):
    advantage = AdvantageConfig(name="mean_baseline")
    return [record for group in groups for record in annotate(group, advantage, **changes)]


def batch(*groups, **changes):
    made = make_batch(annotated(*groups, **changes))
    validate(made.episodes + made.untrained, vocab_size=100, version=3)
    return made


def test_turns_become_one_episode_that_trains_what_was_sampled():
    made = batch(group(TWO_TURNS, ONE_TURN, rewards=[1.0, 0.0]))
    first, second = made.episodes
    assert first.prompt_token_ids == [1, 2]
    assert first.token_ids == [3, 4, 8, 9, 5]
    assert list(loss_mask(first)) == [False, False, True, True, False, False, True]
    assert first.token_logprobs[:2] == pytest.approx([-0.3, -0.4])
    assert all(map(math.isnan, first.token_logprobs[2:4]))
    assert first.token_logprobs[4] == pytest.approx(-0.5)
    assert (first.advantage, second.advantage) == (0.5, -0.5)
    assert (first.task, first.group_id) == ("low_tokens", "low_tokens/train/0")
    assert (first.temperature, first.policy_version, first.reward) == (0.7, 3, 1.0)
    assert list(loss_mask(second)) == [False, False, True, True]
    assert first.echo_alpha is second.echo_alpha is None


def test_a_turn_that_was_rendered_anew_is_an_episode_of_its_own():
    anew = [(PROMPT, [3, 4]), ([(1, None), (7, USER)], [5])]
    made = batch(group(anew, ONE_TURN, rewards=[1.0, 0.0]))
    assert [e.prompt_token_ids + e.token_ids for e in made.episodes] == [
        [1, 2, 3, 4],
        [1, 7, 5],
        [1, 2, 3, 4],
    ]
    assert [e.advantage for e in made.episodes] == [0.5, 0.5, -0.5]


def test_a_tools_words_echo_and_are_out_of_rl():
    made = batch(group(TWO_TURNS, ONE_TURN, rewards=[1.0, 0.0], echo=ECHO_TOOLS))
    first, second = made.episodes
    assert [i for i, a in enumerate(first.echo_alpha) if not math.isnan(a)] == [4]
    assert first.echo_alpha[4] == 0.5
    # A rollout that called no tool has nothing to echo, and says so for the batch's sake.
    assert all(map(math.isnan, second.echo_alpha))
    assert len(second.echo_alpha) == second.length


def test_equal_rewards_have_no_signal_for_rl_but_still_echo():
    assert batch(group(TWO_TURNS, ONE_TURN, rewards=[1.0, 1.0])).episodes == []
    equal = group(TWO_TURNS, ONE_TURN, rewards=[1.0, 1.0], echo=ECHO_TOOLS)
    assert not has_signal(annotated(equal))
    made = batch(equal)
    [episode] = made.episodes  # the other has nothing to echo either
    assert not any(loss_mask(episode))
    assert [a for a in episode.echo_alpha if not math.isnan(a)] == [0.5]


def test_for_a_kl_term_every_token_that_was_sampled_is_kept_and_counted():
    """Against a plain count: 2 + 2 and 3 + 2 samples; those of equal rewards have advantage 0, a
    tool's word still echoes."""
    differ = group(ONE_TURN, ONE_TURN, rewards=[1.0, 0.0], echo=ECHO_TOOLS, number=0)
    equal = group(TWO_TURNS, ONE_TURN, rewards=[1.0, 1.0], echo=ECHO_TOOLS, number=1)
    records = annotated(differ, equal)
    kept = make_batch(records, keep_zero_advantages=True)
    assert [e.advantage for e in kept.episodes] == [0.5, -0.5, 0.0, 0.0]
    grid = make_grid(kept.episodes, dp_degree=1, tokens_per_microbatch=64)
    assert grid.loss_tokens == sum(record.tokens for record in records) == 9
    assert grid.echo_tokens == 1
    # Every reduction counts the new ones too: v·N is 9/4 of a sequence's mean.
    by_length = [e.weight for e in weigh(kept.episodes, "sequence_mean", fixed_length=9)]
    assert by_length == [9 / (4 * 2), 9 / (4 * 2), 9 / (4 * 3), 9 / (4 * 2)]
    left = make_grid(make_batch(records).episodes, dp_degree=1, tokens_per_microbatch=64)
    assert (left.loss_tokens, left.echo_tokens) == (4, 1)


@pytest.mark.parametrize("term", ["ref_kl", "rollout_kl"])
def test_either_kl_term_keeps_them(term):
    assert LossConfig(**{term: KLConfig(coef=0.1)}).has_kl
    assert not LossConfig(**{term: KLConfig(coef=0.0)}).has_kl


def test_tasks_with_and_without_echo_share_a_batch():
    quiet = group(ONE_TURN, ONE_TURN, rewards=[1.0, 0.0], name="quiet")
    loud = group(TWO_TURNS, ONE_TURN, rewards=[1.0, 0.0], echo=ECHO_TOOLS, name="loud")
    made = batch(quiet, loud)
    assert [e.task for e in made.episodes] == ["quiet", "quiet", "loud", "loud"]
    assert all(len(e.echo_alpha) == e.length for e in made.episodes)
    assert sum(not math.isnan(a) for e in made.episodes for a in e.echo_alpha) == 1


def test_assistant_echo_replaces_rl():
    echo = EchoConfig(assistant=RoleEcho(alpha=2.0))
    made = batch(group(ONE_TURN, ONE_TURN, rewards=[1.0, 0.0], echo=echo))
    assert all(e.echo_alpha[2:] == [2.0, 2.0] for e in made.episodes)
    assert not any(any(loss_mask(e)) for e in made.episodes)


def no_echo_in_the_first_turn(rollout: Rollout, *, turns: float = 1) -> list[list[bool]]:
    return [
        [number >= turns] * (len(c.prompt_token_ids) + len(c.token_ids))
        for number, c in enumerate(rollout.completions)
    ]


def broken_filter(rollout: Rollout) -> list[list[bool]]:
    raise KeyError("turns")


def test_a_filter_sees_the_rollout():
    here = f"{__name__}:no_echo_in_the_first_turn"
    user = EchoConfig(user=RoleEcho(), filter=here)
    # The user's words are of the first turn: it says no, and they are never looked at again.
    made = batch(group(TWO_TURNS, ONE_TURN, rewards=[1.0, 0.0], echo=user))
    assert [a for a in made.episodes[0].echo_alpha or [] if not math.isnan(a)] == []
    tool = EchoConfig(tool=ToolEcho(), filter=here)
    made = batch(group(TWO_TURNS, ONE_TURN, rewards=[1.0, 0.0], echo=tool))
    assert [a for a in made.episodes[0].echo_alpha if not math.isnan(a)] == [1.0]
    tool = EchoConfig(tool=ToolEcho(), filter=here, filter_kwargs={"turns": 2.0})
    made = batch(group(TWO_TURNS, ONE_TURN, rewards=[1.0, 0.0], echo=tool))
    assert [a for a in made.episodes[0].echo_alpha or [] if not math.isnan(a)] == []


def test_a_broken_filter_is_named():
    echo = EchoConfig(tool=ToolEcho(), filter=f"{__name__}:broken_filter")
    with pytest.raises(ValueError, match="broken_filter' raised KeyError"):
        batch(group(TWO_TURNS, ONE_TURN, rewards=[1.0, 0.0], echo=echo))


def test_turns_of_unknown_origin_are_counted_and_do_not_echo():
    known = a_rollout(TWO_TURNS)
    first, second = known.turns
    unknown = replace(known, turns=[first, replace(second, attributions=None)])
    result = batch(group(unknown, TWO_TURNS, rewards=[1.0, 0.0], echo=ECHO_TOOLS))
    assert result.unattributed == 1
    echoing = [sum(not math.isnan(a) for a in e.echo_alpha) for e in result.episodes]
    assert echoing == [0, 1]  # of the turn without attribution nothing but samples could echo
    user = EchoConfig(user=RoleEcho())
    result = batch(group(unknown, TWO_TURNS, rewards=[1.0, 0.0], echo=user))
    assert [sum(not math.isnan(a) for a in e.echo_alpha) for e in result.episodes] == [1, 1]


def test_the_untrained_share_is_chosen_by_hash_and_counts_in_its_group():
    def made(share):
        groups = [group(*[ONE_TURN] * 8, rewards=[1.0] + [0.0] * 7, number=i) for i in range(40)]
        records = annotated(*groups, untrained_share=share)
        untrained = [r for r in records if r.split == "untrained"]
        return [f"{r.group}/{r.sample}" for r in untrained], make_batch(records)

    names, kept = made(0.25)
    assert len(kept.untrained) == len(names)
    assert len(kept.untrained) / 320 == pytest.approx(0.25, abs=0.08)
    assert len(kept.episodes) + len(kept.untrained) == 320
    # Always the same ones, also of more.
    assert names == made(0.25)[0]
    assert set(names) < set(made(0.5)[0])
    # The advantages are those of the whole group.
    assert {e.advantage for e in kept.episodes} == {0.875, -0.125}
    assert made(0.0)[1].untrained == []


def only_good(episodes, *, least: float = 1.0):
    return [episode for episode in episodes if episode.reward >= least]


def inventive(episodes):
    return [*episodes, None]


def clumsy(episodes):
    raise KeyError("reward")


def test_a_batch_filter_chooses_what_trains():
    episodes = batch(group(ONE_TURN, TWO_TURNS, rewards=[1.0, 0.5])).episodes
    assert BatchFilter(BatchFilterConfig())(episodes) == episodes
    assert BatchFilter(BatchFilterConfig(name=f"{__name__}:only_good"))(episodes) == episodes[:1]
    lenient = BatchFilter(BatchFilterConfig(name=f"{__name__}:only_good", kwargs={"least": 0.5}))
    assert lenient(episodes) == episodes


def forgetful(episodes):
    episodes.sort(key=lambda episode: episode.reward)


def generous(episodes):
    return [*episodes, episodes[0]]


def copying(episodes):
    return [replace(episode, advantage=1.0) for episode in episodes]


def aimless():
    return []


def keyed(episodes):
    return [episode for episode in episodes if episode.reward > {"sums": 0.5}[episode.task]]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("inventive", "must return a list of episodes that it was given; got one with NoneType in"),
        ("clumsy", "clumsy' raised KeyError"),
        ("forgetful", "must return a list of episodes that it was given; got NoneType"),
        ("generous", "each once; got sums/train/0/0/0 twice"),
        ("copying", "got one with Episode, a copy or one of its own in it"),
    ],
)
def test_a_bad_batch_filter_is_named_before_anything_starts(name, message):
    bad = BatchFilter(BatchFilterConfig(name=f"{__name__}:{name}"))
    with pytest.raises((TypeError, ValueError), match=message):
        bad(trial_episodes(["sums"]))
    with pytest.raises(ValueError, match=rf"{message}.* \(on trial"):
        bad.try_out(["sums"])


def test_a_batch_filter_is_tried_with_the_tasks_of_the_run():
    BatchFilter(BatchFilterConfig()).try_out(["sums"])
    for name in ("only_good", "keyed"):
        BatchFilter(BatchFilterConfig(name=f"{__name__}:{name}")).try_out(["sums"])
    with pytest.raises(ValueError, match="keyed' raised KeyError: 'words'"):
        BatchFilter(BatchFilterConfig(name=f"{__name__}:keyed")).try_out(["words"])


def test_a_step_without_episodes_asks_no_filter():
    assert BatchFilter(BatchFilterConfig(name=f"{__name__}:clumsy"))([]) == []


def test_a_controller_refuses_a_filter_that_returns_nothing(tmp_path, tiny_model):
    config = replace(
        low_tokens(),
        model=str(tiny_model),
        trainer=TrainerConfig(batch_filter=BatchFilterConfig(name=f"{__name__}:forgetful")),
        output_dir=str(tmp_path),
        run_name="run",
    )
    with pytest.raises(ValueError, match=r"forgetful' must return a list.*got NoneType"):
        Controller(config)


def test_a_batch_filter_is_checked_before_anything_starts():
    with pytest.raises(ValueError, match="has no function 'onlygood'; did you mean 'only_good'"):
        BatchFilter(BatchFilterConfig(name=f"{__name__}:onlygood"))
    with pytest.raises(ValueError, match="aimless' must take a list of episodes"):
        BatchFilter(BatchFilterConfig(name=f"{__name__}:aimless"))
    with pytest.raises(ValueError, match=r"cannot take kwargs.*it takes least"):
        BatchFilter(BatchFilterConfig(name=f"{__name__}:only_good", kwargs={"most": 1.0}))


@pytest.mark.parametrize("rewards", [[1.0, 0.0], [0.0, 0.0]])
def test_scored_groups_make_the_episodes_that_a_run_makes_of_them(rewards):
    made = group(TWO_TURNS, ONE_TURN, rewards=rewards)
    [*theirs] = batch(made).episodes
    [*ours] = make_episodes([made.scored], task="low_tokens", temperature=0.7)
    assert len(ours) == (2 if any(rewards) else 0)
    for e, other in zip(ours, theirs, strict=True):
        assert e.group_id == "group 0"
        same = replace(e, group_id=other.group_id, name=other.name)
        assert repr(same) == repr(other)  # which shows every column; NaN equals nothing


def test_completions_of_a_notebook_make_episodes_too():
    said = [Completion(3, 0, [1, 2], "a", [3], token_logprobs=[-0.5]) for _ in range(2)]
    scored = [ScoredCompletion(c, r, correct=False) for c, r in zip(said, (2.0, 1.0), strict=True)]
    none = [ScoredCompletion(said[0], 1.0, correct=False)]
    episodes = make_episodes([none, scored], AdvantageConfig(name="rloo"), name="step 3")
    assert [(e.group_id, e.advantage, e.reward) for e in episodes] == [
        ("step 3 1", 1.0, 2.0),
        ("step 3 1", -1.0, 1.0),
    ]
    assert episodes[0].token_logprobs == [-0.5]
    validate(episodes, vocab_size=100, version=3)

"""What weighs the same in a batch: each reduction against its formula, however it is split."""

from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import episode
from torchtitan_rl.batching.grid import make_grid
from torchtitan_rl.batching.reduction import weigh
from torchtitan_rl.batching.schema import loss_mask
from torchtitan_rl.config.loss import REDUCTIONS

LONGEST = 8


def completion(length, group="g", loss_mask=None):
    """An episode with one prompt token and a completion of this length."""
    return episode(
        prompt_token_ids=[1],
        token_ids=list(range(2, 2 + length)),
        token_logprobs=[-1.0] * length,
        group_id=group,
        loss_mask=loss_mask,
    )


def weights(episodes, reduction):
    return [e.weight for e in weigh(episodes, reduction, fixed_length=LONGEST)]


@pytest.mark.parametrize(
    ("reduction", "lengths", "groups", "shares"),
    [
        # The share of the loss that each token of an episode has, i.e. weight / N.
        ("token_mean", [1, 3], "ab", [1 / 4, 1 / 4]),
        ("token_mean", [1, 3, 0], "abb", [1 / 4, 1 / 4, None]),
        ("sequence_mean", [1, 3], "ab", [1 / 2, 1 / 6]),
        ("sequence_mean", [1, 3], "aa", [1 / 2, 1 / 6]),
        ("sequence_mean", [1, 3, 0], "abb", [1 / 2, 1 / 6, None]),
        ("prompt_mean", [1, 3], "ab", [1 / 2, 1 / 6]),
        ("prompt_mean", [1, 3, 4], "aab", [1 / 8, 1 / 8, 1 / 8]),
        ("prompt_mean", [1, 2, 6], "aba", [1 / 14, 1 / 4, 1 / 14]),
        ("prompt_mean", [2, 0, 0], "aab", [1 / 2, None, None]),
        ("fixed_length", [1, 3], "ab", [1 / 16, 1 / 16]),
        ("fixed_length", [8], "a", [1 / 8]),
        ("fixed_length", [1, 3, 0], "abb", [1 / 16, 1 / 16, None]),
    ],
)
def test_the_share_of_each_token_by_table(reduction, lengths, groups, shares):
    episodes = [completion(n, group) for n, group in zip(lengths, groups, strict=True)]
    for weight, share in zip(weights(episodes, reduction), shares, strict=True):
        assert share is None or weight / sum(lengths) == pytest.approx(share)


def test_only_tokens_that_train_count():
    masked = completion(4, loss_mask=[False, True, False, False, False])
    assert weights([masked, completion(3)], "sequence_mean") == pytest.approx([4 / 2, 4 / 6])
    assert weights([masked, completion(3)], "token_mean") == [1, 1]


def test_a_batch_without_a_token_that_trains_has_finite_weights():
    for reduction in REDUCTIONS:
        assert weights([completion(0), completion(0, "h")], reduction) == [1, 1]


def test_nothing_but_the_weight_changes():
    before = [completion(1), completion(3, "h")]
    after = weigh(before, "sequence_mean", fixed_length=LONGEST)
    assert [e.weight for e in before] == [1, 1]
    for one, other in zip(before, after, strict=True):
        assert one == other.with_columns(weight=one.weight)


def test_weights_do_not_pile_up_when_episodes_are_weighed_again():
    episodes = [completion(1), completion(3)]
    once = weigh(episodes, "sequence_mean", fixed_length=LONGEST)
    assert weigh(once, "sequence_mean", fixed_length=LONGEST) == once


@st.composite
def batches(draw):
    """Episodes of a few groups, some with a mask of their own; at least one token trains."""
    episodes = [completion(draw(st.integers(1, LONGEST)), "a")]
    for _ in range(draw(st.integers(0, 8))):
        length = draw(st.integers(0, LONGEST))
        mask = [False, *draw(st.lists(st.booleans(), min_size=length, max_size=length))]
        episodes.append(
            completion(length, draw(st.sampled_from("abc")), draw(st.sampled_from([None, mask])))
        )
    return draw(st.permutations(episodes))


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "prompt_mean"])
@settings(deadline=None)
@given(episodes=batches())
def test_the_shares_of_all_tokens_sum_to_one(reduction, episodes):
    lengths = [sum(loss_mask(e)) for e in episodes]
    total = sum(w * n for w, n in zip(weights(episodes, reduction), lengths, strict=True))
    assert total / sum(lengths) == pytest.approx(1)


def losses_of(one):
    """A made-up loss of each token that trains."""
    tokens = one.prompt_token_ids + one.token_ids
    return [token**1.5 for token, trains in zip(tokens, loss_mask(one), strict=True) if trains]


def mean(values):
    return sum(values) / len(values)


def plain(episodes, reduction):
    """The reduction as its name says it."""
    completions = [losses_of(e) for e in episodes if losses_of(e)]
    prompts = {e.group_id: [] for e in episodes if losses_of(e)}
    for e in episodes:
        if losses_of(e):
            prompts[e.group_id] += losses_of(e)
    return {
        "token_mean": mean(list(chain(*completions))),
        "sequence_mean": mean([mean(losses) for losses in completions]),
        "prompt_mean": mean([mean(losses) for losses in prompts.values()]),
        "fixed_length": sum(map(sum, completions)) / (len(completions) * LONGEST),
    }[reduction]


@pytest.mark.parametrize("reduction", REDUCTIONS)
@settings(deadline=None)
@given(
    episodes=batches(),
    dp_degree=st.integers(1, 4),
    rows=st.integers(1, 10),
    share_prompts=st.booleans(),
)
def test_no_split_into_ranks_and_microbatches_changes_the_reduced_loss(
    reduction, episodes, dp_degree, rows, share_prompts
):
    grid = make_grid(
        weigh(episodes, reduction, fixed_length=LONGEST),
        dp_degree=dp_degree,
        tokens_per_microbatch=rows * (LONGEST + 1),
        share_prompts=share_prompts,
    )
    total = 0.0
    for cell in (cell for row in grid.cells for cell in row):
        loss = cell.streams["tokens"].double() ** 1.5
        total += (loss * cell.streams["weight"] * cell.streams["loss_mask"]).sum().item()
    assert total / grid.loss_tokens == pytest.approx(plain(episodes, reduction), rel=1e-5)

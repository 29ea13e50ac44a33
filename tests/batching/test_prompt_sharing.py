"""Samples of one prompt behind a single copy of it: which are, and which are not."""

import math

import numpy as np
import pytest

from tests.support import episode
from torchtitan_rl.batching.documents import Document
from torchtitan_rl.batching.grid import make_grid

BUDGET = 100


def sample(prompt, completion, **changes):
    """A sample of so many tokens; prompts of one length are the same."""
    return episode(
        **{
            "prompt_token_ids": list(range(1, prompt + 1)),
            "token_ids": [50 + i for i in range(completion)],
            "token_logprobs": [-float(i) for i in range(completion)],
            **changes,
        }
    )


def routing(tokens, expert):
    return np.full((tokens, 1, 1), expert, dtype=np.uint8)


def documents_of(episodes, *, dp_degree=1, budget=BUDGET, share_prompts=True):
    """Documents of all cells, as (trunk, branches), the longest first."""
    grid = make_grid(
        episodes,
        dp_degree=dp_degree,
        tokens_per_microbatch=budget,
        share_prompts=share_prompts,
    )
    documents = [d for row in grid.cells for cell in row if cell.real for d in cell.documents]
    return sorted(documents, key=lambda d: (-d.tokens, d.branches))


def test_samples_of_a_group_lie_behind_one_copy_of_their_prompt():
    first = sample(3, 2, advantage=1.0, weight=0.5, token_ids=[21, 22])
    second = sample(3, 1, advantage=2.0, weight=0.25, token_ids=[31], temperature=0.5)
    third = sample(
        3, 2, token_ids=[41, 42], loss_mask=[False] * 4 + [True], advantage=3.0, weight=2.0
    )
    grid = make_grid(
        [first, second, third], dp_degree=1, tokens_per_microbatch=BUDGET, share_prompts=True
    )
    ((cell,),) = grid.cells
    assert cell.documents == [Document(3, (2, 1, 2))]
    assert cell.streams["tokens"].tolist() == [1, 2, 3, 21, 22, 31, 41, 42]
    assert cell.streams["loss_mask"].tolist() == [False] * 3 + [True] * 3 + [False, True]
    assert cell.streams["advantage"][3:].tolist() == [1, 1, 2, 3, 3]
    assert cell.streams["weight"][3:].tolist() == [0.5, 0.5, 0.25, 2, 2]
    assert cell.streams["temperature"][3:].tolist() == [1, 1, 0.5, 1, 1]
    assert cell.streams["token_logprobs"].isnan().tolist() == [True] * 3 + [False] * 5
    assert cell.streams["token_logprobs"][3:].tolist() == [0, -1, 0, 0, -1]
    assert [(p.start, p.stop) for p in grid.spans] == [(3, 5), (5, 6), (6, 8)]
    assert (grid.tokens, grid.episode_tokens, grid.loss_tokens) == (8, 14, 4)


def test_nothing_is_shared_unless_asked_for():
    assert documents_of([sample(3, 2)] * 3, share_prompts=False) == [Document(5)] * 3


@pytest.mark.parametrize(
    ("episodes", "documents"),
    [
        ([sample(3, 2)], [Document(5)]),
        ([sample(3, 2), sample(3, 4)], [Document(3, (2, 4))]),
        # Samples of a group need not stand together.
        (
            [sample(3, 2), sample(2, 2, group_id="g"), sample(3, 1), sample(2, 3, group_id="g")],
            [Document(2, (2, 3)), Document(3, (2, 1))],
        ),
        # Not one prompt: a group whose prompts differ, in length or in a token.
        ([sample(3, 2), sample(4, 2)], [Document(6), Document(5)]),
        ([sample(3, 2), sample(3, 2, prompt_token_ids=[1, 2, 9])], [Document(5)] * 2),
        # One prompt, but of two groups.
        ([sample(3, 2), sample(3, 2, group_id="g")], [Document(5)] * 2),
        # A prompt token that trains has a loss of its own in every sample.
        (
            [sample(3, 2), sample(3, 3), sample(3, 4, loss_mask=[False, False] + [True] * 5)],
            [Document(3, (2, 3)), Document(7)],
        ),
        (
            [sample(3, 1, loss_mask=[False, True, False, True])] * 2,
            [Document(4)] * 2,
        ),
        # A mask that trains none of the prompt does not matter, nor one that trains nothing.
        ([sample(3, 2), sample(3, 1, loss_mask=[False] * 4)], [Document(3, (2, 1))]),
        # Nor a prompt that echoes, of which every sample has a loss of its own.
        (
            [sample(3, 2, echo_alpha=[math.nan, 1.0, *[math.nan] * 3])] * 2
            + [sample(3, 2, echo_alpha=[math.nan] * 5)] * 2,
            [Document(3, (2, 2)), Document(5), Document(5)],
        ),
        # Nor one whose tokens went to other experts.
        (
            [sample(3, 2, routed_experts=routing(5, e)) for e in (0, 1, 0)],
            [Document(3, (2, 2)), Document(5)],
        ),
        # Without a completion there is nothing to grow from the prompt.
        ([sample(3, 0), sample(3, 2), sample(3, 1)], [Document(3, (2, 1)), Document(3)]),
        ([sample(3, 0), sample(3, 0)], [Document(3)] * 2),
    ],
)
def test_which_prompts_are_shared_by_table(episodes, documents):
    assert documents_of(episodes) == documents


@pytest.mark.parametrize(
    ("completions", "budget", "documents"),
    [
        ([2, 2, 2], 9, [Document(3, (2, 2, 2))]),
        ([2, 2, 2], 8, [Document(3, (2, 2)), Document(5)]),
        ([2, 2, 2, 2], 8, [Document(3, (2, 2))] * 2),
        ([2, 2], 6, [Document(5)] * 2),
        ([5, 1, 1], 8, [Document(8), Document(3, (1, 1))]),
    ],
)
def test_a_group_larger_than_the_budget_is_split(completions, budget, documents):
    assert documents_of([sample(3, n) for n in completions], budget=budget) == documents


def test_a_group_larger_than_a_ranks_share_is_split():
    for dp_degree in (1, 2, 4):
        grid = make_grid(
            [sample(2, 20)] * 8,
            dp_degree=dp_degree,
            tokens_per_microbatch=1000,
            share_prompts=True,
        )
        ((*cells,),) = grid.cells
        assert all(cell.real for cell in cells)
        assert max(cell.tokens for cell in cells) <= 8 * 22 / dp_degree


@pytest.mark.parametrize(
    ("groups", "ranks", "tokens"),
    [(1, 2, [140, 140]), (2, 4, [140] * 4), (4, 2, [360, 360]), (1, 8, [110] * 8)],
)
def test_no_rank_is_idle_because_a_prompt_is_long(groups, ranks, tokens):
    episodes = [
        episode(
            prompt_token_ids=[group + 1] * 100,
            token_ids=[1] * 10,
            token_logprobs=[-1.0] * 10,
            group_id=str(group),
        )
        for group in range(groups)
        for _ in range(8)
    ]
    grid = make_grid(episodes, dp_degree=ranks, tokens_per_microbatch=4096, share_prompts=True)
    assert [[cell.tokens for cell in row] for row in grid.cells] == [tokens]


def test_every_episode_that_shares_is_still_read_back_in_order():
    episodes = [
        sample(3 + i % 2, 1 + i, token_ids=[10 * i + j for j in range(1 + i)]) for i in range(8)
    ]
    grid = make_grid(episodes, dp_degree=2, tokens_per_microbatch=20, share_prompts=True)
    columns = [[row[rank].streams["tokens"] for row in grid.cells] for rank in range(2)]
    assert [values.tolist() for values in grid.read_back(columns)] == [
        e.token_ids for e in episodes
    ]

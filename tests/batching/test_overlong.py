"""Episodes that no microbatch can hold: refused, cut or left out, and counted."""

from dataclasses import fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import episode
from torchtitan_rl.batching.grid import make_grid
from torchtitan_rl.batching.overlong import limit_length
from torchtitan_rl.batching.validation import validate


def sized(prompt, completion, **changes):
    """An episode with every stream, whose values say where they stand."""
    return episode(
        **{
            "prompt_token_ids": list(range(prompt)),
            "token_ids": list(range(prompt, prompt + completion)),
            "token_logprobs": [-float(i) for i in range(completion)],
            "ref_logprobs": [-float(i) - 0.5 for i in range(completion)],
            "loss_mask": [False] + [i % 2 == 0 for i in range(1, prompt + completion)],
            **changes,
        }
    )


def counted(truncated, dropped):
    return {"overlong/truncated": truncated, "overlong/dropped": dropped}


@pytest.mark.parametrize(
    ("policy", "sizes", "kept", "counts"),
    [
        ("error", [(2, 3), (4, 4)], [(2, 3), (4, 4)], counted(0, 0)),
        ("error", [], [], counted(0, 0)),
        ("truncate", [(2, 3), (4, 4)], [(2, 3), (4, 4)], counted(0, 0)),
        ("truncate", [(2, 7), (1, 1), (4, 40)], [(2, 6), (1, 1), (4, 4)], counted(2, 0)),
        # No completion would be left, or not even the prompt would fit.
        ("truncate", [(7, 2), (8, 1), (9, 1), (12, 0)], [(7, 1)], counted(1, 3)),
        ("truncate", [(8, 0)], [(8, 0)], counted(0, 0)),
        ("truncate", [(8, 1), (9, 0)], [], counted(0, 2)),
        ("drop", [(2, 3), (2, 7), (4, 4)], [(2, 3), (4, 4)], counted(0, 1)),
        ("drop", [(9, 1), (8, 0)], [(8, 0)], counted(0, 1)),
        ("drop", [(2, 7), (9, 9)], [], counted(0, 2)),
    ],
)
def test_policies_by_table(policy, sizes, kept, counts):
    episodes, found = limit_length([sized(*size) for size in sizes], 8, policy)
    assert [(len(e.prompt_token_ids), len(e.token_ids)) for e in episodes] == kept
    assert found == counts


def test_the_error_names_the_episode_its_length_and_what_to_change():
    long = sized(4, 5, task="chat", group_id="chat/9")
    with pytest.raises(ValueError, match="task 'chat', group 'chat/9' has 9 tokens") as error:
        limit_length([sized(4, 4), long], 8, "error")
    for hint in ("trainer.tokens_per_microbatch is 8", "trainer.overlong", "truncate", "drop"):
        assert hint in str(error.value)


def test_every_stream_is_cut_at_the_same_token():
    (cut,), _ = limit_length([sized(3, 9)], 5, "truncate")
    assert cut == sized(3, 2)
    validate([cut])


def test_streams_that_are_not_there_stay_away():
    bare = {"token_logprobs": None, "ref_logprobs": None, "loss_mask": None}
    (cut,), _ = limit_length([sized(3, 9, **bare)], 5, "truncate")
    assert cut == sized(3, 2, **bare)


def test_what_is_for_the_whole_episode_is_kept():
    whole = {"advantage": 0.25, "temperature": 0.5, "weight": 3.0, "reward": 7.0, "group_id": "g"}
    (cut,), _ = limit_length([sized(3, 9, **whole)], 5, "truncate")
    assert {name: getattr(cut, name) for name in whole} == whole


def test_the_episode_that_was_given_is_not_changed():
    given_one = sized(3, 9)
    limit_length([given_one], 5, "truncate")
    assert given_one == sized(3, 9)


@settings(deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), max_size=9),
    most=st.integers(1, 12),
    policy=st.sampled_from(["truncate", "drop"]),
)
def test_what_is_kept_fits_is_valid_starts_as_it_did_and_is_counted(sizes, most, policy):
    episodes = [sized(*size, advantage=float(i)) for i, size in enumerate(sizes)]
    kept, counts = limit_length(episodes, most, policy)
    validate(kept)
    assert counts["overlong/dropped"] == len(episodes) - len(kept)
    assert counts["overlong/truncated"] == sum(
        one.length != episodes[int(one.advantage)].length for one in kept
    )
    assert [e.advantage for e in kept] == sorted(e.advantage for e in kept)
    for one in kept:
        before = episodes[int(one.advantage)]
        assert one.length == min(before.length, most)
        names = {*(field.name for field in fields(one)), *one.columns} - {"columns"}
        assert one.columns.keys() == before.columns.keys()
        for name in names:
            now, then = getattr(one, name), getattr(before, name)
            assert now == (then[: len(now)] if isinstance(then, list) else then)
    for one in episodes:
        assert one.length > most or one in kept
    if kept:
        grid = make_grid(kept, dp_degree=2, tokens_per_microbatch=most)
        assert grid.episode_tokens == sum(one.length for one in kept)

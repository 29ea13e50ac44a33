"""Turns merge into sequences: nothing is trained twice, and nothing earlier is overwritten."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_rl.config import EchoConfig, RoleEcho, ToolEcho
from torchtitan_rl.core.columns import COLUMNS, Column, declare
from torchtitan_rl.core.types import Attribution, Completion, Turn
from torchtitan_rl.rollout.sequences import merge_turns, turn_alphas


def turn(prompt, completion, attributions=None, **columns):
    logprobs = [-0.1 * token for token in completion]
    return Turn(
        Completion(0, 0, prompt, "", completion, token_logprobs=logprobs, **columns), attributions
    )


def ids_of(sequence):
    return sequence.prompt_token_ids + sequence.token_ids


@pytest.mark.parametrize(
    ("turns", "ids", "sampled"),
    [
        ([], [], []),
        ([turn([1, 2], [3])], [[1, 2, 3]], ["..s"]),
        ([turn([1], [2]), turn([1, 2, 3], [4, 5])], [[1, 2, 3, 4, 5]], [".s.ss"]),
        # A prompt that repeats what was sampled and nothing more.
        ([turn([1], [2]), turn([1, 2], [3])], [[1, 2, 3]], [".ss"]),
        # One that was rendered anew, with another token, or shortened.
        ([turn([1], [2]), turn([1, 9, 3], [4])], [[1, 2], [1, 9, 3, 4]], [".s", "...s"]),
        ([turn([1, 2], [3]), turn([1], [4])], [[1, 2, 3], [1, 4]], ["..s", ".s"]),
        # Back to the first sequence, after a branch of its own.
        (
            [turn([1], [2]), turn([7], [8]), turn([1, 2, 3], [4])],
            [[1, 2, 3, 4], [7, 8]],
            [".s.s", ".s"],
        ),
        # A turn that sampled nothing.
        ([turn([1], []), turn([1, 2], [3])], [[1, 2, 3]], ["..s"]),
    ],
)
def test_merging_by_table(turns, ids, sampled):
    sequences = merge_turns(turns)
    assert [ids_of(sequence) for sequence in sequences] == ids
    marks = ["".join("s" if s else "." for s in sequence.loss_mask) for sequence in sequences]
    assert marks == sampled
    for s in sequences:
        mask = s.loss_mask[len(s.prompt_token_ids) :]
        for token, logprob, was in zip(s.token_ids, s.token_logprobs, mask, strict=True):
            assert logprob == pytest.approx(-0.1 * token) if was else math.isnan(logprob)


def test_the_prompt_ends_where_sampling_starts():
    (sequence,) = merge_turns([turn([1, 2], [3]), turn([1, 2, 3, 4], [5])])
    assert sequence.prompt_token_ids == [1, 2]
    (nothing,) = merge_turns([turn([1, 2], [])])
    assert nothing.prompt_token_ids == [1, 2]


def test_the_longest_sequence_that_fits_is_extended():
    turns = [turn([1], [2]), turn([1], [2, 3]), turn([1, 2, 3, 4], [5])]
    assert [ids_of(s) for s in merge_turns(turns)] == [[1, 2], [1, 2, 3, 4, 5]]


def test_weights_of_earlier_turns_are_never_overwritten():
    turns = [turn([1, 2], [3]), turn([1, 2, 3, 4], [5])]
    (sequence,) = merge_turns(turns, [[None, 0.5, None], [9.0, 9.0, 9.0, 0.25, None]])
    assert repr(sequence.echo_alpha) == "[nan, 0.5, nan, 0.25, nan]"


@settings(deadline=None)
@given(st.lists(st.tuples(st.lists(st.integers(0, 3)), st.lists(st.integers(0, 3))), max_size=8))
def test_every_sampled_token_is_in_exactly_one_place(parts):
    history: list[int] = []
    turns = []
    for shown, sampled in parts:
        turns.append(turn(history + shown, sampled))
        history = history + shown + sampled
    sequences = merge_turns(turns)
    assert len(sequences) == (1 if turns else 0)  # every prompt extends all before it
    for s in sequences:
        assert ids_of(s) == history
        assert len(s.loss_mask) == s.length
        assert len(s.token_logprobs) == len(s.token_ids)
    assert sum(sum(s.loss_mask) for s in sequences) == sum(len(sampled) for _, sampled in parts)


USER, TOOL = (Attribution(role, content=True) for role in ("user", "tool"))
OWN = Attribution("assistant", content=True, sampled=True)
ECHO = EchoConfig(tool=ToolEcho(alpha=0.5))


def test_each_turn_has_the_weights_of_what_it_was_shown():
    turns = [
        turn([1, 2], [3], attributions=[USER, USER, OWN]),
        turn([1, 2, 3, 4], [5], attributions=[USER, USER, OWN, TOOL, OWN]),
    ]
    weights, unattributed = turn_alphas(ECHO, turns)
    assert unattributed == 0
    assert repr(merge_turns(turns, weights)[0].echo_alpha) == "[nan, nan, nan, 0.5, nan]"


@pytest.mark.parametrize("attributions", [None, [], [USER, TOOL]])
def test_a_turn_that_cannot_be_attributed_echoes_only_samples(attributions):
    turns = [
        turn([1, 2], [3], attributions=[USER, TOOL, OWN]),
        turn([1, 2, 3, 4], [5], attributions=attributions),
        turn([1, 2, 3, 4, 5, 6], [7], attributions=[None] * 5 + [TOOL, OWN]),
    ]
    weights, unattributed = turn_alphas(ECHO, turns)
    [sequence] = merge_turns(turns, weights)
    assert unattributed == 1
    assert repr(sequence.echo_alpha) == "[nan, 0.5, nan, nan, nan, 0.5, nan]"
    # Who sampled the model's own tokens needs no renderer to tell.
    own = EchoConfig(tool=ToolEcho(alpha=0.5), assistant=RoleEcho(alpha=2.0))
    [sequence] = merge_turns(turns, turn_alphas(own, turns)[0])
    assert repr(sequence.echo_alpha) == "[nan, 0.5, 2.0, nan, 2.0, 0.5, 2.0]"


SHOWN = Attribution("assistant", content=True)


def test_what_a_prompt_shows_of_the_assistant_echoes_once_though_it_is_rendered_again():
    own = EchoConfig(assistant=RoleEcho(alpha=2.0))
    turns = [
        turn([1, 2, 3], [4], attributions=[USER, SHOWN, USER, OWN]),
        turn([1, 2, 3, 4, 5], [6], attributions=[USER, SHOWN, USER, OWN, USER, OWN]),
        # Anew: the demonstration and both samples are shown as history.
        turn(
            [9, 2, 3, 4, 5, 6, 7],
            [8],
            attributions=[USER, SHOWN, USER, SHOWN, USER, SHOWN, USER, OWN],
        ),
    ]
    first, anew = merge_turns(turns, turn_alphas(own, turns)[0])
    assert repr(first.echo_alpha) == "[nan, 2.0, nan, 2.0, nan, 2.0]"
    assert repr(anew.echo_alpha) == "[nan, nan, nan, nan, nan, nan, nan, 2.0]"


ALPHAS = {"user": 0.25, "assistant": 2.0, "tool": 0.5}
ALL_ROLES = EchoConfig(
    user=RoleEcho(alpha=0.25), assistant=RoleEcho(alpha=2.0), tool=ToolEcho(alpha=0.5)
)
TURNS = st.lists(
    st.tuples(
        st.lists(st.sampled_from([USER, TOOL, SHOWN, None]), min_size=1, max_size=4),
        st.integers(1, 3),
        st.booleans(),
        st.booleans(),
    ),
    max_size=5,
)
"""Conversations: for each turn where its new tokens come from, how many are sampled, whether the
prompt is rendered anew, and whether the renderer can say where tokens come from."""


@settings(deadline=None)
@given(TURNS)
def test_echo_weights_agree_with_a_plain_reference(parts):
    """Token by token: each echoes where it first stands in a sequence, in an attributed turn;
    of what the assistant says, the samples, and what the first prompt shows."""
    turns, sequences = [], []
    ids = iter(range(1000))
    for number, (shown, samples, anew, known) in enumerate(parts):
        # Tokens of the conversation so far: id, origin. Samples are shown as the assistant's words.
        if anew or not turns:
            past = [(next(ids), origin) for _, origin, _ in (sequences[-1] if sequences else [])]
            sequences.append([])
        else:
            past = [(token, origin) for token, origin, _ in sequences[-1]]
        prompt = past + [(next(ids), origin) for origin in shown]
        sampled = [next(ids) for _ in range(samples)]
        origins = [origin for _, origin in prompt] + [OWN] * samples
        turns.append(turn([token for token, _ in prompt], sampled, origins if known else None))
        for token, origin in prompt[len(sequences[-1]) :]:
            echoes = known and origin and (origin.role != "assistant" or number == 0)
            alpha = ALPHAS[origin.role] if echoes and sequences[-1] else None
            sequences[-1].append((token, origin, alpha))
        sequences[-1] += [(token, SHOWN, ALPHAS["assistant"]) for token in sampled]
    weights, unattributed = turn_alphas(ALL_ROLES, turns)
    merged = merge_turns(turns, weights)
    assert unattributed == sum(not known for *_, known in parts)
    assert [ids_of(s) for s in merged] == [[token for token, *_ in s] for s in sequences]
    for sequence, expected in zip(merged, sequences, strict=True):
        found = [None if math.isnan(alpha) else alpha for alpha in sequence.echo_alpha]
        assert found == [alpha for *_, alpha in expected]


def test_experts_of_several_turns_are_those_each_token_was_read_with():
    """A turn does not know where its own last token will go: the next one does."""
    first = turn([1, 2], [3, 4], routed_experts=np.array([[11], [12], [13], [0]]))
    second = turn([1, 2, 3, 4, 5], [6], routed_experts=np.array([[21]] * 3 + [[14], [15], [0]]))
    [sequence] = merge_turns([first, second])
    assert sequence.routed_experts.tolist() == [[11], [12], [13], [14], [15], [0]]


@pytest.mark.parametrize(
    ("covers", "lag", "merged"),
    [
        ("completion", 0, [3, 4, -7, 6]),
        ("tokens", 0, [1, 2, 3, 4, 50, 60]),
        ("tokens", 2, [1, 2, 30, 40, 50, 60]),
    ],
)
def test_a_column_of_ones_own_is_merged_as_it_is_declared(monkeypatch, covers, lag, merged):
    """What is known of a token stays, but for the last `lag` tokens of a turn."""
    monkeypatch.delitem(COLUMNS, "rating", raising=False)
    declare(Column("rating", "int32", -7, covers, lag=lag))
    monkeypatch.setitem(COLUMNS, "rating", COLUMNS["rating"])  # undone by the test's end
    whole = covers == "tokens"
    first = turn([1, 2], [3, 4], rating=[1, 2, 3, 4] if whole else [3, 4])
    second = turn([1, 2, 3, 4, 5], [6], rating=[10, 20, 30, 40, 50, 60] if whole else [6])
    [sequence] = merge_turns([first, second])
    assert sequence.rating == merged
    # A turn without the column has padding in its place, also if it comes first.
    [late] = merge_turns([turn([1, 2], [3, 4]), second])
    assert late.rating == ([10, 20, 30, 40, 50, 60] if whole else [-7, -7, -7, 6])
    [early] = merge_turns([first, turn([1, 2, 3, 4, 5], [6])])
    assert early.rating == ([1, 2, 3, 4, -7, -7] if whole else [3, 4, -7, -7])
    with pytest.raises(ValueError, match=r"rating has 1 values for \d tokens"):
        merge_turns([turn([1, 2], [3, 4], rating=[9])])


FILTERED = EchoConfig(tool=ToolEcho(), filter="shutil:which")


def test_a_filter_narrows_turn_by_turn():
    turns = [turn([1, 2, 3], [4], attributions=[USER, TOOL, TOOL, OWN])]
    weights, _ = turn_alphas(FILTERED, turns, [[True, False, True, True]])
    assert weights == [[None, None, 1.0, None]]


def test_a_filter_is_checked_but_not_on_an_empty_conversation():
    assert turn_alphas(FILTERED, [], None) == ([], 0)
    with pytest.raises(TypeError, match="'shutil:which' must return a list of lists"):
        turn_alphas(FILTERED, [turn([1], [2])], None)
    with pytest.raises(ValueError, match=r"masks of \[1\] tokens for turns of \[2\]"):
        turn_alphas(FILTERED, [turn([1], [2])], [[True]])

"""Off-policy correction: each step alone, all of them in order, and what is refused."""

import math
from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_rl.algorithms.correction import correction_weights
from torchtitan_rl.config import CorrectionConfig
from torchtitan_rl.core.metrics import flatten

OUTLIERS = {"sequence_outliers": "on"}
TOKENS = {"token_mask": "on"}
TOKEN_WEIGHT = {"importance_weight": "token"}
SEQUENCE_WEIGHT = {"importance_weight": "sequence"}
GEOMETRIC = {"sequence_mask": "geometric"}
PRODUCT = {"sequence_mask": "product"}


def corrected(config, w, sequences):
    """Weights and metrics at these w = exp(o - g), given per token."""
    generator = torch.linspace(-3, -0.5, len(w))
    old = generator + torch.tensor(w, dtype=torch.float64).log()
    ids = torch.tensor(sequences, dtype=torch.int64)
    done = correction_weights(CorrectionConfig(**config), old, generator, ids)
    return done.weights.tolist(), flatten(done.metrics)


@pytest.mark.parametrize(
    ("config", "w", "sequences", "weights"),
    [
        ({}, [1e-6, 1.0, 1e6], [0, 0, 1], [1, 1, 1]),
        # One token outside takes its sequence along, and no other.
        (OUTLIERS, [1.0, 200.0, 1.0], [0, 0, 1], [0, 0, 1]),
        (OUTLIERS, [1.0, 1.0, 5e-5, 1.0], [0, 1, 0, 1], [0, 1, 0, 1]),
        (OUTLIERS, [90.0, 2e-4], [0, 0], [1, 1]),
        ({**OUTLIERS, "sequence_outliers_bounds": (0.5, 2)}, [3.0, 1.0], [0, 1], [0, 1]),
        (TOKENS, [0.4, 0.6, 4.9, 5.1], [0, 0, 0, 0], [0, 1, 1, 0]),
        ({**TOKENS, "token_mask_bounds": (0.9, 1.1)}, [0.8, 1.0, 1.2], [0, 0, 0], [0, 1, 0]),
        (TOKEN_WEIGHT, [0.5, 1.0, 3.0], [0, 0, 0], [0.5, 1, 2]),
        ({**TOKEN_WEIGHT, "importance_cap": 1.5}, [0.5, 1.0, 3.0], [0, 0, 0], [0.5, 1, 1.5]),
        ({**TOKEN_WEIGHT, "importance_cap": 9.0}, [0.5, 1.0, 3.0], [0, 0, 0], [0.5, 1, 3]),
        (SEQUENCE_WEIGHT, [2, 0.5, 4, 2, 0.5, 4], [0, 1, 2, 0, 1, 2], [4, 0.25, 5, 4, 0.25, 5]),
        ({**SEQUENCE_WEIGHT, "importance_cap": 3.0}, [2, 2, 0.5], [0, 0, 1], [3, 3, 0.5]),
        # Means 1.00499, 1.01489 and 0.98489; two large steps that cancel are no mismatch.
        (GEOMETRIC, [1.01, 1.0, 1.03, 1.0, 0.97, 1.0], [0, 0, 1, 1, 2, 2], [1, 1, 0, 0, 0, 0]),
        (GEOMETRIC, [2.0, 0.5], [0, 0], [1, 1]),
        ({**GEOMETRIC, "sequence_mask_bounds": (0.99, 1.1)}, [1.03, 0.97], [0, 1], [1, 0]),
        ({**GEOMETRIC, "sequence_mask_bounds": (0.9, 1.01)}, [1.03, 0.97], [0, 1], [0, 1]),
        # Products 1.8, 2.25 and 0.42
        (PRODUCT, [1.5, 1.2, 1.5, 1.5, 0.6, 0.7], [0, 0, 1, 1, 2, 2], [1, 1, 0, 0, 0, 0]),
        ({**PRODUCT, "sequence_mask_bounds": (0.5, 3.0)}, [1.5, 1.5, 0.4], [0, 0, 1], [1, 1, 0]),
    ],
)
def test_each_step_alone(config, w, sequences, weights):
    assert corrected(config, w, sequences)[0] == pytest.approx(weights)


EVERYTHING = {
    "sequence_outliers": "on",
    "token_mask": "on",
    "token_mask_bounds": (0.4, 5.0),
    "importance_weight": "token",
    "sequence_mask": "geometric",
}


def test_all_steps_together_in_their_order():
    tokens = [
        # w, sequence, weight
        (1.0, 0, 1.0),
        (1.0, 0, 1.0),
        (200.0, 1, 0.0),  # an outlier; the later masks would drop it as well
        (1.0, 1, 0.0),
        (4.0, 2, 2.0),  # capped; the mean over its sequence is that of w, not of the capped
        (0.5, 2, 0.5),
        (0.5, 2, 0.5),
        (1.5, 3, 0.0),  # the sequence's mean is 1.34
        (1.2, 3, 0.0),
        (6.0, 4, 0.0),  # token mask; the sequence's mean is 1
        (1 / 6, 4, 0.0),
    ]
    w, sequences, expected = map(list, zip(*tokens, strict=True))
    weights, metrics = corrected(EVERYTHING, w, sequences)
    assert weights == pytest.approx(expected)
    importance = [min(x, 2) for x in w]
    # What an earlier step has masked is not counted again; all tokens are what shares are of.
    assert metrics == pytest.approx(
        {
            "correction/sequence_outliers_share": 2 / 11,
            "correction/token_mask_share": 2 / 11,
            "correction/sequence_mask_share": 2 / 11,
            "correction/importance_weight/mean": sum(importance) / 11,
            "correction/importance_weight/std": torch.tensor(importance).std(correction=0).item(),
            "correction/importance_weight/max": 2.0,
        }
    )


@pytest.mark.parametrize(
    ("config", "metrics"),
    [
        ({}, set()),
        (OUTLIERS, {"correction/sequence_outliers_share"}),
        (TOKENS, {"correction/token_mask_share"}),
        (GEOMETRIC, {"correction/sequence_mask_share"}),
        (PRODUCT, {"correction/sequence_mask_share"}),
        (TOKEN_WEIGHT, {f"correction/importance_weight/{k}" for k in ("mean", "std", "max")}),
    ],
)
def test_only_steps_that_are_on_report_what_they_did(config, metrics):
    assert corrected(config, [1.0, 300.0], [0, 1])[1].keys() == metrics


ONE_AT_AN_END = (1.0, 2.0), (0.5, 1.0)


@pytest.mark.parametrize(
    "config",
    [
        *({**OUTLIERS, "sequence_outliers_bounds": bounds} for bounds in ONE_AT_AN_END),
        *({**TOKENS, "token_mask_bounds": bounds} for bounds in ONE_AT_AN_END),
        *({**GEOMETRIC, "sequence_mask_bounds": bounds} for bounds in ONE_AT_AN_END),
        *({**PRODUCT, "sequence_mask_bounds": bounds} for bounds in ONE_AT_AN_END),
    ],
)
def test_the_ends_of_an_interval_belong_to_it(config):
    assert corrected(config, [1.0, 1.0], [0, 0])[0] == [1, 1]


def test_w_is_bounded_whatever_the_difference():
    old = torch.tensor([0.0, -1000.0, 0.0])
    generator = torch.tensor([-1000.0, 0.0, -1.0])
    config = CorrectionConfig(importance_weight="token", importance_cap=1e12)
    weights = correction_weights(config, old, generator, torch.arange(3)).weights
    assert weights.tolist() == pytest.approx([math.exp(20), math.exp(-20), math.e])


@settings(deadline=None)
@given(
    tokens=st.lists(
        st.tuples(st.floats(-1e4, 1e4, width=32), st.integers(0, 3)), min_size=1, max_size=12
    ),
    config=st.sampled_from(
        [EVERYTHING, {**EVERYTHING, **SEQUENCE_WEIGHT, **PRODUCT}, SEQUENCE_WEIGHT, PRODUCT]
    ),
)
def test_weights_are_finite_and_never_negative_for_any_difference(tokens, config):
    differences, sequences = map(list, zip(*tokens, strict=True))
    zeros = torch.zeros(len(tokens))
    done = correction_weights(
        CorrectionConfig(**config), torch.tensor(differences), zeros, torch.tensor(sequences)
    )
    assert done.weights.isfinite().all()
    assert (done.weights >= 0).all()
    assert all(map(math.isfinite, flatten(done.metrics).values()))
    assert ((done.weights > 0) | done.high | done.low).all()  # what is masked says why


ratios = st.sampled_from([1e-5, 0.3, 0.7, 0.98, 1.0, 1.005, 1.2, 3.0, 7.0, 300.0])


@settings(deadline=None)
@given(
    sequences=st.lists(st.lists(ratios, min_size=1, max_size=4), min_size=1, max_size=5),
    config=st.sampled_from([EVERYTHING, {**EVERYTHING, **SEQUENCE_WEIGHT, **PRODUCT}]),
)
def test_a_sequence_is_corrected_the_same_whatever_shares_its_microbatch(sequences, config):
    ids = [i for i, sequence in enumerate(sequences) for _ in sequence]
    together, _ = corrected(config, list(chain(*sequences)), ids)
    alone = [corrected(config, sequence, [0] * len(sequence))[0] for sequence in sequences]
    assert together == pytest.approx(list(chain(*alone)), rel=1e-5)


def test_no_gradient_passes_through_the_weights():
    old = torch.tensor([-1.0, -2.0], requires_grad=True)
    generator = torch.tensor([-1.1, -1.9], requires_grad=True)
    config = CorrectionConfig(**EVERYTHING)
    weights = correction_weights(config, old, generator, torch.tensor([0, 0])).weights
    assert not weights.requires_grad


def test_weights_are_float32_whatever_the_logprobs_are():
    old, generator = torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.bfloat16)
    config = CorrectionConfig(**EVERYTHING)
    weights = correction_weights(config, old, generator, torch.tensor([0, 0])).weights
    assert weights.dtype == torch.float32


@pytest.mark.parametrize(
    "config", [EVERYTHING, {**EVERYTHING, **SEQUENCE_WEIGHT, **PRODUCT}], ids=["token", "sequence"]
)
def test_no_tokens_need_no_correction(config):
    assert corrected(config, [], []) == ([], {})


@pytest.mark.parametrize(
    ("config", "on"),
    [
        ({}, False),
        (OUTLIERS, True),
        (TOKENS, True),
        (TOKEN_WEIGHT, True),
        (SEQUENCE_WEIGHT, True),
        (GEOMETRIC, True),
        (PRODUCT, True),
    ],
)
def test_everything_is_off_until_a_step_is_switched_on(config, on):
    assert CorrectionConfig(**config).on is on


@pytest.mark.parametrize(
    ("low", "high"), [(2.0, 1.0), (1.0, 1.0), (-0.1, 1.0), (math.nan, 1.0), (0.5, math.nan)]
)
@pytest.mark.parametrize("mask", ["sequence_outliers", "token_mask", "sequence_mask"])
def test_bounds_the_wrong_way_round_are_refused(mask, low, high):
    mode = "product" if mask == "sequence_mask" else "on"
    with pytest.raises(ValueError, match=f"{mask}_bounds must be 0 <= low < high; got"):
        CorrectionConfig(**{mask: mode, f"{mask}_bounds": (low, high)})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**TOKEN_WEIGHT, "importance_cap": 0.0}, "must be positive and finite; got 0.0"),
        ({**TOKEN_WEIGHT, "importance_cap": -2.0}, "must be positive and finite; got -2.0"),
        ({**TOKEN_WEIGHT, "importance_cap": math.nan}, "importance_cap.*nan"),
        ({**TOKEN_WEIGHT, "importance_cap": math.inf}, "importance_cap.*inf"),
        (
            {"importance_cap": 3.0},
            "importance_cap has no effect while correction.importance",
        ),
        ({"token_mask_bounds": (0.1, 2.0)}, "token_mask_bounds has no effect while"),
        ({"token_mask": "yes"}, "unknown correction.token_mask 'yes'.*Known: on, off"),
        ({"importance_weight": "tokens"}, "importance_weight.*'tokens'"),
        ({"sequence_mask": "mean"}, "sequence_mask.*'mean'"),
    ],
)
def test_a_bad_correction_is_refused_in_the_config(config, message):
    with pytest.raises(ValueError, match=message):
        CorrectionConfig(**config)

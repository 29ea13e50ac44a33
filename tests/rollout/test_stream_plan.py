"""What a stream is told, and the indices of a step."""

import pytest

from torchtitan_rl.config.stream import SPARES, SPARES_PER_STEP, StreamConfig
from torchtitan_rl.rollout.stream_plan import index_name


@pytest.mark.parametrize(
    ("config", "step", "indices"),
    [
        ({"prompts_per_step": 2}, 0, [0, 1, SPARES, SPARES + 1]),
        ({"prompts_per_step": 2}, 3, [6, 7, SPARES + 3 * SPARES_PER_STEP]),
        ({"prompts_per_step": 2, "oversample": 1}, 3, [9, 10, 11]),
        ({"prompts_per_step": 2, "max_groups_per_step": 4}, 3, [12, 13, 14, 15]),
        ({"prompts_per_step": 2, "max_offpolicy_steps": 4}, 3, [6, 7]),
    ],
)
def test_the_indices_of_a_step_are_its_own(config, step, indices):
    config = StreamConfig(**config)
    assert [config.index(step, number) for number in range(len(indices))] == indices


def test_every_index_has_a_short_name_of_its_own():
    config = StreamConfig(prompts_per_step=2)
    indices = [config.index(step, number) for step in range(50) for number in range(20)]
    names = [index_name(index) for index in indices]
    assert len(set(names)) == len(set(indices)) == 1000
    assert names[:5] == ["0", "1", "spare-0-0", "spare-0-1", "spare-0-2"]
    assert max(map(len, names)) == len("spare-49-17")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"prompts_per_step": 0}, "at least 1"),
        ({"max_offpolicy_steps": -1}, "max_offpolicy_steps must not be negative"),
        ({"oversample": -1}, "oversample must not be negative"),
        ({"max_groups_per_step": 5, "oversample": 2}, r"\(5\) must be at least .*\(6\)"),
        ({"timeout_seconds": 0}, "must be positive"),
        ({"timeout_seconds": 60, "deadline_seconds": 60}, "shorter than supervision.dead"),
    ],
)
def test_a_config_that_cannot_work_says_why(wrong, message):
    with pytest.raises(ValueError, match=message):
        StreamConfig(**{"prompts_per_step": 4} | wrong)

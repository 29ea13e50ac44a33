"""What a resumed run keeps is said by the fields of the config."""

from dataclasses import dataclass, field

from torchtitan_rl.config.resume import Fixed, fixed_settings
from torchtitan_rl.recipes import echo_calculator_tiny

KEPT = {
    *("model", "warm_start", "task", "prompts_per_step", "max_offpolicy_steps", "seed"),
    *("generator.backend", "generator.kwargs", "generator.sampling"),
    *("generator.engine.max_model_len", "advantage"),
    *("rollout.max_turns", "rollout.max_tokens", "rollout.max_seconds", "rollout.timeout_seconds"),
    *("rollout.oversample", "rollout.max_groups_per_step", "rollout.untrained_share"),
    *("rollout.thinking", "rollout.train_from"),
    *("rollout.environment.timeout_seconds", "rollout.environment.max_result_chars"),
    *("trainer.backend", "trainer.kwargs", "trainer.optimizer", "trainer.loss"),
    *("trainer.updates_per_step", "trainer.batch_filter", "trainer.max_grad_norm"),
    *("trainer.overlong", "trainer.router_replay", "trainer.dtype", "trainer.reference.dtype"),
}


def test_what_decides_what_a_run_computes_is_kept():
    assert set(fixed_settings(echo_calculator_tiny())) == KEPT


def test_a_group_is_fixed_as_a_whole_or_by_its_fields():
    @dataclass
    class Inner:
        free: int = 0
        kept: Fixed[int] = 0

    @dataclass
    class Outer:
        whole: Fixed[Inner] = field(default_factory=Inner)
        parts: Inner = field(default_factory=Inner)
        free: str = ""

    assert list(fixed_settings(Outer())) == ["whole", "parts.kept"]

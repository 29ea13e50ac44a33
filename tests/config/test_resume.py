"""What a resumed run keeps, and what it may change, is said by the fields of the config."""

from dataclasses import dataclass, field

from torchtitan_rl.config.resume import Fixed, NamesRun, fixed_settings, free_settings
from torchtitan_rl.recipes import echo_calculator_tiny

KEPT = {
    *("model", "warm_start", "task", "prompts_per_step", "max_offpolicy_steps", "seed"),
    *("generator.backend", "generator.kwargs"),
    *(f"generator.sampling.{name}" for name in ("temperature", "top_p", "top_k")),
    *(f"generator.sampling.{name}" for name in ("max_tokens", "stop", "logprobs")),
    *("generator.engine.max_model_len", "advantage", "fork_from"),
    *("rollout.max_turns", "rollout.max_tokens", "rollout.max_seconds"),
    *("rollout.oversample", "rollout.max_groups_per_step", "rollout.untrained_share"),
    *("rollout.thinking", "rollout.train_from"),
    *("rollout.environment.timeout_seconds", "rollout.environment.max_result_chars"),
    *("trainer.backend", "trainer.kwargs", "trainer.loss"),
    *("trainer.optimizer.betas", "trainer.optimizer.eps"),
    *("trainer.updates_per_step", "trainer.batch_filter"),
    *("trainer.overlong", "trainer.router_replay", "trainer.dtype", "trainer.reference.dtype"),
}
FREE = {
    *("placement", "generator.engine.can_sleep"),
    *("steps", "evaluation.*", "checkpoint.*", "cluster.*", "log.*", "supervision.*"),
    *("trainer.optimizer.lr", "trainer.optimizer.weight_decay", "trainer.lr_scheduler.*"),
    *("trainer.max_grad_norm", "generator.sampling.n"),
    *("rollout.timeout_seconds", "rollout.grader.*", "rollout.environment.concurrent_calls"),
    *("generator.replicas", "generator.tensor_parallel_degree", "generator.threads"),
    *(f"generator.engine.{name}" for name in ("dtype", "max_num_seqs", "max_num_batched_tokens")),
    *(f"generator.engine.{name}" for name in ("block_size", "kv_cache_gib", "enforce_eager")),
    *(f"generator.engine.{name}" for name in ("drain", "return_routed_experts")),
    *("trainer.tokens_per_microbatch", "trainer.share_prompts", "trainer.parallelism.*"),
    *("trainer.activation_checkpoint", "trainer.compile", "trainer.gradient_sync"),
    *("trainer.weight_sync.*", "trainer.threads"),
    *("trainer.reference.parallelism.*", "trainer.reference.threads", "trainer.export_tokens"),
}


def test_what_decides_what_a_run_computes_is_kept():
    assert set(fixed_settings(echo_calculator_tiny())) == KEPT


def test_how_much_how_often_and_where_may_change():
    assert set(free_settings(echo_calculator_tiny())) == FREE


def test_a_group_is_fixed_as_a_whole_or_by_its_fields():
    @dataclass
    class Free:
        own: int = 0

    @dataclass
    class Inner:
        free: int = 0
        kept: Fixed[int] = 0
        group: Free = field(default_factory=Free)

    @dataclass
    class Outer:
        whole: Fixed[Inner] = field(default_factory=Inner)
        parts: Inner = field(default_factory=Inner)
        free: str = ""
        name: NamesRun[str] = ""

    assert list(fixed_settings(Outer())) == ["whole", "parts.kept"]
    assert list(free_settings(Outer())) == ["parts.free", "parts.group.*", "free"]

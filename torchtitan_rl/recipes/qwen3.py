"""Recipes with Qwen3 on GPUs."""

from torchtitan_rl.config import (
    EngineConfig,
    EvaluationConfig,
    GeneratorConfig,
    OptimizerConfig,
    Parallelism,
    RunConfig,
    SamplingConfig,
    TrainerConfig,
    constant_lr,
)
from torchtitan_rl.tasks.sum_digits import SumDigits


def grpo_sum_digits_qwen3_0_6b() -> RunConfig:
    """GRPO on sums of digits with Qwen3-0.6B on two GPUs: one trains, one generates."""
    return _qwen3("Qwen3-0.6B", shard=1, generator_tp=1, kv_cache_gib=16.0)


def grpo_sum_digits_qwen3_1_7b() -> RunConfig:
    """GRPO on sums of digits with Qwen3-1.7B on four GPUs: FSDP over two, two generate."""
    return _qwen3("Qwen3-1.7B", shard=2, generator_tp=2, kv_cache_gib=24.0)


def grpo_sum_digits_qwen3_14b() -> RunConfig:
    """GRPO on sums of digits with Qwen3-14B on eight GPUs: FSDP 2 x TP 2, four generate."""
    return _qwen3("Qwen3-14B", shard=2, tp=2, generator_tp=4, kv_cache_gib=32.0, recompute=True)


def _qwen3(
    name: str,
    *,
    shard: int,
    generator_tp: int,
    kv_cache_gib: float,
    tp: int = 1,
    recompute: bool = False,
) -> RunConfig:
    return RunConfig(
        model=f"models/{name}",
        task=SumDigits.Config(
            digits=3,
            instructions="Add up all digits of the numbers. Write the running sums, then "
            "'[ANSWER] ' and the total.",
        ),
        steps=200,
        prompts_per_step=64,
        generator=GeneratorConfig(
            sampling=SamplingConfig(n=8, max_tokens=256),
            engine=EngineConfig(max_model_len=1024, kv_cache_gib=kv_cache_gib),
            tensor_parallel_degree=generator_tp,
        ),
        trainer=TrainerConfig(
            optimizer=OptimizerConfig(lr=1e-6),
            lr_scheduler=constant_lr(warmup_steps=10),
            parallelism=Parallelism(data_parallel_shard_degree=shard, tensor_parallel_degree=tp),
            tokens_per_microbatch=4096,
            activation_checkpoint="full" if recompute else "auto",
        ),
        evaluation=EvaluationConfig(every=20, prompts=256),
    )

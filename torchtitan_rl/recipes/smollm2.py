"""Recipes with SmolLM2-135M-Instruct, a real language model, on a laptop's CPU."""

from dataclasses import replace

from torchtitan_rl.config import (
    AdvantageConfig,
    CheckpointConfig,
    EngineConfig,
    EvaluationConfig,
    GeneratorConfig,
    OptimizerConfig,
    RunConfig,
    SamplingConfig,
    TrainerConfig,
    constant_lr,
)
from torchtitan_rl.config.models import SMOLLM2_FOLDER
from torchtitan_rl.tasks.jsonl import Jsonl
from torchtitan_rl.tasks.largest_number import LargestNumber
from torchtitan_rl.tasks.sum_digits import SumDigits


def grpo_sum_digits_smollm2_135m() -> RunConfig:
    """Sums of digits with SmolLM2-135M-Instruct, a real language model, on a laptop CPU."""
    return RunConfig(
        model=SMOLLM2_FOLDER,  # made when it is first asked for
        task=SumDigits.Config(
            min_numbers=1,
            max_numbers=1,
            digits=3,
            # As it would say it itself: "The sum of the digits of 681 is 6 + 8 + 1 = 15."
            prompt="What is the sum of the digits of {}?",
            answer=r"= (\d+)\.?\s*$",
        ),
        steps=30,
        prompts_per_step=8,
        generator=GeneratorConfig(
            sampling=SamplingConfig(n=8, max_tokens=32),
            engine=EngineConfig(
                max_model_len=128,
                max_num_seqs=128,
                max_num_batched_tokens=2048,
                kv_cache_gib=0.25,
            ),
        ),
        trainer=TrainerConfig(
            optimizer=OptimizerConfig(lr=1e-5),
            lr_scheduler=constant_lr(warmup_steps=3),
            tokens_per_microbatch=320,  # a group: more would be faster by little, and need memory
            share_prompts=True,
        ),
        advantage=AdvantageConfig(name="grpo"),
        evaluation=EvaluationConfig(every=5, prompts=80),
        checkpoint=CheckpointConfig(every=15),
    )


def grpo_largest_number_smollm2_135m() -> RunConfig:
    """The largest of four numbers with SmolLM2-135M-Instruct: learns within minutes on a laptop."""
    config = grpo_sum_digits_smollm2_135m()
    sampling = SamplingConfig(n=8, max_tokens=24)
    return replace(
        config,
        task=LargestNumber.Config(),
        steps=40,
        generator=replace(config.generator, sampling=sampling),
        evaluation=EvaluationConfig(every=10, prompts=200),
        checkpoint=CheckpointConfig(every=20),
    )


def grpo_jsonl() -> RunConfig:
    """GRPO on questions and answers of your own: --task.path my.jsonl --model models/<folder>."""
    config = grpo_sum_digits_smollm2_135m()
    return replace(
        config,
        task=Jsonl.Config(),
        generator=replace(
            config.generator,
            # Room for longer questions, and for some working before the answer.
            sampling=SamplingConfig(n=8, max_tokens=64),
            engine=EngineConfig(max_model_len=512, kv_cache_gib=0.5),
        ),
        trainer=replace(config.trainer, tokens_per_microbatch=640),
        evaluation=EvaluationConfig(every=10, prompts=50),
    )

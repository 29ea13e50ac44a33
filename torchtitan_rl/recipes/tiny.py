"""Recipes with a 0.6M-parameter model that a warm start makes: minutes on a laptop's CPU."""

from dataclasses import replace

from torchtitan_rl.config import (
    AdvantageConfig,
    EchoConfig,
    EngineConfig,
    EvaluationConfig,
    GeneratorConfig,
    LossConfig,
    OptimizerConfig,
    RolloutConfig,
    RunConfig,
    SamplingConfig,
    ToolEcho,
    TrainerConfig,
    WarmStartConfig,
    annealed_lr,
)
from torchtitan_rl.tasks.calculator import Calculator
from torchtitan_rl.tasks.mixture import Mixture
from torchtitan_rl.tasks.spelling import Spelling
from torchtitan_rl.tasks.sum_digits import SumDigits


def grpo_sum_digits_tiny() -> RunConfig:
    """Sums of digits with a 0.6M-parameter model, GRPO's loss: the whole stack on a laptop CPU."""
    return RunConfig(
        warm_start=WarmStartConfig(),
        task=SumDigits.Config(max_numbers=2),
        steps=80,
        prompts_per_step=32,
        generator=GeneratorConfig(
            sampling=SamplingConfig(n=8, max_tokens=28),
            # 256 completions of 128 tokens take 0.05 GiB.
            engine=EngineConfig(max_model_len=128, kv_cache_gib=0.0625),
            threads=1,
        ),
        trainer=TrainerConfig(
            optimizer=OptimizerConfig(lr=1e-4, betas=(0.9, 0.99)),
            # A model this small is noisy at any constant rate, so the second half anneals it.
            lr_scheduler=annealed_lr(warmup_steps=10, last=0.5),
            tokens_per_microbatch=1024,  # activations are most of the memory of a model this small
            threads=2,
        ),
        # Without thinking, an empty thought would be a fifth of the prompt.
        rollout=RolloutConfig(thinking=True),
        advantage=AdvantageConfig(name="maxrl"),
        evaluation=EvaluationConfig(every=15, prompts=200),
    )


def dppo_sum_digits_async_tiny() -> RunConfig:
    """Sums of digits with generation one step ahead of training, and a loss for such old tokens."""
    config = grpo_sum_digits_tiny()
    return replace(
        config,
        max_offpolicy_steps=1,
        # Generator and trainer work at the same time: a core each.
        trainer=replace(config.trainer, loss=LossConfig(name="dppo"), threads=1),
    )


def grpo_sum_digits_moe_tiny() -> RunConfig:
    """Sums of digits with a mixture of 8 experts, which the trainer routes as the generator did."""
    config = grpo_sum_digits_tiny()
    return replace(
        config,
        warm_start=WarmStartConfig(experts=8),
        trainer=replace(config.trainer, router_replay=True),
    )


def echo_calculator_tiny() -> RunConfig:
    """Arithmetic and spelling with tools: RL on what the model says, Echo on what the tools say."""
    config = grpo_sum_digits_tiny()
    # Its share of the gradient is limited by trainer.loss.echo_share, whatever its weight is.
    echo = EchoConfig(tool=ToolEcho())
    return replace(
        config,
        # All steps: what is left to learn should be the demonstrations' mistakes, not the form.
        warm_start=WarmStartConfig(steps=600, enough_accuracy=1.0, evaluate_every=150),
        task=Mixture.Config(
            tasks=[
                Calculator.Config(echo=echo, show_tools=False),
                Spelling.Config(echo=echo, show_tools=False),
            ],
            weights=[3.0, 2.0],
        ),
        steps=40,
        generator=replace(
            config.generator,
            sampling=SamplingConfig(n=8, max_tokens=48),
            engine=EngineConfig(max_model_len=256, kv_cache_gib=0.25),
        ),
        rollout=replace(config.rollout, max_turns=4),
        evaluation=EvaluationConfig(every=10, prompts=150),
    )

"""Recipes of this repository. A recipe is a function that returns a Controller.Config.

`python -m torchtitan_rl.train --config <name>` runs one; any field can be overridden from the
command line. Put a `config_registry.py` of your own in the folder you work in.
"""

from dataclasses import replace

from torchtitan_rl.actors.generator import VLLMGenerator
from torchtitan_rl.actors.trainer import OptimizerConfig, Trainer, annealed_lr, constant_lr
from torchtitan_rl.algorithms.advantage import AdvantageConfig
from torchtitan_rl.algorithms.echo import EchoConfig, ToolEcho
from torchtitan_rl.algorithms.objective import LossConfig
from torchtitan_rl.config.parallelism import Parallelism
from torchtitan_rl.config.run import CheckpointConfig, EvaluationConfig
from torchtitan_rl.engines.vllm.engine import EngineConfig, SamplingConfig
from torchtitan_rl.models.makers import smollm2
from torchtitan_rl.rollout.loop import RolloutConfig
from torchtitan_rl.run.controller import Controller
from torchtitan_rl.run.warm_start import WarmStartConfig
from torchtitan_rl.tasks.calculator import Calculator
from torchtitan_rl.tasks.jsonl import Jsonl
from torchtitan_rl.tasks.mixture import Mixture
from torchtitan_rl.tasks.spelling import Spelling
from torchtitan_rl.tasks.sum_digits import SumDigits


def grpo_sum_digits_tiny() -> Controller.Config:
    """Sums of digits with a 0.6M-parameter model, GRPO's loss: the whole stack on a laptop CPU."""
    return Controller.Config(
        warm_start=WarmStartConfig(),
        task=SumDigits.Config(max_numbers=2),
        steps=80,
        prompts_per_step=32,
        generator=VLLMGenerator.Config(
            sampling=SamplingConfig(n=8, max_tokens=28),
            engine=EngineConfig(max_model_len=128, kv_cache_gib=0.25),
            threads=1,
        ),
        trainer=Trainer.Config(
            optimizer=OptimizerConfig(lr=1e-4, betas=(0.9, 0.99)),
            # A model this small is noisy at any constant rate, so the second half anneals it.
            lr_scheduler=annealed_lr(warmup_steps=10, last=0.5),
            threads=2,
        ),
        advantage=AdvantageConfig(name="maxrl"),
        evaluation=EvaluationConfig(every=15, prompts=200),
        thinking=True,  # the empty thought would be a fifth of the prompt
    )


def dppo_sum_digits_async_tiny() -> Controller.Config:
    """The same with generation one step ahead of training, by a loss made for tokens that old."""
    config = grpo_sum_digits_tiny()
    return replace(
        config,
        max_offpolicy_steps=1,
        # Generator and trainer work at the same time: a core each.
        trainer=replace(config.trainer, loss=LossConfig(name="dppo"), threads=1),
    )


def grpo_sum_digits_moe_tiny() -> Controller.Config:
    """The same with a mixture of 8 experts, which the trainer routes as the generator did."""
    config = grpo_sum_digits_tiny()
    return replace(
        config,
        warm_start=WarmStartConfig(experts=8),
        trainer=replace(config.trainer, router_replay=True),
    )


def echo_calculator_tiny() -> Controller.Config:
    """Arithmetic and spelling with tools: RL on what the model says, Echo on what the tools say."""
    config = grpo_sum_digits_tiny()
    # At weight 1, six nats a token would drown what RL says: the model would forget how to call.
    echo = EchoConfig(tool=ToolEcho(alpha=0.05))
    return replace(
        config,
        # All steps: what is left to learn should be the teacher's mistakes, not the form.
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
        rollout=RolloutConfig(max_turns=4),
        evaluation=EvaluationConfig(every=10, prompts=150),
    )


def grpo_sum_digits_smollm2_135m() -> Controller.Config:
    """Sums of digits with SmolLM2-135M-Instruct, a real language model, on a laptop CPU."""
    return Controller.Config(
        model=smollm2.FOLDER,  # made when it is first asked for
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
        generator=VLLMGenerator.Config(
            sampling=SamplingConfig(n=8, max_tokens=32),
            engine=EngineConfig(
                max_model_len=128,
                max_num_seqs=128,
                max_num_batched_tokens=2048,
                kv_cache_gib=0.25,
            ),
        ),
        trainer=Trainer.Config(
            optimizer=OptimizerConfig(lr=1e-5),
            lr_scheduler=constant_lr(warmup_steps=3),
            tokens_per_microbatch=320,  # a group: more would be faster by little, and need memory
            share_prompts=True,
        ),
        advantage=AdvantageConfig(name="grpo"),
        evaluation=EvaluationConfig(every=5, prompts=80),
        checkpoint=CheckpointConfig(every=15),
    )


def grpo_jsonl() -> Controller.Config:
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


def grpo_sum_digits_qwen3_0_6b() -> Controller.Config:
    """GRPO on sums of digits with Qwen3-0.6B on two GPUs: one trains, one generates."""
    return _qwen3("Qwen3-0.6B", shard=1, generator_tp=1, kv_cache_gib=16.0)


def grpo_sum_digits_qwen3_1_7b() -> Controller.Config:
    """GRPO on sums of digits with Qwen3-1.7B on four GPUs: FSDP over two, two generate."""
    return _qwen3("Qwen3-1.7B", shard=2, generator_tp=2, kv_cache_gib=24.0)


def grpo_sum_digits_qwen3_14b() -> Controller.Config:
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
) -> Controller.Config:
    return Controller.Config(
        model=f"models/{name}",
        task=SumDigits.Config(
            digits=3,
            instructions="Add up all digits of the numbers. Write the running sums, then "
            "'[ANSWER] ' and the total.",
        ),
        steps=200,
        prompts_per_step=64,
        generator=VLLMGenerator.Config(
            sampling=SamplingConfig(n=8, max_tokens=256),
            engine=EngineConfig(max_model_len=1024, kv_cache_gib=kv_cache_gib),
            tensor_parallel_degree=generator_tp,
        ),
        trainer=Trainer.Config(
            optimizer=OptimizerConfig(lr=1e-6),
            lr_scheduler=constant_lr(warmup_steps=10),
            parallelism=Parallelism(data_parallel_shard_degree=shard, tensor_parallel_degree=tp),
            tokens_per_microbatch=4096,
            activation_checkpoint="full" if recompute else "none",
        ),
        evaluation=EvaluationConfig(every=20, prompts=256),
    )

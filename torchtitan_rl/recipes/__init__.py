"""Built-in recipes: functions that return a RunConfig, always there beside the user's own.

`torchtitan-rl train --config <name>` runs one; any field can be overridden from the command line.
"""

from torchtitan_rl.recipes.qwen3 import (
    grpo_sum_digits_qwen3_0_6b,
    grpo_sum_digits_qwen3_1_7b,
    grpo_sum_digits_qwen3_14b,
)
from torchtitan_rl.recipes.smollm2 import (
    grpo_jsonl,
    grpo_largest_number_smollm2_135m,
    grpo_sum_digits_smollm2_135m,
)
from torchtitan_rl.recipes.tiny import (
    dppo_sum_digits_async_tiny,
    echo_calculator_tiny,
    grpo_sum_digits_moe_tiny,
    grpo_sum_digits_tiny,
)

__all__ = [
    "dppo_sum_digits_async_tiny",
    "echo_calculator_tiny",
    "grpo_jsonl",
    "grpo_largest_number_smollm2_135m",
    "grpo_sum_digits_moe_tiny",
    "grpo_sum_digits_qwen3_0_6b",
    "grpo_sum_digits_qwen3_1_7b",
    "grpo_sum_digits_qwen3_14b",
    "grpo_sum_digits_smollm2_135m",
    "grpo_sum_digits_tiny",
]

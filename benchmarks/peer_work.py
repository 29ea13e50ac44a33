"""What both sides of peer_trl.py are given, and what it costs. Plain Python: TRL's virtual
environment imports it too, and has nothing of this library."""

import json
import random
import statistics
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

WARM_UP = 1
"""Steps that are not counted: caches fill, and the optimizer makes its state."""
QUESTION = "What is the sum of the digits of {}?"
"""That of the recipe `grpo_sum_digits_smollm2_135m`; what stands around it is the model's own chat
template's, of SmolLM2 also a system message of 20 tokens."""


@dataclass(kw_only=True)
class Work:
    """Some steps of GRPO on one model."""

    model: str
    """HF folder, whose model never ends a completion: see `endless`."""
    steps: int
    """Counted ones, after the warm-up."""
    prompts: int = 8
    """Of a step."""
    samples: int = 8
    """Of a prompt."""
    new_tokens: int = 32
    """Of a sample: all have this many."""
    lr: float = 1e-5

    @property
    def all_steps(self) -> int:
        return WARM_UP + self.steps

    def messages(self, index: int) -> list[dict[str, str]]:
        """Prompt `index`, one of `prompts * all_steps`."""
        number = random.Random(index).randint(100, 999)
        return [{"role": "user", "content": QUESTION.format(number)}]

    def save(self, file: Path) -> Path:
        file.write_text(json.dumps(asdict(self)))
        return file

    @classmethod
    def load(cls, file: str) -> "Work":
        return cls(**json.loads(Path(file).read_text()))


def reward(text: str) -> float:
    """Differs from sample to sample, so that every group trains, and costs nothing."""
    return zlib.crc32(text.encode()) / 2**32


def endless(source: Path, target: Path) -> Path:
    """The HF folder `source` with an end-of-turn token that the model has no logit for.

    So all completions have all their tokens, in both libraries, and neither is slowed down by a
    setting that forbids the end.
    """
    target.mkdir(parents=True)
    for file in source.iterdir():
        (target / file.name).symlink_to(file.resolve())
    config = _read(source / "config.json")
    tokenizer = _read(source / "tokenizer.json")
    end = 1 + max(
        config["vocab_size"] - 1,
        *tokenizer["model"]["vocab"].values(),
        *(token["id"] for token in tokenizer["added_tokens"]),
    )
    token = {**tokenizer["added_tokens"][0], "id": end, "content": "<|never|>", "special": True}
    tokenizer["added_tokens"].append(token)
    names = _read(source / "tokenizer_config.json") | {"eos_token": "<|never|>"}
    generation = _read(source / "generation_config.json") | {"eos_token_id": end}
    for name, content in (
        ("config.json", config | {"eos_token_id": end}),
        ("generation_config.json", generation),
        ("tokenizer.json", tokenizer),
        ("tokenizer_config.json", names),
    ):
        (target / name).unlink()
        (target / name).write_text(json.dumps(content))
    return target


def speedups(runs: list[tuple[str, list[float]]], side: str) -> list[float]:
    """How much faster the runs before and after each run of a side were, by the medians of their
    seconds per step.

    Example:
        >>> speedups([("ours", [1.0]), ("TRL", [4.0]), ("ours", [3.0])], "TRL")
        [2.0]
    """
    return [
        statistics.median(runs[i][1]) / statistics.median(runs[i - 1][1] + runs[i + 1][1])
        for i, (name, _) in enumerate(runs)
        if name == side
    ]


def _read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text())


def step_flops(config: dict[str, Any], prompt_tokens: list[int], new_tokens: int) -> float:
    """Floating-point operations that a step of GRPO needs: for each sample, one forward pass over
    its tokens to generate them, one to train on them, and a backward pass of twice that.

    A forward pass takes 2 for each weight and token, where the last token of a sample need not
    be processed and the output layer is needed where a token is sampled only; and 4 x heads x
    head_dim in each layer for each pair of a token and one that it attends to. `prompt_tokens` has
    an entry for each sample: a prompt counts as often as it has samples. Whoever computes it once
    for all of them does less arithmetic than is counted here.
    """
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    heads, head_dim = config["num_attention_heads"], config["head_dim"]
    attention = hidden * head_dim * (2 * heads + 2 * config["num_key_value_heads"])
    weights = layers * (attention + 3 * hidden * config["intermediate_size"])
    output = hidden * config["vocab_size"]
    total = 0.0
    for prompt in prompt_tokens:
        tokens = prompt + new_tokens - 1
        pairs = tokens * (tokens + 1) // 2
        total += 2 * weights * tokens + 2 * output * new_tokens
        total += 4 * heads * head_dim * layers * pairs
    return 4 * total

"""Training steps of a 135M-parameter Llama on packed rows, against rows padded to the longest.

Both sides train the same episodes with the same model, budget of tokens and optimizer; the padded
side takes them in the order they come, as many rows to a microbatch as the budget holds. Sharing
prompts is measured against packing without it, on groups of 8 with prompts as long as answers.
Model FLOPs count every token's layers, the head where a token trains, and the pairs that attention
sees, three times for forward and backward; the peak is that of a large GEMM in the same run.
"""

import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from common import note, report

from torchtitan_rl.batching.grid import Grid, make_grid
from torchtitan_rl.config import Parallelism
from torchtitan_rl.core.types import Episode
from torchtitan_rl.models.head import Chosen
from torchtitan_rl.platform import worker_env

LLAMA_135M = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
}
BUDGET = 4096
ROUNDS = 2
"""Sides take turns; the best of each counts, because what disturbs them only ever slows down."""


def episodes_of(lengths: Sequence[tuple[int, int]], *, samples: int = 1) -> list[Episode]:
    """Episodes with prompts and completions of these lengths; `samples` in a row share a prompt."""
    rng = random.Random(0)
    made: list[Episode] = []
    for number, (prompt, completion) in enumerate(lengths):
        prompt_ids = [rng.randrange(49152) for _ in range(prompt)]
        if number % samples:
            prompt_ids = made[-1].prompt_token_ids
        made.append(
            Episode(
                policy_version=0,
                prompt_token_ids=prompt_ids,
                token_ids=[rng.randrange(49152) for _ in range(completion)],
                token_logprobs=[-10.0] * completion,
                reward=0.0,
                advantage=rng.gauss(0, 1),
                task="bench",
                group_id=str(number // samples),
            )
        )
    return made


def realistic_lengths(count: int) -> list[tuple[int, int]]:
    """Prompts of tens to hundreds of tokens; completions with a long tail, as rollouts have."""
    rng = random.Random(1)

    def draw(median: float, spread: float, most: int) -> int:
        return max(8, min(round(rng.lognormvariate(math.log(median), spread)), most))

    return [(draw(64, 0.5, 256), draw(96, 0.9, 1024)) for _ in range(count)]


class Bench:
    """A model, its optimizer, and steps on packed and on padded microbatches."""

    def __init__(self, folder: Path) -> None:
        from torchtitan_rl.models.rank import ModelRank

        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0"}
        os.environ |= {"WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        (folder / "config.json").write_text(json.dumps(LLAMA_135M))
        self.rank = ModelRank(str(folder), Parallelism(), dtype="float32", seed=0)
        parameters = list(self.rank.model.parameters())
        self.optimizer = torch.optim.AdamW(parameters, lr=1e-6, fused=True)
        head = LLAMA_135M["vocab_size"] * LLAMA_135M["hidden_size"]
        self.layer_parameters = sum(p.numel() for p in parameters) - head
        self.head_parameters = head

    def step(self, losses: Sequence[Callable[[], torch.Tensor]]) -> float:
        """Seconds of one training step."""
        started = time.perf_counter()
        for loss in losses:
            loss().backward()
        self.rank.clip_gradients(1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - started

    def packed(self, grid: Grid) -> list[Callable[[], torch.Tensor]]:
        def loss(cell) -> torch.Tensor:
            predicted = self.rank.predict(cell)
            return -(predicted.logprobs * predicted.streams["advantage"]).sum()

        return [lambda cell=row[0]: loss(cell) for row in grid.cells]

    def padded(self, episodes: Sequence[Episode]) -> list[Callable[[], torch.Tensor]]:
        batches: list[list[Episode]] = [[]]
        for episode in episodes:
            longest = max(e.length for e in [*batches[-1], episode])
            if batches[-1] and longest * (len(batches[-1]) + 1) > BUDGET:
                batches.append([])
            batches[-1].append(episode)

        def loss(batch: list[Episode]) -> torch.Tensor:
            length = max(e.length for e in batch)
            tokens = torch.zeros(len(batch), length, dtype=torch.int64)
            trains = torch.zeros(len(batch), length, dtype=torch.bool)
            for row, e in enumerate(batch):
                tokens[row, : e.length] = torch.tensor(e.prompt_token_ids + e.token_ids)
                trains[row, len(e.prompt_token_ids) : e.length] = True
            chosen = trains.flatten().nonzero().squeeze(-1)
            targets = tokens.flatten()[chosen]
            self.rank.head.chosen = Chosen(chosen - 1, targets, torch.ones(len(chosen)))
            positions = torch.arange(length).expand(len(batch), length)
            logprobs, _ = self.rank.model(tokens, positions)
            advantages = torch.tensor([e.advantage for e in batch for _ in e.token_ids])
            return -(logprobs * advantages).sum()

        return [lambda batch=batch: loss(batch) for batch in batches]

    def model_flops(self, grid: Grid) -> float:
        documents = [d for row in grid.cells for cell in row for d in cell.documents]
        tokens, visible = sum(d.tokens for d in documents), sum(d.visible for d in documents)
        attention = 4 * visible * LLAMA_135M["hidden_size"] * LLAMA_135M["num_hidden_layers"]
        layers = 2 * self.layer_parameters * tokens
        return 3.0 * (layers + attention + 2 * self.head_parameters * grid.loss_tokens)


def gemm_peak() -> float:
    """FLOP/s of the best of a few large products."""
    left, right = torch.randn(2048, 2048), torch.randn(2048, 2048)
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        left @ right
        seconds.append(time.perf_counter() - started)
    return 2 * 2048**3 / min(seconds)


def grid_of(episodes: Sequence[Episode], *, share_prompts: bool = False) -> Grid:
    return make_grid(
        episodes,
        dp_degree=1,
        tokens_per_microbatch=BUDGET,
        share_prompts=share_prompts,
        hidden_size=576,
    )


def main() -> None:
    many = episodes_of(realistic_lengths(4096))
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        grid = make_grid(many, dp_degree=8, tokens_per_microbatch=16384, hidden_size=576)
        seconds.append(time.perf_counter() - started)
    report("packing", "grid_seconds_4096", "4096 episodes", statistics.median(seconds))
    report("packing", "padding_share", "4096 episodes, 8 ranks", grid.padding_share)

    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
    bench.step(bench.packed(grid_of(episodes_of([(32, 32)] * 2))))  # warm up

    episodes = episodes_of(realistic_lengths(32))
    grid, tokens = grid_of(episodes), sum(e.length for e in episodes)
    packed = padded = math.inf
    peak = gemm_peak()
    for _ in range(ROUNDS):
        packed = min(packed, bench.step(bench.packed(grid)))
        padded = min(padded, bench.step(bench.padded(episodes)))
        peak = max(peak, gemm_peak())
    note(
        f"  {tokens} tokens: packed {packed:.1f} s, padded {padded:.1f} s; {peak / 1e9:.0f} GFLOP/s"
    )
    report("packing", "packed_vs_padded", "32 episodes", padded / packed)
    report("packing", "train_mfu", "32 episodes", bench.model_flops(grid) / packed / peak)

    groups = episodes_of([(128, 128)] * 16, samples=8)
    alone = shared = math.inf
    for _ in range(ROUNDS):
        alone = min(alone, bench.step(bench.packed(grid_of(groups))))
        shared = min(shared, bench.step(bench.packed(grid_of(groups, share_prompts=True))))
    note(f"  two groups of 8: {alone:.1f} s, sharing {shared:.1f} s")
    report("packing", "prompt_sharing_gain", "2 groups of 8", alone / shared)


if __name__ == "__main__":
    env = worker_env(0, role="trainer")
    if any(os.environ.get(name) != value for name, value in env.items()):
        # A process whose allocator and threads are set up as a trainer's; both are read once.
        os.execve(sys.executable, [sys.executable, __file__], {**os.environ, **env})
    main()

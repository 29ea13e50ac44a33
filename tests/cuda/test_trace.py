"""The trainer's own update at 8, 64 and 512 ranks, on fake tensors: shards, dtypes, kernels,
collectives and their sizes."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

from torchtitan_rl.config import LossConfig, Parallelism, RunConfig
from torchtitan_rl.models.archs.registry import SHAPES
from torchtitan_rl.models.makers.tiny import write_tiny_model
from torchtitan_rl.models.trace import Collective, Work
from torchtitan_rl.recipes import registry
from torchtitan_rl.run.plan import write_shape
from torchtitan_rl.run.traced import Lengths, TracedTrainer, full_row, repeated, traced_trainer

LENGTHS = Lengths(prompt=24, completion=40)
TOKENS = 256
"""Tokens of a microbatch: four episodes."""


def recipe(parallelism: Parallelism, **trainer: object) -> RunConfig:
    """The 14B recipe with small microbatches and its own settings changed."""
    config = registry.build_recipe("grpo_sum_digits_qwen3_14b", registry.built_in_recipes())
    engine = replace(config.generator.engine, max_model_len=64)
    sampling = replace(config.generator.sampling, max_tokens=40)
    settings = {"tokens_per_microbatch": TOKENS, "activation_checkpoint": "none", **trainer}
    return replace(
        config,
        prompts_per_step=256,
        generator=replace(config.generator, engine=engine, sampling=sampling),
        trainer=replace(config.trainer, parallelism=parallelism, **settings),
    )


@dataclass
class Done:
    """What is left of a traced update."""

    trainer: TracedTrainer
    work: dict[str, Work]
    shapes: dict[str, tuple[torch.Size, torch.Size, torch.dtype]]
    """Whole shape, this rank's shape, and dtype of each weight."""
    states: list[tuple[torch.Size, torch.dtype]]
    """Shape and dtype of what the optimizer keeps of each weight."""

    def calls(self, phase: str, name: str) -> list[Collective]:
        return [c for c in self.work[phase].collectives if c.name == name]


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@contextmanager
def traced(folder: Path | str, parallelism: Parallelism, **settings: object) -> Iterator[Done]:
    """Two microbatches and an optimizer step of a rank in the middle of the mesh."""
    config = recipe(parallelism, **settings)
    rank = parallelism.world_size // 2
    row = full_row(config, str(folder), LENGTHS)
    assert row.tokens == TOKENS
    with traced_trainer(config, str(folder), device="cuda", rank=rank) as trainer:
        with trainer.trace:
            own = trainer.rank.dp_rank
            trainer.update(repeated(row, 2, parallelism.dp_degree, dp_rank=own))
        yield Done(
            trainer,
            dict(trainer.trace.seen.work),
            {
                name: (p.shape, local(p).shape, p.dtype)
                for name, p in trainer.model.named_parameters()
            },
            [(local(s).shape, s.dtype) for s in trainer.optimizer_states() if s.dim()],
        )


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny", seed=0, weights=False)


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("moe") / "moe"
    return write_tiny_model(folder, seed=0, weights=False, experts=8)


FORWARD = "torch_attn._varlen_attn"
BACKWARD = "torch_attn._varlen_attn_backward"
LAYERS = 3


def rows_of(whole: int, ranks: int, rank: int) -> int:
    """Rows of a shard, as `torch.chunk` cuts them."""
    each = -(-whole // ranks)
    return max(0, min(each, whole - rank * each))


@pytest.mark.parametrize("ranks", [8, 64])
def test_fsdp_shards_masters_and_computes_in_bfloat16(tiny, ranks):
    with traced(tiny, Parallelism(data_parallel_shard_degree=ranks)) as done:
        for name, (whole, own, dtype) in done.shapes.items():
            assert dtype == torch.float32, name
            assert own == (rows_of(whole[0], ranks, ranks // 2), *whole[1:]), name
        shards = Counter(own for _, own, _ in done.shapes.values())
        assert Counter(shape for shape, _ in done.states) == {s: 2 * n for s, n in shards.items()}
        assert {dtype for _, dtype in done.states} == {torch.float32}
        for phase in ("pass 1", "pass 2"):
            operations = done.work[phase].operations
            assert operations[FORWARD] == operations[BACKWARD] == LAYERS
            assert not any("for_cpu" in name for name in operations)
            gathers = Counter(c.nbytes for c in done.calls(phase, "_allgather_base_"))
            scatters = Counter(c.nbytes for c in done.calls(phase, "_reduce_scatter_base_"))
            padded = sum(
                -(-whole[0] // ranks) * ranks * whole[1:].numel()
                for name, (whole, _, _) in done.shapes.items()
                if name.startswith("layers.1.")
            )
            # Gathered in both passes in bfloat16; gradients are summed in fp32.
            assert gathers[2 * padded] == 2 * LAYERS, (gathers, padded)
            assert scatters[4 * padded] == LAYERS, (scatters, padded)
        assert all(p.grad is None for p in done.trainer.model.parameters())


def test_tensor_parallel_ranks_share_each_layer(tiny):
    mesh = Parallelism(data_parallel_shard_degree=32, tensor_parallel_degree=2)
    with traced(tiny, mesh) as done:
        whole, own, _ = done.shapes["layers.0.feed_forward.w2.weight"]
        assert whole == (128, 384)
        assert own == (4, 192)  # columns by tensor parallelism, then rows by FSDP
        rank, dim = 32, 128
        partner = (rank, rank + 1)
        sums = [c for c in done.calls("pass 1", "all_reduce") if c.ranks == partner]
        # After attention and after the feed-forward network of each layer, in bfloat16.
        sizes = Counter(c.nbytes for c in sums)
        assert sizes[TOKENS * dim * 2] >= 2 * LAYERS, sizes
        # The vocabulary's shards meet in the log-softmax: three numbers a token in fp32.
        trained = 4 * LENGTHS.completion
        meetings = {c.nbytes for c in done.calls("pass 1", "allreduce_") if c.ranks == partner}
        assert {4 * trained, 3 * 4 * trained} <= meetings
        gathers = {c.ranks for c in done.calls("pass 1", "_allgather_base_")}
        assert gathers == {tuple(range(0, 64, 2))}


def test_replicas_add_up_their_shards(tiny):
    mesh = Parallelism(data_parallel_replicate_degree=2, data_parallel_shard_degree=32)
    with traced(tiny, mesh) as done:
        rank = 32  # the first of the second replica
        gathers = {c.ranks for c in done.calls("pass 2", "_allgather_base_")}
        assert gathers == {tuple(range(32, 64))}
        [replicas] = {c.ranks for c in done.calls("pass 2", "allreduce_")}
        assert replicas == (0, rank)
        scattered = sum(c.nbytes for c in done.calls("pass 2", "_reduce_scatter_base_"))
        reduced = sum(c.nbytes for c in done.calls("pass 2", "allreduce_"))
        assert reduced * 32 == scattered
        assert not done.calls("pass 1", "allreduce_")  # they wait for the last microbatch


def test_experts_are_grouped_and_sharded(moe):
    with traced(moe, Parallelism(data_parallel_shard_degree=8)) as done:
        experts = {n: s for n, s in done.shapes.items() if "w1_EFD" in n}
        assert len(experts) == LAYERS - 1
        for whole, own, dtype in experts.values():
            assert whole == (8, 96, 128)
            assert own == (1, 96, 128)
            assert dtype == torch.float32
        # Three matrices a layer; each has two products in the backward pass.
        calls = done.work["pass 1"].operations["aten._grouped_mm"]
        assert calls == 3 * 3 * (LAYERS - 1)
        # Two of eight experts for each token: rows twice, of 128 by 96, three matrices.
        product = 2 * (2 * TOKENS) * 128 * 96
        assert done.work["pass 1"].flops["aten._grouped_mm"] == calls * product


def test_activation_checkpointing_recomputes_and_takes_less(tiny):
    peaks = {}
    for kind in ("none", "auto", "full"):
        mesh = Parallelism(data_parallel_shard_degree=8)
        with traced(tiny, mesh, activation_checkpoint=kind) as done:
            operations = done.work["pass 1"].operations
            assert operations[FORWARD] == LAYERS * (2 if kind == "full" else 1)
            assert operations[BACKWARD] == LAYERS
            peaks[kind] = done.trainer.trace.seen.peak(["pass 1", "pass 2"])["activations"]
    assert peaks["full"] < peaks["auto"] < peaks["none"]  # by default it is selective
    assert peaks["full"] < 0.7 * peaks["none"]


def test_gradients_can_wait_for_the_last_microbatch(tiny):
    mesh = Parallelism(data_parallel_shard_degree=8)
    with traced(tiny, mesh, gradient_sync="last_microbatch") as done:
        assert not done.calls("pass 1", "_reduce_scatter_base_")
        assert len(done.calls("pass 2", "_reduce_scatter_base_")) > LAYERS


def test_experts_on_ranks_of_their_own(moe):
    mesh = Parallelism(data_parallel_shard_degree=8, expert_parallel_degree=4)
    with traced(moe, mesh) as done:
        for name, (whole, own, _) in done.shapes.items():
            if "w1_EFD" in name:
                assert own.numel() * 8 == whole.numel()
        exchanges = done.calls("pass 1", "all_to_all_single")
        assert {c.ranks for c in exchanges} == {(4, 5, 6, 7)}
        # Rows go to their experts and come back, forward and backward.
        rows = [c for c in exchanges if c.nbytes >= 2 * TOKENS * 128 * 2]
        assert len(rows) == 4 * (LAYERS - 1)


def test_losses_of_every_kind_are_traced(tiny):
    mesh = Parallelism(data_parallel_shard_degree=8)
    for name in ("dppo", "gspo"):
        with traced(tiny, mesh, loss=LossConfig(name=name)) as done:
            assert done.work["optimizer"].operations["aten._fused_adamw_"] >= 1


def test_512_ranks_of_14b(tmp_path):
    layers = 4
    shape = SHAPES["Qwen3-14B"] | {"num_hidden_layers": layers}
    folder = write_shape(shape, tmp_path, "Qwen3-14B")
    mesh = Parallelism(
        data_parallel_replicate_degree=4,
        data_parallel_shard_degree=64,
        tensor_parallel_degree=2,
    )
    with traced(folder, mesh, activation_checkpoint="full") as done:
        whole, own, _ = done.shapes["lm_head.weight"]
        assert whole == (151936, 5120)
        assert own == (1187, 5120)
        published = done.trainer.weights.numel
        weights = sum(whole.numel() for whole, _, _ in done.shapes.values())
        assert published == 0  # rank 256 is of the third replica: the first publishes
        assert weights == 2 * 151936 * 5120 + 5120 + layers * LAYER_OF_14B
        held = done.trainer.rank.weight_bytes
        assert held == pytest.approx(4 * weights / 128, rel=0.01)
        assert done.trainer.rank.gradient_bytes == pytest.approx(held, rel=0.01)
        assert done.work["pass 1"].operations[FORWARD] == 2 * layers
        groups = {c.ranks for c in done.calls("pass 1", "_allgather_base_")}
        assert groups == {tuple(range(256, 384, 2))}
        # Six operations for each weight and token, two more to recompute a layer's; of the two
        # halves of tensor parallelism one.
        linear = sum(done.work["pass 1"].flops.values()) - done.work["pass 1"].attention_flops
        head = 2 * 151936 * 5120 * 4 * LENGTHS.completion * 4  # logits are made twice
        expected = (8 * TOKENS * layers * LAYER_OF_14B + head) / 2
        # DTensor gathers the heads of both, and each computes the whole gradient of wo.
        expected += TOKENS * layers * 40 * 128 * 5120
        assert linear == pytest.approx(expected, rel=0.001)


LAYER_OF_14B = 5120 * 128 * (40 + 8 + 8) + 40 * 128 * 5120 + 3 * 5120 * 17408 + 2 * 5120 + 2 * 128
"""Values of a layer: queries, keys and values, output, feed-forward, norms."""

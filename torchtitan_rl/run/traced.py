"""The actors of a run traced: what one rank of the trainer, and of a generator, would compute."""

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torchtitan.models.common.attention import GQAttention

from torchtitan_rl.actors.trainer import Trainer
from torchtitan_rl.algorithms.objective import episode_needs
from torchtitan_rl.batching.grid import RankCells, make_grid, weighed_grid
from torchtitan_rl.batching.microbatch import Microbatch
from torchtitan_rl.config import RunConfig
from torchtitan_rl.config.parallelism import Parallelism
from torchtitan_rl.config.trainer import TrainerConfig
from torchtitan_rl.core.types import Episode
from torchtitan_rl.models.hf import head_size, read_hf_config
from torchtitan_rl.models.trace import Collective, Kind, Seen, Trace, TracedRank, Work, fake_group
from torchtitan_rl.platform import DeviceType, assume_device


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of a rollout, on average."""

    prompt: int
    completion: int

    @property
    def total(self) -> int:
        return self.prompt + self.completion


@dataclass(slots=True)
class TrainerTrace:
    """What one rank of the trainer does in a step."""

    seen: Seen
    """Everything that was traced: an update of `traced` microbatches."""
    kept: dict[Kind, int]
    """Bytes of the weights and the optimizer's states, which stay from step to step, and of the
    gradients."""
    row_tokens: int
    """Tokens of a full microbatch."""
    tokens: float
    """Tokens of this rank in one update."""
    microbatches: int
    """Microbatches of this rank in one update."""
    traced: int
    """Microbatches that were traced; the rest are like the first of them."""
    updates: int
    """Optimizer steps in a step."""
    published: int
    """Values that this rank publishes."""
    parameters: int
    """Values of the whole model."""

    @property
    def passes(self) -> Counter[Kind]:
        """Bytes by kind at the fullest moment of forward and backward passes, of any step but the
        first: then the optimizer has its states. All microbatches but the first find gradients."""
        phases = [f"pass {number}" for number in range(1, self.traced + 1)]
        held: dict[Kind, int] = {"optimizer": self.kept["optimizer"]}
        if self.traced < min(self.microbatches, 2):
            held["gradients"] = self.kept["gradients"]
        return self.seen.peak(phases, held=held)

    @property
    def stepping(self) -> Counter[Kind]:
        """Bytes by kind at the fullest moment of the optimizer's step."""
        return self.seen.peak(["optimizer"])

    @property
    def peak(self) -> Counter[Kind]:
        """Bytes by kind at the fullest moment of a step."""
        return max(self.passes, self.stepping, key=lambda kinds: sum(kinds.values()))

    def parts(self) -> Iterator[tuple[Work, float, float]]:
        """Each traced part of a step: what is done, how often, and how often for a full row: the
        last microbatch may be shorter."""
        work, last = self.seen.work, f"pass {self.traced}"
        fullness = self.tokens / (self.microbatches * self.row_tokens)
        # All passes but the last are like the first.
        times = {"pass 1": self.microbatches - 1, last: 1}
        if self.traced == 1:
            times = {last: self.microbatches}
        for phase, count in times.items():
            yield work[phase], self.updates * count, self.updates * count * fullness
        yield work["optimizer"], self.updates, self.updates
        if self.updates > 1:
            count = (self.updates - 1) * self.microbatches
            yield work["inference"], count, count * fullness

    @property
    def flops(self) -> float:
        """Floating-point operations of a step."""
        return sum(rows * sum(work.flops.values()) for work, _, rows in self.parts())

    @property
    def attention_flops(self) -> float:
        """The part of `flops` that is attention."""
        return sum(rows * work.attention_flops for work, _, rows in self.parts())

    @property
    def moved_bytes(self) -> float:
        """Bytes that the operations of a step read and write."""
        return sum(rows * work.moved_bytes for work, _, rows in self.parts())

    def collectives(self) -> Iterator[tuple[Collective, float]]:
        """Collectives of a step, each with how often it is called."""
        for work, times, _ in self.parts():
            yield from ((collective, times) for collective in work.collectives)


@dataclass(slots=True)
class GeneratorTrace:
    """What one worker of a generator has and does."""

    weights: int
    """Bytes of its share of the weights."""
    activations: int
    """Most bytes beside weights and KV cache, in a full prefill or with most sequences."""
    head: int
    """Bytes of its share of the output layer's weight."""
    kv_bytes_per_token: int
    sequences: int
    """Most sequences side by side that the settings allow and the step has."""
    token_flops: float
    """Floating-point operations for each token, without attention and logits."""
    logit_flops: float
    """Floating-point operations for the logits of a token."""
    pair_flops: float
    """Floating-point operations for each pair of a token and one that it may attend to."""
    collectives: list[Collective]
    """Collectives of a prefill of `prefill_tokens`."""
    prefill_tokens: int


@dataclass(slots=True)
class Traces:
    """The actors of a run traced, for any number of plans of it."""

    lengths: Lengths
    trainer: TrainerTrace
    generator: GeneratorTrace
    reference: dict[Kind, int]
    """Bytes by kind; empty: the run has no reference."""
    element: int
    """Bytes of a published value."""
    kv_heads: int
    seconds: float
    """How long it took to trace them."""


# ---- the trainer --------------------------------------------------------------------------------


def trace_trainer(
    config: RunConfig, folder: str, lengths: Lengths, *, device: DeviceType, rank: int = 0
) -> TrainerTrace:
    """Trace an optimizer step of one rank: its first microbatch and one more, as full as the
    trainer packs episodes of these lengths."""
    settings = config.trainer
    degree = settings.parallelism.dp_degree
    row = full_row(config, folder, lengths)
    # Tokens of this rank in one update, and the microbatches that they fill.
    tokens = tokens_per_step(config, lengths) / degree / settings.updates_per_step
    microbatches = max(1, math.ceil(tokens / row.tokens))
    traced = min(microbatches, _microbatches_to_trace(settings))
    with traced_trainer(config, folder, device=device, rank=rank) as trainer:
        trace, own = trainer.trace, trainer.rank
        with trace:
            if settings.updates_per_step > 1:
                own.logprobs(row)
            trainer.update(repeated(row, traced, degree, dp_rank=own.dp_rank))
            states = trace.label(trainer.optimizer_states(), "optimizer")
        return TrainerTrace(
            seen=trace.seen,
            kept={
                "weights": own.weight_bytes,
                "gradients": own.gradient_bytes,
                "optimizer": states,
            },
            row_tokens=row.tokens,
            tokens=tokens,
            microbatches=microbatches,
            traced=traced,
            updates=settings.updates_per_step,
            published=trainer.weights.numel,
            parameters=sum(parameter.numel() for parameter in own.model.parameters()),
        )


def _microbatches_to_trace(settings: TrainerConfig) -> int:
    """One if the first is like all others, as where ranks add up its gradients as they come; else
    two: the last is another, or gradients are made twice."""
    degrees = settings.parallelism
    sums = settings.gradient_sync == "every_microbatch"
    sharded = degrees.data_parallel_shard_degree > 1 and degrees.data_parallel_replicate_degree == 1
    return 1 if sums and sharded else 2


class TracedTrainer(Trainer):
    """The trainer as an object of this process: no endpoint of it is called."""

    rank: TracedRank
    trace: Trace

    @classmethod
    def of(cls, config: RunConfig, folder: str) -> "TracedTrainer":
        """The trainer of a run, without a model as yet."""
        return cls(
            config.trainer,
            model=folder,
            steps=config.steps,
            checkpoint_folder="",
            tokens_folder="",
            weights_folder="",
            keep=0,
            async_mode="disabled",
            seed=config.seed,
        )


@contextmanager
def traced_trainer(
    config: RunConfig, folder: str, *, device: DeviceType, rank: int = 0
) -> Iterator[TracedTrainer]:
    """A rank of the trainer on fake tensors, for `update` in the block and in its trace."""
    settings = config.trainer
    with fake_group(settings.parallelism.world_size, rank=rank), assume_device(device):
        trainer = TracedTrainer.of(config, folder)
        trainer.trace = Trace()
        own = TracedRank(
            trainer.trace,
            folder,
            settings.parallelism,
            dtype=settings.dtype,
            seed=config.seed,
            activation_checkpoint=settings.activation_checkpoint,
        )
        trainer.build(own)
        yield trainer


def tokens_per_step(config: RunConfig, lengths: Lengths) -> int:
    """Tokens that the trainer computes in a step, over all ranks."""
    prompts, n = config.prompts_per_step, config.samples_per_prompt
    copies = 1 if config.trainer.share_prompts else n
    return prompts * (copies * lengths.prompt + n * lengths.completion)


def full_row(config: RunConfig, folder: str, lengths: Lengths) -> Microbatch:
    """A microbatch as full as the trainer makes it of a step's episodes of these lengths."""
    settings, n = config.trainer, config.samples_per_prompt
    budget = settings.tokens_per_microbatch
    most = max(1, config.prompts_per_step * n // settings.parallelism.dp_degree)
    each = lengths.total
    if each > budget:
        raise ValueError(
            f"an episode of {each} tokens (--prompt_tokens {lengths.prompt}, --completion_tokens "
            f"{lengths.completion}) does not fit trainer.tokens_per_microbatch ({budget}): raise "
            "that, or lower these"
        )
    shares = settings.share_prompts
    if shares:  # whole groups, or of a larger one the part that fits
        group = lengths.prompt + n * lengths.completion
        count = n * max(1, min(budget // group, most // n))
    else:
        count = min(most, budget // each)
    episodes = [_episode(config, lengths, number // n) for number in range(count)]
    rest = budget - count * each
    if not shares and count < most and rest > 1:
        # Real episodes differ in length, so that some fill what is left.
        shorter = Lengths(min(lengths.prompt, rest - 1), max(1, rest - lengths.prompt))
        episodes.append(_episode(config, shorter, count))
    grid = weighed_grid(
        episodes,
        config=replace(settings, parallelism=Parallelism()),
        hidden_size=read_hf_config(folder)["hidden_size"],
        fixed_length=config.generator.engine.max_model_len,
    )
    return max((cells[0] for cells in grid.cells), key=lambda cell: cell.tokens)


def _episode(config: RunConfig, lengths: Lengths, group: int) -> Episode:
    """An episode with what the loss needs of one."""
    values, needs = [-1.0] * lengths.completion, episode_needs(config.trainer)
    return Episode(
        policy_version=0,
        prompt_token_ids=[1] * lengths.prompt,
        token_ids=[1] * lengths.completion,
        reward=1.0,
        advantage=1.0,
        task="plan",
        group_id=f"plan/{group}",
        token_logprobs=values if "token_logprobs" in needs else None,
        ref_logprobs=values if "ref_logprobs" in needs else None,
        token_versions=[0] * lengths.completion,
    )


def repeated(row: Microbatch, count: int, degree: int, *, dp_rank: int = 0) -> RankCells:
    """The cells of a rank, of a grid in which every rank has this row that many times."""
    trained = int(row.streams["loss_mask"].sum())
    return RankCells([row] * count, dp_rank, loss_tokens=trained * count * degree, echo_tokens=0)


def trace_reference(
    config: RunConfig, folder: str, lengths: Lengths, *, device: DeviceType
) -> Counter[Kind]:
    """Bytes by kind of one rank of the reference model, in a full microbatch."""
    settings = config.trainer.reference
    with fake_group(settings.parallelism.world_size), assume_device(device):
        trace = Trace()
        own = TracedRank(trace, folder, settings.parallelism, dtype=settings.dtype, seed=0)
        with trace:
            own.logprobs(full_row(config, folder, lengths))
        return trace.seen.peak(["inference"])


# ---- a generator --------------------------------------------------------------------------------


def trace_generator(
    config: RunConfig, folder: str, lengths: Lengths, *, device: DeviceType
) -> GeneratorTrace:
    """Trace one worker of a generator: torchtitan's model with weights in the engine's dtype, in
    the fullest prefill; and vLLM's sampling for all sequences that are decoded side by side."""
    engine, degree = config.generator.engine, config.generator.tensor_parallel_degree
    own_prompts = -(-config.prompts_per_step // config.generator.replicas)
    sequences = min(engine.max_num_seqs, own_prompts * config.samples_per_prompt)
    # Samples of a prompt have its full blocks from the prefix cache, but for the last token's.
    rest = lengths.prompt - (lengths.prompt - 1) // engine.block_size * engine.block_size
    prefilled = own_prompts * (lengths.prompt + (config.samples_per_prompt - 1) * rest)
    prefilled = min(prefilled, engine.max_num_batched_tokens)
    prompts = max(1, prefilled // lengths.prompt)
    with fake_group(degree), assume_device(device):
        trace = Trace()
        own = TracedRank(
            trace,
            folder,
            Parallelism(tensor_parallel_degree=degree),
            dtype=engine.dtype,
            seed=0,
            inference=True,
        )
        kv = _kv_sizes(own.model)
        own.head.register_forward_pre_hook(lambda *_: trace.enter("head"))
        own.head.register_forward_hook(lambda *_: trace.enter("inference"))
        cell = _cell(config, Lengths(lengths.prompt, 1), prompts)
        with trace, torch.no_grad(), own.replaying(cell, on=False):
            own.predict(cell)
            _sample(torch.empty(sequences, own.head.out_features))
    peak = trace.seen.peak(["inference", "head"])
    work, head = trace.seen.work["inference"], trace.seen.work["head"]
    linear = sum(work.flops.values()) - work.attention_flops
    hf, weight = read_hf_config(folder), own.head.weight
    # Where the trainer computes rotations, vLLM has a table of all positions, one for all layers.
    table = hf["max_position_embeddings"] * head_size(hf) * weight.element_size()
    return GeneratorTrace(
        weights=own.weight_bytes,
        activations=sum(peak.values()) - own.weight_bytes + table,
        head=weight.numel() * weight.element_size() // degree,
        kv_bytes_per_token=sum(kv),
        sequences=sequences,
        token_flops=linear / cell.tokens,
        logit_flops=sum(head.flops.values()) / prompts,
        pair_flops=work.attention_flops / (prompts * (lengths.prompt + 1) ** 2),
        collectives=work.collectives,
        prefill_tokens=cell.tokens,
    )


def _kv_sizes(model: nn.Module) -> list[int]:
    """Bytes of a token's keys, and of its values, in each layer: a list that the model's next
    forward pass fills."""
    found: list[int] = []

    def note(_: Any, args: tuple, given: dict) -> None:
        for name, place in (("k_BLNH", 1), ("v_BLNH", 2)):
            tensor = given[name] if name in given else args[place]
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            found.append(local[0, 0].numel() * local.element_size())

    for module in model.modules():
        if isinstance(module, GQAttention):
            module.inner_attention.register_forward_pre_hook(note, with_kwargs=True)
    return found


def _sample(logits: torch.Tensor) -> torch.Tensor:
    """Sample as vLLM does, from logits [sequences, vocabulary] in fp32, with their logprobs."""
    logprobs, noise = logits.log_softmax(dim=-1), torch.empty_like(logits).exponential_()
    tokens = logits.softmax(dim=-1).div_(noise).argmax(dim=-1)
    return logprobs.gather(-1, tokens.unsqueeze(-1))


def _cell(config: RunConfig, lengths: Lengths, count: int) -> Microbatch:
    """A row of that many episodes."""
    episodes = [_episode(config, lengths, number) for number in range(count)]
    tokens = lengths.total * count
    return make_grid(episodes, dp_degree=1, tokens_per_microbatch=tokens).cells[0][0]

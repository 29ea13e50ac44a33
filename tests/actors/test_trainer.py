"""The trainer on real gloo ranks: gradients, steps, checkpoints, HF in and out, weight sync.

From `test_metrics_of_two_ranks_merge_to_those_of_one` on, the shared trainers take steps.
"""

import asyncio
import math
import os
import random
import re
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from monarch.actor import ActorError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.pages import run_block
from tests.support import episode, small_engine
from torchtitan_rl.actors.generator import VLLMGenerator
from torchtitan_rl.actors.reference import Reference
from torchtitan_rl.actors.trainer import Trainer
from torchtitan_rl.algorithms.policy_loss import LOSSES
from torchtitan_rl.batching.grid import make_grid
from torchtitan_rl.batching.microbatch import single
from torchtitan_rl.batching.reduction import weigh
from torchtitan_rl.config import (
    CorrectionConfig,
    KLConfig,
    LossConfig,
    OptimizerConfig,
    Parallelism,
    SamplingConfig,
)
from torchtitan_rl.core.errors import noting
from torchtitan_rl.core.metrics import flatten, merge_metrics
from torchtitan_rl.core.types import ScoredCompletion
from torchtitan_rl.models.makers.tiny import write_tiny_model
from torchtitan_rl.observability.json_lines import read_lines
from torchtitan_rl.observability.run_folder import find_checkpoints
from torchtitan_rl.rollout.episodes import make_episodes
from torchtitan_rl.run.launch import describe
from torchtitan_rl.supervision.ranks import call_ranks
from torchtitan_rl.supervision.spawn import (
    SpawnedTrainer,
    per_rank,
    spawn_generator,
    spawn_reference,
    spawn_trainer,
)
from torchtitan_rl.weight_sync.handle import merge_handles
from torchtitan_rl.weight_sync.reading import open_snapshot


def random_episodes(count: int, *, longest: int, seed: int = 0):
    rng = random.Random(seed)
    episodes = []
    for i in range(count):
        new = rng.randint(1, longest)
        episodes.append(
            episode(
                prompt_token_ids=[rng.randrange(250) for _ in range(rng.randint(1, 20))],
                token_ids=[rng.randrange(250) for _ in range(new)],
                token_logprobs=[rng.uniform(-6, -5) for _ in range(new)],
                ref_logprobs=[rng.uniform(-6, -5) for _ in range(new)],
                advantage=rng.gauss(0, 1),
                temperature=rng.choice([0.7, 1.0, 1.3]),
                group_id=str(i),
            )
        )
    return episodes


STUDIED = "tests.actors.studied_trainer:StudiedTrainer"


async def start_trainer(model, folder, ranks, tensor_parallel=1, settings=(), **kwargs):
    config = Trainer.Config(
        **dict(settings),
        optimizer=OptimizerConfig(lr=1e-2),
        parallelism=Parallelism(
            data_parallel_shard_degree=ranks, tensor_parallel_degree=tensor_parallel
        ),
        threads=1,
        export_tokens="tokens_folder" in kwargs,
    )
    return await spawn_trainer(
        config, model=str(model), steps=20, checkpoint_folder=str(folder), **kwargs
    )


@pytest.fixture(scope="module")
def tokens_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tokens")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
async def trainers(tiny_model, checkpoints, tokens_folder):
    """One rank that writes checkpoints beside its steps, two data-parallel ranks that sync
    gradients at the last microbatch, two by two tensor-parallel ranks; started side by side."""
    studied, last = {"backend": STUDIED}, {"gradient_sync": "last_microbatch"}
    kinds = {
        "one": {"ranks": 1, "settings": studied, "async_mode": "async"},
        "two": {"ranks": 2, "settings": studied | last},
        "tp": {"ranks": 2, "tensor_parallel": 2, "settings": studied},
    }
    spawned = await asyncio.gather(
        *(
            start_trainer(
                tiny_model, checkpoints / name, tokens_folder=tokens_folder / name, **kind
            )
            for name, kind in kinds.items()
        )
    )
    yield [s.actor for s in spawned]
    await asyncio.gather(*(s.stop() for s in spawned))


@pytest.fixture(scope="module")
def trainer(trainers):
    return trainers[0]


@pytest.fixture(scope="module")
def two_ranks(trainers):
    return trainers[1]


@pytest.fixture(scope="module")
def tensor_parallel(trainers):
    return trainers[2]


async def gradients(trainer, episodes, *, dp_degree, budget, loss=None, share=False):
    grid = make_grid(
        episodes, dp_degree=dp_degree, tokens_per_microbatch=budget, share_prompts=share
    )
    return (await call_ranks(trainer, "gradients", grid, loss=loss))[0]


def relative_difference(left, right) -> float:
    assert left.keys() == right.keys()
    flat_left, flat_right = (
        torch.cat([g[k].flatten() for k in sorted(left)]) for g in (left, right)
    )
    return ((flat_left - flat_right).norm() / flat_right.norm()).item()


@pytest.mark.parametrize(
    ("count", "longest", "budget"),
    [(13, 40, 64), (13, 40, 4096), (3, 60, 128), (1, 5, 64)],
    ids=["many cells", "one cell", "very uneven", "a rank of padding only"],
)
async def test_any_split_and_any_sharding_give_the_same_gradient(
    trainer, two_ranks, tensor_parallel, count, longest, budget
):
    episodes = random_episodes(count, longest=longest, seed=count)
    whole = await gradients(trainer, episodes, dp_degree=1, budget=100_000)
    split = await gradients(trainer, episodes, dp_degree=1, budget=budget)
    sharded = await gradients(two_ranks, episodes, dp_degree=2, budget=budget)
    sliced = await gradients(tensor_parallel, episodes, dp_degree=2, budget=budget)
    for other in (split, sharded, sliced):
        assert relative_difference(other, whole) < 1e-6


@pytest.mark.parametrize("budget", [150, 4096])
async def test_sharing_prompts_changes_nothing_but_the_work(
    trainer, two_ranks, tensor_parallel, budget
):
    rng = random.Random(5)
    episodes = [
        replace(e, prompt_token_ids=prompt, group_id=str(group))
        for group in range(4)
        for prompt in [[rng.randrange(250) for _ in range(rng.randint(1, 60))]]
        for e in random_episodes(5, longest=30, seed=group)
    ]
    alone = await gradients(trainer, episodes, dp_degree=1, budget=100_000)
    for actor, ranks in ((trainer, 1), (two_ranks, 2), (tensor_parallel, 2)):
        shared = await gradients(actor, episodes, dp_degree=ranks, budget=budget, share=True)
        assert relative_difference(shared, alone) < 1e-6


def with_echo(episodes):
    """Echo on some tokens of prompts and completions, of some episodes; 0 is a weight, NaN none."""
    rng = random.Random(1)
    return [
        replace(
            e,
            echo_alpha=[math.nan]
            + [
                rng.choice([math.nan, math.nan, 0.0, 0.5, -0.25] if i % 3 else [math.nan])
                for _ in range(e.length - 1)
            ],
        )
        for i, e in enumerate(episodes)
    ]


async def test_echo_has_a_denominator_of_its_own_however_the_batch_is_split(
    trainer, two_ranks, tensor_parallel
):
    episodes = with_echo(random_episodes(9, longest=40, seed=4))
    whole = await gradients(trainer, episodes, dp_degree=1, budget=100_000)
    split = await gradients(trainer, episodes, dp_degree=1, budget=70)
    sharded = await gradients(two_ranks, episodes, dp_degree=2, budget=70)
    sliced = await gradients(tensor_parallel, episodes, dp_degree=2, budget=70, share=True)
    for other in (split, sharded, sliced):
        assert relative_difference(other, whole) < 1e-6


def plain_losses(model, episodes):
    """Losses by transformers: REINFORCE of each token that trains by RL, and Echo of each that
    trains by Echo, at temperature 1."""
    rl, echo = [], []
    for e in episodes:
        ids = torch.tensor([e.prompt_token_ids + e.token_ids])
        logits = model(ids).logits[0, :-1]
        for position in range(1, e.length):
            token, alpha = ids[0, position], e.echo_alpha[position]
            if not math.isnan(alpha):
                echo.append(-alpha * torch.log_softmax(logits[position - 1], -1)[token])
            elif position >= len(e.prompt_token_ids):
                scaled = torch.log_softmax(logits[position - 1] / e.temperature, -1)
                rl.append(-e.advantage * scaled[token])
    return rl, echo


async def test_the_gradient_of_echo_is_that_of_cross_entropy(trainer, tiny_model):
    """Against transformers: RL over its tokens, echo over its own, at temperature 1."""
    episodes = with_echo(random_episodes(4, longest=12))
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    rl, echo = plain_losses(model, episodes)
    (sum(rl) / len(rl) + sum(echo) / len(echo)).backward()
    ours = await gradients(
        trainer, episodes, dp_degree=1, budget=4096, loss=LossConfig(name="reinforce")
    )
    for titan, hf in {
        "tok_embeddings.weight": "model.embed_tokens.weight",
        "layers.1.attention.wo.weight": "model.layers.1.self_attn.o_proj.weight",
    }.items():
        expected = model.get_parameter(hf).grad
        torch.testing.assert_close(ours[titan], expected, rtol=1e-4, atol=1e-6)


async def test_the_total_that_is_logged_is_what_is_minimised(trainers, tiny_model):
    """Against transformers, term by term: Echo is in it. Any number of ranks logs the same."""
    episodes = with_echo(random_episodes(7, longest=12, seed=2))
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    with torch.no_grad():
        _, echo = plain_losses(model, episodes)
    trained = [
        e for e in episodes for a in e.echo_alpha[len(e.prompt_token_ids) :] if math.isnan(a)
    ]
    # The ratio of the first update is 1.
    policy = sum(-e.advantage for e in trained) / len(trained)
    echoed = (sum(echo) / len(echo)).item()
    expected = {"loss/policy": policy, "loss/echo": echoed, "loss/total": policy + echoed}
    for actor, ranks in zip(trainers, (1, 2, 2), strict=True):
        grid = make_grid(episodes, dp_degree=ranks, tokens_per_microbatch=64)
        logged = flatten(merge_metrics(await call_ranks(actor, "measure", grid)))
        assert {name: logged[name] for name in expected} == pytest.approx(expected, rel=1e-4)
        assert logged["echo_tokens"] == len(echo)


@pytest.mark.parametrize("loss", LOSSES)
async def test_every_loss_has_the_same_gradient_however_it_is_split(trainer, two_ranks, loss):
    """Every term is on. Sequences have very uneven lengths, and some are on a rank alone."""
    config = LossConfig(
        name=loss,
        rollout_kl=KLConfig(coef=0.1),
        ref_kl=KLConfig(coef=0.1, estimator="k3"),
        # Not by sequence: exp of a sum over 60 tokens would magnify the rounding of their logprobs.
        correction=CorrectionConfig(importance_weight="token", sequence_mask="product"),
    )
    episodes = weigh(random_episodes(9, longest=60, seed=3), "prompt_mean", fixed_length=60)
    whole = await gradients(trainer, episodes, dp_degree=1, budget=100_000, loss=config)
    split = await gradients(trainer, episodes, dp_degree=1, budget=100, loss=config)
    sharded = await gradients(two_ranks, episodes[::-1], dp_degree=2, budget=100, loss=config)
    for other in (split, sharded):
        assert relative_difference(other, whole) < 1e-6


async def test_the_gradient_is_that_of_the_formula(trainer, tiny_model):
    """Against transformers and autograd of the plain formula, temperature and masks included."""
    episodes = random_episodes(5, longest=12)
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    loss, count = torch.tensor(0.0), 0
    for e in episodes:
        ids = torch.tensor([e.prompt_token_ids + e.token_ids])
        logprobs = torch.log_softmax(model(ids).logits[0, :-1] / e.temperature, -1)
        chosen = logprobs.gather(-1, ids[0, 1:, None])[-len(e.token_ids) :]
        loss = loss - e.advantage * chosen.sum()
        count += len(e.token_ids)
    (loss / count).backward()
    ours = await gradients(trainer, episodes, dp_degree=1, budget=4096)
    reference = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    for titan, hf in {
        "tok_embeddings.weight": "model.embed_tokens.weight",
        "norm.weight": "model.norm.weight",
        "layers.1.attention.wo.weight": "model.layers.1.self_attn.o_proj.weight",
        "layers.2.feed_forward.w1.weight": "model.layers.2.mlp.gate_proj.weight",
    }.items():
        torch.testing.assert_close(ours[titan], reference[hf], rtol=1e-4, atol=1e-6)


async def test_an_export_is_what_transformers_loads(two_ranks, tmp_path, tiny_model):
    await two_ranks.export_hf.call(str(tmp_path / "export"))
    exported = load_file(tmp_path / "export" / "model.safetensors")
    original = load_file(tiny_model / "model.safetensors")
    assert exported.keys() == original.keys()
    assert all(torch.equal(exported[name], original[name]) for name in original)
    AutoModelForCausalLM.from_pretrained(tmp_path / "export")


async def test_a_gradient_that_is_not_finite_changes_nothing(trainer):
    bad = [episode(advantage=float("inf"))]
    grid = make_grid(bad, dp_degree=1, tokens_per_microbatch=64)
    cell = single(episode())
    before = per_rank(await trainer.logprobs.call(cell))[0]
    with pytest.raises(ActorError, match="gradient norm is nan") as caught:
        await call_ranks(trainer, "train_step", grid)
    assert "the advantages are not finite in 2 of 2 tokens, the first of them inf" in str(
        caught.value
    )
    after = per_rank(await trainer.logprobs.call(cell))[0]
    assert torch.equal(before[3:], after[3:])
    fine = await gradients(trainer, random_episodes(2, longest=5), dp_degree=1, budget=64)
    assert all(torch.isfinite(g).all() for g in fine.values())


async def test_what_is_not_finite_on_one_rank_is_named_by_all(two_ranks):
    """Whichever rank's error the controller gets: only one of them has seen the microbatch."""
    episodes = [episode(name="fine", advantage=0.5), episode(name="sums/train/7/3/0")]
    episodes[1] = episodes[1].with_columns(advantage=math.nan)
    grid = make_grid(episodes, dp_degree=2, tokens_per_microbatch=8)
    with pytest.raises(ActorError, match=r"advantages .* nan in sums/train/7/3/0"):
        await call_ranks(two_ranks, "train_step", grid)


async def test_the_cells_of_another_rank_are_refused(trainer):
    grid = make_grid([episode()] * 2, dp_degree=2, tokens_per_microbatch=8)
    with pytest.raises(ActorError, match="rank 0 was sent the cells of rank 1"):
        await trainer.train_step.call(grid.of_rank(1))


EVERYTHING = LossConfig(
    name="gspo",
    rollout_kl=KLConfig(coef=0.1),
    ref_kl=KLConfig(coef=0.1, estimator="k3"),
    correction=CorrectionConfig(
        token_mask="on",
        sequence_outliers="on",
        importance_weight="sequence",
        sequence_mask="product",
    ),
)
"""A loss with every term."""


async def test_a_microbatch_waits_for_no_gpu(trainer):
    """Between the start of its forward pass and the end of its backward pass. What is read are
    tensors that are on the CPU also where there is a GPU."""
    episodes = [
        replace(e, task=("sums", "words")[i % 2], token_versions=[0] * len(e.token_ids))
        for i, e in enumerate(with_echo(random_episodes(9, longest=40, seed=4)))
    ]
    grid = make_grid(episodes, dp_degree=1, tokens_per_microbatch=64)
    [(reads, _)] = await call_ranks(trainer, "count", grid, loss=EVERYTHING)
    assert len(grid.cells) > 2
    assert {who for who in reads if not who.startswith("models/cpu/")} == {
        "models/rank.py _trained",  # which tokens train
        "models/rank.py where",  # which of them by RL
        "core/metrics.py by_task",  # which belong to a task
    }


def scattered(collectives) -> int:
    return sum(count for name, count in collectives.items() if "reduce_scatter" in name)


async def test_gradients_are_added_up_after_every_microbatch_or_after_the_last(two_ranks):
    episodes = random_episodes(13, longest=40, seed=13)
    grid = make_grid(episodes, dp_degree=2, tokens_per_microbatch=64)
    seen, found = {}, {}
    for sync in ("every_microbatch", "last_microbatch"):
        await two_ranks.change.call(gradient_sync=sync)
        counts = [collectives for _, collectives in await call_ranks(two_ranks, "count", grid)]
        assert counts[0] == counts[1]  # or the ranks would wait for each other
        seen[sync] = counts[0]
        found[sync] = (await call_ranks(two_ranks, "gradients", grid))[0]
    groups = 3 + 2  # the layers, the embedding with the head, and what is left: none
    cells = len(grid.cells)
    assert cells > 3
    assert scattered(seen["every_microbatch"]) == cells * scattered(seen["last_microbatch"]) > 0
    assert scattered(seen["last_microbatch"]) <= groups
    others = [
        {name: n for name, n in counts.items() if "reduce_scatter" not in name}
        for counts in seen.values()
    ]
    assert others[0] == others[1]
    assert relative_difference(*found.values()) < 1e-6


@pytest.mark.parametrize("ranks", [1, 2])
async def test_an_error_halfway_leaves_no_gradient_behind(trainer, two_ranks, ranks):
    """Each rank fails in its second microbatch, the one of two tokens."""
    actor, short = {1: trainer, 2: two_ranks}[ranks], [episode()] * ranks
    long = [replace(e, token_ids=[7] * 30, token_logprobs=[-1.0] * 30) for e in short]
    grid = make_grid([*long, *short], dp_degree=ranks, tokens_per_microbatch=33)
    assert [[cell.streams["loss_mask"].sum() for cell in row] for row in grid.cells] == [
        [30] * ranks,
        [2] * ranks,
    ]
    fails = LossConfig(name="tests.algorithms.late_losses:raises")
    fine = random_episodes(5, longest=9)
    before = await gradients(actor, fine, dp_degree=ranks, budget=64)
    with pytest.raises(ActorError, match="two tokens"):
        await call_ranks(actor, "gradients", grid, loss=fails)
    after = await gradients(actor, fine, dp_degree=ranks, budget=64)
    assert all(torch.equal(before[name], after[name]) for name in before)


async def test_a_loss_that_fails_in_training_has_file_line_and_step_on_the_console(trainer):
    grid = make_grid([episode()], dp_degree=1, tokens_per_microbatch=64)
    loss = LossConfig(name="tests.algorithms.late_losses:raises")
    with pytest.raises(ActorError) as caught, noting("in step 7"):
        await call_ranks(trainer, "gradients", grid, loss=loss)
    assert re.fullmatch(
        r"loss 'tests.algorithms.late_losses:raises' raised KeyError: 'two tokens' "
        r"\(/.*/late_losses\.py:11\), on a microbatch of 2 tokens \(in step 7\)",
        describe(caught.value),
    )


async def test_the_reference_stays_and_reads_back_in_order(trainer, tiny_model):
    """The reference's logprobs on two ranks are those of the one-rank trainer at its start, episode
    by episode."""
    config = Reference.Config(parallelism=Parallelism(data_parallel_shard_degree=2), threads=1)
    reference = await spawn_reference(config, model=str(tiny_model))
    episodes = random_episodes(7, longest=30)
    grid = make_grid(episodes, dp_degree=2, tokens_per_microbatch=64)
    completions = grid.read_back(await call_ranks(reference.actor, "logprobs", grid))
    for e, logprobs in zip(episodes, completions, strict=True):
        alone = per_rank(await trainer.logprobs.call(single(e)))[0]
        assert torch.isnan(alone[: len(e.prompt_token_ids)]).all()
        new = alone[len(e.prompt_token_ids) :]
        torch.testing.assert_close(logprobs, new, rtol=1e-6, atol=0)
    await reference.stop()


async def test_a_trainer_that_slept_computes_and_publishes_as_before(trainers):
    """The ranks of the second mesh move their tensors, as on a GPU."""
    cell = single(episode(token_ids=[4, 5, 6], token_logprobs=[-0.5] * 3))
    # Converted, so that no snapshot looks at the weights' memory, as none looks at a GPU's: torch
    # does not resize memory that NumPy has seen.
    how = {"transport": "file", "dtype": torch.bfloat16}
    for actor in trainers:
        before = per_rank(await actor.logprobs.call(cell))
        published = merge_handles(per_rank(await actor.publish_weights.call(**how)))
        given_back = per_rank(await actor.sleep.call())
        assert all(nbytes > -(2**24) for nbytes in given_back)
        assert per_rank(await actor.sleep.call()) == [0] * len(given_back)
        for call in (actor.logprobs.call(cell), actor.publish_weights.call()):
            with pytest.raises(ActorError, match="the trainer is offloaded: call `wake` first"):
                await call
        with open_snapshot(published) as snapshot:  # it stays readable
            snapshot.verify()
        await actor.wake.call()
        await actor.wake.call()
        for one, other in zip(before, per_rank(await actor.logprobs.call(cell)), strict=True):
            assert torch.equal(one[3:], other[3:])
        again = merge_handles(per_rank(await actor.publish_weights.call(**how)))
        assert [part.checksums for part in again.parts] == [
            part.checksums for part in published.parts
        ]
        assert again.changed_bytes == 0
    assert not Path("weights").exists()  # nobody asked for a folder here


async def test_metrics_of_two_ranks_merge_to_those_of_one(trainer, two_ranks):
    episodes = [
        replace(e, echo_alpha=[50 * abs(alpha) for alpha in e.echo_alpha])
        for e in with_echo(random_episodes(9, longest=20))
    ]
    values = []
    for ranks, actor in ((1, trainer), (2, two_ranks)):
        grid = make_grid(episodes, dp_degree=ranks, tokens_per_microbatch=128)
        metrics = [await call_ranks(actor, "train_step", grid) for _ in range(2)]
        rows = [flatten(merge_metrics(m)) for m in metrics]
        values.append([{k: v for k, v in row.items() if "seconds" not in k} for row in rows])
    for one, two in zip(*values, strict=True):
        assert one.keys() == two.keys()
        assert one == pytest.approx(two, rel=1e-4, abs=1e-6)
    assert values[0][0]["entropy/all/mean"] != values[0][1]["entropy/all/mean"]
    assert values[0][0]["grad_share/policy"] + values[0][0]["grad_share/echo"] == pytest.approx(1)
    # From the first update on Echo has no more than its share, and the total is what is minimised.
    first, second = values[0]
    assert first["grad_share/echo"] == pytest.approx(0.2, abs=0.01)
    assert second["grad_share/echo"] < 0.4
    assert first["echo_factor"] < 0.2
    assert first["loss/total"] == pytest.approx(first["loss/policy"] + first["loss/echo"])


@pytest.mark.parametrize("scale", [0.02, 1.0, 50.0])
async def test_the_share_of_echo_is_about_that_of_its_gradient(trainer, scale):
    """Against the gradients of all weights, a backward pass for each term. It takes steps."""
    episodes = [
        replace(e, echo_alpha=[scale * abs(alpha) for alpha in e.echo_alpha])
        for e in with_echo(random_episodes(9, longest=20, seed=6))
    ]
    alone = {
        "policy": [replace(e, echo_alpha=[0 * alpha for alpha in e.echo_alpha]) for e in episodes],
        "echo": [replace(e, advantage=0.0) for e in episodes],
    }
    norms = {}
    for term, its in alone.items():
        found = await gradients(trainer, its, dp_degree=1, budget=4096)
        norms[term] = torch.cat([g.flatten() for g in found.values()]).norm().item()
    grid = make_grid(episodes, dp_degree=1, tokens_per_microbatch=128)
    logged = flatten((await call_ranks(trainer, "train_step", grid))[0])
    echo = logged["echo_factor"] * norms["echo"]
    # Of alphas as they are: 0.005, 0.12 and 0.94 against 0.008, 0.25 and 0.91. It is an estimate,
    # and the weights are random.
    exact = echo / (echo + norms["policy"])
    assert logged["grad_share/echo"] == pytest.approx(exact, abs=0.2)


async def test_a_resumed_trainer_goes_on_as_if_it_had_not_stopped(trainer, tiny_model, checkpoints):
    episodes = with_echo(random_episodes(6, longest=10))
    grid = make_grid(episodes, dp_degree=1, tokens_per_microbatch=4096)

    async def steps(actor, count):
        rows = [flatten((await call_ranks(actor, "train_step", grid))[0]) for _ in range(count)]
        return [row | {"sync/blocked_seconds": 0.0} for row in rows]

    folder = checkpoints / "one"
    await steps(trainer, 1)
    # It is written beside the next steps, and of the state before them.
    await trainer.hold_checkpoint.call("write_data")
    await trainer.save.call(3, wait=False)
    expected = await steps(trainer, 2)
    assert find_checkpoints(folder) == []
    await trainer.write_on.call()
    await trainer.save.call(3)
    assert find_checkpoints(folder) == [3]
    start = partial(start_trainer, tiny_model, folder, ranks=1, resume=True)
    # One that is cut off half-way, when all its data and no .metadata is there, does not count.
    doomed = await start(settings={"backend": STUDIED}, async_mode="async")
    await doomed.actor.hold_checkpoint.call("finish")
    await doomed.actor.save.call(9, wait=False)
    while not list(folder.glob("step-9/*.distcp")):
        await asyncio.sleep(0.01)
    os.kill(doomed.processes[0].pid, signal.SIGKILL)
    await doomed.stop()
    assert find_checkpoints(folder) == [3]
    resumed = await start()
    assert not (folder / "step-9").exists()
    assert per_rank(await resumed.actor.steps_done.call()) == [3]
    assert await steps(resumed.actor, 2) == expected
    assert len({row["echo_factor"] for row in expected}) == 2  # it goes on, too
    await resumed.stop()


async def test_later_updates_of_a_batch_know_the_policy_it_started_with(trainer):
    grid = make_grid(random_episodes(6, longest=20), dp_degree=1, tokens_per_microbatch=256)
    version = per_rank(await trainer.publish_weights.call())[0].version
    once, thrice = [
        flatten(merge_metrics(await call_ranks(trainer, "train_step", *[grid] * times)))
        for times in (1, 3)
    ]
    # At the first update the ratio is 1 everywhere. Steps this large leave the trust region.
    assert once["loss/masked_high_share"] == once["loss/masked_low_share"] == 0
    assert thrice["loss/masked_high_share"] + thrice["loss/masked_low_share"] > 0
    # The policy loss is the only term: there is nothing to share.
    assert once["loss/total"] == once["loss/policy"]
    assert not [name for name in once if name.startswith("grad_share")]
    assert per_rank(await trainer.publish_weights.call())[0].version == version + 2


async def test_every_rank_exports_the_tokens_it_trained(trainers, tokens_folder):
    """Only one of the ranks that share a model exports; two updates of a step, shared prompts."""
    episodes = [
        replace(e, prompt_token_ids=[1, 2, 3], group_id=str(i // 3), name=f"{i // 3}/{i % 3}/0")
        for i, e in enumerate(random_episodes(12, longest=20, seed=8))
    ]
    for actor, name, ranks in zip(trainers, ("one", "two", "tp"), (1, 2, 2), strict=True):
        options = {"dp_degree": ranks, "tokens_per_microbatch": 64, "share_prompts": True}
        grids = [make_grid(part, **options) for part in (episodes[:6], episodes[6:])]
        before = per_rank(await actor.logprobs.call(single(episodes[0])))[0]
        await call_ranks(actor, "train_step", *grids, step=5)
        await actor.save.call(5)  # by then it is on disk
        files = sorted((tokens_folder / name).glob("step-000005-*"))
        assert [file.name[-12:] for file in files] == [f"rank-{r}.jsonl" for r in range(ranks)]
        records = {r["name"]: r for file in files for _, r in read_lines(file)}
        assert records.keys() == {e.name for e in episodes}
        for e in episodes:
            assert records[e.name]["tokens"] == e.prompt_token_ids + e.token_ids
        first, last = records[episodes[0].name], records[episodes[-1].name]
        assert first["trainer_logprobs"][3:] == pytest.approx(before[3:].tolist(), abs=1e-5)
        assert set(first["ratios"][3:]) == {1.0}  # of the first update
        assert set(last["ratios"][3:]) != {1.0}
        assert {m for r in records.values() for m in r["masked"]} == {-1, 0, 1}


async def test_swapped_weights_serve_the_trainers_policy(two_ranks, tiny_model, tmp_path):
    """Two different weight sets in a row: a stale lm_head or prefix cache shows on the second."""
    other = write_tiny_model(tmp_path / "other", seed=1)
    config = VLLMGenerator.Config(
        sampling=SamplingConfig(n=4, max_tokens=16, temperature=0.8),
        engine=small_engine(),
        threads=1,
    )
    generator = await spawn_generator(config, model=str(other), seed=0)
    ranks = Trainer.Config(parallelism=Parallelism(data_parallel_shard_degree=2))
    trainer = SpawnedTrainer(
        actor=two_ranks, procs=None, parts=[], config=ranks, model=str(tiny_model)
    )
    prompts, seen = [list(range(k, k + 50)) for k in range(4)], []
    for _ in range(3):
        handle = (await run_block("weights", trainer=trainer, generator=generator))["handle"]
        completions = await generator.actor.generate.call_one(prompts, group_ids=list("abcd"))
        assert {c.policy_version for c in completions} == {handle.version}
        scored = [ScoredCompletion(c, n % 2, correct=False) for n, c in enumerate(completions)]
        groups = [scored[first : first + 4] for first in range(0, 16, 4)]
        episodes = make_episodes(groups, temperature=0.8)
        for ours, c in zip(await trainer.logprobs(episodes), completions, strict=True):
            assert ours == pytest.approx(c.token_logprobs, abs=1e-4)
        seen.append([c.token_logprobs for c in completions])
        step = await run_block(
            "notebook step", trainer=trainer, generator=generator, scored=scored[:4]
        )
        assert step["metrics"]["train/tokens"] == sum(e.length for e in step["episodes"])
    assert seen[0] != seen[1] != seen[2]
    await generator.stop()


TWO_EPISODES = make_grid(
    [episode(advantage=a) for a in (1.0, 2.0)], dp_degree=2, tokens_per_microbatch=64
)
SLOW = 1.0
"""Seconds that a slow snapshot takes."""


@pytest.fixture
async def slow(two_ranks):
    await two_ranks.publish_in.call(SLOW)
    yield two_ranks
    await two_ranks.publish_in.call(0.0)


async def publish(trainer, **options):
    handle = merge_handles(per_rank(await trainer.publish_weights.call(**options)))
    with open_snapshot(handle) as snapshot:
        return handle, {name: tensor.clone() for name, tensor in snapshot.tensors()}


async def train(trainer):
    return flatten(merge_metrics(await call_ranks(trainer, "train_step", TWO_EPISODES)))


async def test_a_step_begins_beside_the_snapshot_and_does_not_get_into_it(slow):
    first, before = await publish(slow)
    (second, beside), metrics = await asyncio.gather(publish(slow), train(slow))
    # It had little else to do than to wait; without the wait the snapshot would be of the new
    # weights, which it is not.
    assert metrics["sync/blocked_seconds"] > SLOW / 2
    assert second.version == first.version
    assert all(torch.equal(beside[name], before[name]) for name in before)
    third, after = await publish(slow)
    assert third.version == first.version + 1
    assert not any(torch.equal(after[name], before[name]) for name in before)
    assert (await train(slow))["sync/blocked_seconds"] < SLOW / 2


async def test_two_snapshots_at_once_are_taken_one_after_the_other(slow):
    (one, first), (two, second) = await asyncio.gather(publish(slow), publish(slow))
    assert one.version == two.version
    assert all(torch.equal(first[name], second[name]) for name in first)


async def test_a_snapshot_that_fails_does_not_keep_the_optimizer_waiting(slow):
    failing = publish(slow, dtype="no dtype")
    failed, metrics = await asyncio.gather(failing, train(slow), return_exceptions=True)
    assert isinstance(failed, Exception)
    assert metrics["sync/blocked_seconds"] >= 0
    await publish(slow)

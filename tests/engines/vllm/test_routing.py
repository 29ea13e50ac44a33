"""The experts the real engine chose, against torchtitan's own choice for the same tokens.

The engine runs in a process of its own, because vLLM patches the one it runs in, and hands over
what it made in a file.
"""

import os
import pickle
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engines.vllm.changing_weights import EXPERTS, assert_served
from tests.models.support import forward, noisy_copy, selected_experts, titan_model
from tests.support import episode
from torchtitan_rl.actors.trainer import Trainer
from torchtitan_rl.batching.grid import make_grid
from torchtitan_rl.batching.microbatch import single
from torchtitan_rl.config import Parallelism
from torchtitan_rl.core.experts import expert_dtype
from torchtitan_rl.core.metrics import flatten, merge_metrics
from torchtitan_rl.engines.vllm.routing import ReturnedRouting
from torchtitan_rl.models.hf import read_hf_config
from torchtitan_rl.models.router_replay import find_routers, replay_routing
from torchtitan_rl.platform import worker_env
from torchtitan_rl.supervision.ranks import call_ranks
from torchtitan_rl.supervision.spawn import per_rank, spawn_trainer

SCRIPT = """
import asyncio, pickle, random, sys
from dataclasses import replace
from safetensors.torch import load_file
from tests.engines.vllm.changing_weights import EXPERTS, PROMPT, states
from tests.support import small_engine
from torchtitan_rl.engines.vllm.engine import Engine, SamplingConfig
from torchtitan_rl.weight_sync.handle import whole_tensors
from torchtitan_rl.weight_sync.transport import make_publisher

model, other, target = sys.argv[1:]
# Room for 1000 tokens in the KV cache: some requests have to give way to others. And for less than
# two prompts in a step: vLLM on a CPU would die of a prompt with a seed that it prefills in parts.
config = replace(small_engine(), return_routed_experts=True, kv_cache_gib=0.0015,
                 max_num_batched_tokens=128)
engine = Engine(model, config, seed=0)
scheduler = engine._engine.engine_core.engine_core.scheduler
preempt, preempted = scheduler._preempt_request, []
scheduler._preempt_request = lambda *a, **k: (preempted.append(1), preempt(*a, **k))
finish, cached = engine._finish, []
engine._finish = lambda output: (cached.append(output.num_cached_tokens), finish(output))
rng = random.Random(0)
prompts = [[rng.randrange(265) for _ in range(70 + i)] for i in range(5)]
prompts += [prompts[0][:40] + [1, 2, 3], [4]]
sampling = SamplingConfig(n=6, max_tokens=40)
names = [str(i) for i in range(len(prompts))]

def ask(function):
    return engine._engine.collective_rpc(lambda worker: function(worker.routing_recorder))[0]

async def main():
    made = {}
    for name in ("first", "again"):
        made[name] = await engine.generate(prompts, sampling, names)
    made["preempted"], made["cached"] = len(preempted), sum(cached)

    stop = made["first"][0].text[5]
    made["stopped"] = await engine.generate(prompts[:1], replace(sampling, stop=[stop]), names[:1])

    cancelled = asyncio.create_task(engine.generate(prompts, sampling, names))
    await asyncio.sleep(0.1)
    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)

    publisher = make_publisher("shm")
    tensors = load_file(other + "/model.safetensors")
    handle = publisher.publish(whole_tensors(tensors.items()), version=1)
    long = SamplingConfig(n=4, max_tokens=90)
    swapped = asyncio.create_task(engine.generate([[5, 6, 7]], long, ["long"]))
    tokens = lambda recorder: max((r.tokens for r in recorder._records.values()), default=0)
    while await engine._between_steps(lambda: ask(tokens)) < 20:
        pass
    await engine.pull_weights(handle)
    made["swapped"] = await swapped
    made["pulled"] = await engine.generate(prompts, sampling, names)
    made["left"] = ask(lambda recorder: len(recorder._records))

    made["versions"], served = [], handle
    short = SamplingConfig(n=2, max_tokens=6)
    for version, tensors in enumerate(states(model, EXPERTS), start=2):
        handle = publisher.publish(whole_tensors(tensors.items()), version)
        await engine.pull_weights(handle)
        completions = await engine.generate([PROMPT], short, [f"{version}"])
        made["versions"].append((handle.changed_since(served), completions))
        served = handle
    made["direct"] = engine._engine.collective_rpc(lambda worker: worker.direct is not None)
    engine.close()
    with open(target, "wb") as file:
        pickle.dump(made, file)

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def folders(moe_model, tmp_path_factory):
    """The model the engine starts with, and the one it pulls."""
    return moe_model, noisy_copy(moe_model, tmp_path_factory.mktemp("models") / "other", seed=1)


@pytest.fixture(scope="module")
def models(folders):
    return [titan_model(folder) for folder in folders]


@pytest.fixture(scope="module")
def made(folders, tmp_path_factory):
    """What the engine made: completions by occasion, and counts."""
    target = tmp_path_factory.mktemp("made") / "made.pickle"
    env = {**os.environ, **worker_env(2, role="generator"), "PYTHONPATH": os.getcwd()}
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, *map(str, folders), str(target)],
        env=env,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return pickle.loads(target.read_bytes())


def token_ids(completion):
    return torch.tensor([completion.prompt_token_ids + completion.token_ids])


def routing_of(completion):
    return torch.from_numpy(completion.routed_experts).long()


def agrees(model, completion):
    """[tokens - 1] whether all layers chose the same experts; the last token was never fed in."""
    expected = selected_experts(model, token_ids(completion)).sort().values
    return (routing_of(completion).sort().values == expected).flatten(1).all(dim=1)[:-1]


@pytest.mark.parametrize("occasion", ["first", "again", "stopped"])
def test_the_experts_are_those_the_trainer_would_choose(made, models, occasion):
    for completion in made[occasion]:
        tokens = len(completion.prompt_token_ids) + len(completion.token_ids)
        assert completion.routed_experts.shape == (tokens, 2, 2)
        assert completion.routed_experts.dtype == np.uint8
        assert completion.routed_experts[-1].tolist() == [[0, 1], [0, 1]]
        assert agrees(models[0], completion).all()


def test_that_included_cached_prefixes_preempted_and_cancelled_requests(made):
    assert made["cached"] > 1000
    assert made["preempted"] > 5
    assert made["left"] == 0


def test_pulled_experts_compute_and_choose_what_the_trainers_do(made, models):
    for completion in made["pulled"]:
        assert completion.policy_version == 1
        assert agrees(models[1], completion).all()
    assert mismatch(models[1], made["pulled"]).max() < 1e-4
    assert mismatch(models[0], made["pulled"]).mean() > 0.1


def test_an_engine_that_loads_only_what_changed_serves_the_trainers_policy(made, folders, tmp_path):
    assert_served(folders[0], EXPERTS, made["versions"], tmp_path)
    assert made["direct"] == [False]  # experts are loaded by vLLM


def test_a_token_keeps_the_experts_it_was_sampled_behind(made, models):
    """A swap recomputes the whole request with new weights; what was sampled stays as it was."""
    crossed = [completion for completion in made["swapped"] if completion.token_versions]
    assert crossed  # others had ended before
    for completion in crossed:
        old, new = (agrees(model, completion) for model in models)
        swap = int(old.logical_not().nonzero()[0])
        assert swap >= 20
        assert new[swap:].all()
        assert not new[:swap].all()


def mismatch(model, completions, *, replayed=False):
    """|difference| of the logprobs of all sampled tokens between trainer and generator."""
    differences = []
    for completion in completions:
        tokens, prompt = token_ids(completion), len(completion.prompt_token_ids)
        with torch.no_grad(), replay_routing(model, routing_of(completion) if replayed else None):
            logprobs = forward(model, tokens)[0, prompt - 1 : -1].log_softmax(-1)
        ours = logprobs.gather(-1, tokens[0, prompt:, None])[:, 0]
        differences.append((ours - torch.tensor(completion.token_logprobs)).abs())
    return torch.cat(differences)


def test_replay_mends_most_of_what_a_perturbed_router_spoils(made, folders):
    model = titan_model(folders[0])
    assert mismatch(model, made["first"]).max() < 1e-5
    assert mismatch(model, made["first"], replayed=True).max() < 1e-5
    torch.manual_seed(0)
    with torch.no_grad():
        for router in find_routers(model):
            router.gate.weight.add_(torch.randn_like(router.gate.weight) * 3e-3)
    plain, replayed = (
        mismatch(model, made["first"], replayed=flag).mean() for flag in (False, True)
    )
    print(f"mismatch {plain:.5f} without and {replayed:.5f} with replay: {plain / replayed:.1f}x")
    assert plain > 3 * replayed


async def test_the_trainer_replays_packed_rows_shared_prompts_and_padding(made, folders, tmp_path):
    """Two ranks, one of which has no episode in the last microbatch; the routers are perturbed."""
    folder = tmp_path / "perturbed"
    shutil.copytree(folders[0], folder)
    weights = load_file(folder / "model.safetensors")
    torch.manual_seed(0)
    for name, weight in weights.items():
        if name.endswith("mlp.gate.weight"):
            weight += torch.randn_like(weight) * 3e-3
    save_file(weights, folder / "model.safetensors")
    episodes = [
        episode(
            prompt_token_ids=c.prompt_token_ids,
            token_ids=c.token_ids,
            token_logprobs=c.token_logprobs,
            advantage=(-1.0) ** i,
            group_id=str(c.prompt_idx),
            routed_experts=c.routed_experts,
        )
        for i, c in enumerate(made["first"])
    ]
    config = Trainer.Config(
        router_replay=True,
        parallelism=Parallelism(data_parallel_shard_degree=2),
        activation_checkpoint="full",
        threads=1,
    )
    trainer = await spawn_trainer(
        config, model=str(folder), steps=9, checkpoint_folder=str(tmp_path / "checkpoints")
    )
    plain = []
    for one in episodes[::6]:  # this endpoint does not replay
        logprobs = per_rank(await trainer.actor.logprobs.call(single(one)))[0]
        ours = logprobs[len(one.prompt_token_ids) :]
        plain.append((ours - torch.tensor(one.token_logprobs)).abs())
    grid = make_grid(episodes, dp_degree=2, tokens_per_microbatch=400, share_prompts=True)
    gradients = (await call_ranks(trainer.actor, "gradients", grid))[0]
    gates = [gradient for name, gradient in gradients.items() if "router.gate" in name]
    assert len(gates) == 2
    assert all(gate.norm() > 0 for gate in gates)
    one_episode = make_grid(episodes[:1], dp_degree=2, tokens_per_microbatch=400)
    assert [cell.real for cell in one_episode.cells[0]] == [True, False]
    metrics = flatten(merge_metrics(await call_ranks(trainer.actor, "train_step", grid)))
    await call_ranks(trainer.actor, "train_step", one_episode)
    await trainer.stop()
    assert torch.cat(plain).mean() > 3 * metrics["mismatch/all/mean"]


def test_what_vllm_returns_on_a_gpu_comes_out_the_same(made, folders):
    """vLLM's array has rows for dense layers too, and its own dtype; without a GPU only the shape
    can be tested."""
    completion = made["first"][0]
    every_layer = np.zeros((len(completion.routed_experts) - 1, 3, 2), np.uint16)
    every_layer[:, 1:] = completion.routed_experts[:-1]
    output = SimpleNamespace(
        prompt_token_ids=completion.prompt_token_ids,
        outputs=[SimpleNamespace(token_ids=completion.token_ids, routed_experts=every_layer)],
    )
    taken = ReturnedRouting(read_hf_config(folders[0])).take(output)
    assert taken.dtype == np.uint8
    assert np.array_equal(taken, completion.routed_experts)


@pytest.mark.parametrize(("experts", "name"), [(8, "uint8"), (256, "uint8"), (257, "int16")])
def test_experts_are_numbered_in_the_smallest_dtype(experts, name):
    assert expert_dtype(experts) == name

"""A running engine, one process or two with a slice each, that loads only what has changed."""

import os
import pickle
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from torchtitan_rl.platform import worker_env

SCRIPT = """
import asyncio, pickle, sys
from safetensors.torch import load_file
from tests.engines.vllm.test_partial_pulls import states
from tests.support import small_engine
from torchtitan_rl.engines.vllm.engine import Engine, SamplingConfig
from torchtitan_rl.weight_sync.handle import whole_tensors
from torchtitan_rl.weight_sync.transport import make_publisher

def loads_directly(worker):
    return worker.direct is not None

async def main(task, target):
    folder, schedule, ranks = pickle.load(open(task, "rb"))
    engine = await asyncio.to_thread(
        Engine, folder, small_engine(), seed=0, tensor_parallel=ranks)
    publisher, made, served = make_publisher("shm"), [], None
    for version, tensors in enumerate(states(folder, schedule)):
        handle = publisher.publish(whole_tensors(tensors.items()), version)
        await engine.pull_weights(handle)
        # Longer than a block of the cache: prefixes that are not forgotten would show.
        completions = await engine.generate(
            [list(range(40))], SamplingConfig(n=2, max_tokens=6), [f"{version}"])
        made.append((handle.changed_since(served), [(c.token_ids, c.token_logprobs)
                     for c in completions]))
        served = handle
    # Neither slices nor experts are loaded but by vLLM.
    assert engine._engine.collective_rpc(loads_directly) == [False] * ranks
    pickle.dump(made, open(target, "wb"))
    engine.close()

if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
"""

DENSE: list[tuple[list[str] | None, int]] = [
    (None, 35),
    (["model.layers.1.mlp.up_proj.weight"], 3),
    (["model.layers.0.self_attn.k_proj.weight", "model.layers.2.input_layernorm.weight"], 7),
    (["model.embed_tokens.weight"], 1),
    ([], 0),
    (None, 35),
    (["model.norm.weight", "model.layers.1.mlp.down_proj.weight"], 4),
]
"""Names of what changes (None: everything), and how many tensors are loaded then: of a layer, all 6
of attention or all 3 of the MLP."""
EXPERTS: list[tuple[list[str] | None, int]] = [
    (None, 79),
    (["model.layers.1.mlp.experts.3.up_proj.weight"], 25),
    (["model.layers.0.mlp.up_proj.weight"], 3),
    (["model.layers.2.mlp.gate.weight"], 25),
]


def states(folder, schedule):
    """The weights of a model as they change, from one version to the next."""
    tensors = load_file(f"{folder}/model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for names, _ in schedule:
        for name in tensors if names is None else names:
            tensors[name] += 0.05 * torch.randn(tensors[name].shape, generator=generator)
        yield {name: tensor.clone() for name, tensor in tensors.items()}


def reference(folder, tensors, target):
    """transformers' model with these weights."""
    shutil.copytree(folder, target, dirs_exist_ok=True)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)


@pytest.mark.parametrize(
    ("fixture", "schedule", "ranks"),
    [("tiny_model", DENSE, 2), ("moe_model", EXPERTS, 1)],
    ids=["two processes", "experts"],
)
def test_an_engine_that_loads_only_what_changed_serves_the_trainers_policy(
    request, tmp_path, fixture, schedule, ranks
):
    folder = request.getfixturevalue(fixture)
    script, task, target = (tmp_path / name for name in ("script.py", "task", "made"))
    script.write_text(SCRIPT)  # a file: vLLM's own processes import it again
    task.write_bytes(pickle.dumps((str(folder), schedule, ranks)))
    run = subprocess.run(
        [sys.executable, str(script), str(task), str(target)],
        env={**os.environ, **worker_env(1, role="generator"), "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    made = pickle.loads(target.read_bytes())
    for tensors, (loaded, completions), (_, count) in zip(
        states(folder, schedule), made, schedule, strict=True
    ):
        assert len(loaded) == count
        model = reference(folder, tensors, tmp_path / "reference")
        for token_ids, logprobs in completions:
            with torch.no_grad():
                logits = model(torch.tensor([[*range(40), *token_ids]])).logits[0, 39:-1]
            ours = logits.log_softmax(-1)[range(len(token_ids)), token_ids]
            assert (ours - torch.tensor(logprobs)).abs().max() <= 1e-4

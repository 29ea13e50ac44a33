"""Weights that are loaded directly against vLLM's own reload, version by version, and against
transformers; called where vLLM may be imported."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.engines.vllm.changing_weights import GROWN, PROMPT
from tests.support import small_engine
from torchtitan_rl.config import SamplingConfig
from torchtitan_rl.engines.vllm.engine import Engine, NoWeightsError
from torchtitan_rl.models.hf import SHAPES_FILE, tensor_shapes
from torchtitan_rl.platform.switches import VARIABLE
from torchtitan_rl.weight_sync.handle import Shard, merge_handles, whole_tensors
from torchtitan_rl.weight_sync.transport import make_publisher

LAYER = "model.layers.1"
CHANGES: list[list[str] | None] = [
    *(None, None, None),
    [f"{LAYER}.self_attn.k_proj.weight", f"{LAYER}.input_layernorm.weight"],
    [f"{LAYER}.mlp.up_proj.weight", "model.norm.weight"],
    ["model.embed_tokens.weight"],
    [],
]
"""Names of what changes from one version to the next; None: everything."""


def weights_of(model):
    """Under their HF names, without the second name of a tied one."""
    return dict(model.named_parameters())


def change(model, names, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in weights_of(model).items():
            if names is None or name in names:
                weight += 0.05 * torch.randn(weight.shape, generator=generator)


class Served:
    """An engine, and how it loads weights."""

    def __init__(self, folder):
        self.engine = Engine(str(folder), small_engine(), seed=0)
        self.worker = (
            self.engine._engine.engine_core.engine_core.model_executor.driver_worker.worker
        )
        self.reloads = 0
        reload_weights = self.worker.model_runner.reload_weights

        def counted(**options):
            self.reloads += 1
            reload_weights(**options)

        self.worker.model_runner.reload_weights = counted

    def forget(self):
        """Reset the worker, as if nothing had been loaded yet."""
        self.worker.served = self.worker.direct = None
        self.reloads = 0

    async def sample(self):
        sampling = SamplingConfig(n=2, max_tokens=6)
        made = await self.engine.generate([PROMPT], sampling, ["same"])
        return [(c.token_ids, c.token_logprobs) for c in made]

    async def versions(self, folder):
        """What it samples, version by version, and how far that is from transformers."""
        model, publisher, made = load(folder), make_publisher("shm"), []
        for version, names in enumerate(CHANGES):
            change(model, names, version)
            handle = publisher.publish(whole_tensors(weights_of(model).items()), version)
            await self.engine.pull_weights(handle)
            made.append(await self.sample())
            assert mismatch(model, made[-1]) < 1e-4, version
        # Nothing is left that looks at memory of the publisher, who has it for other weights now.
        for version in (90, 91):
            change(model, None, version)
            publisher.publish(whole_tensors(weights_of(model).items()), version)
        assert await self.sample() == made[-1]
        return made


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def mismatch(model, made):
    """Largest difference between an engine's logprobs and those of transformers."""
    worst = 0.0
    for token_ids, logprobs in made:
        with torch.no_grad():
            logits = model(torch.tensor([[*PROMPT, *token_ids]])).logits[0, len(PROMPT) - 1 : -1]
        ours = logits.log_softmax(-1)[range(len(token_ids)), token_ids]
        worst = max(worst, (ours - torch.tensor(logprobs)).abs().max().item())
    return worst


async def check_versions(served, folder):
    """Every version loaded directly is what vLLM makes of it, to the bit."""
    direct = await served.versions(folder)
    assert served.reloads == 1, "all but the first are loaded directly"

    served.forget()
    os.environ[VARIABLE] = "direct_load"
    assert await served.versions(folder) == direct
    assert served.reloads == sum(names != [] for names in CHANGES)
    del os.environ[VARIABLE]


async def check_parts(served, folder):
    """Tensors that two ranks have halves of."""
    served.forget()
    model, ranks = load(folder), [make_publisher("shm"), make_publisher("shm")]
    for version in range(2):
        change(model, None, version)
        handles = []
        for rank, publisher in enumerate(ranks):
            shards = []
            for name, weight in weights_of(model).items():
                half, shape = len(weight) // 2, tuple(weight.shape)
                rows = weight.detach()[half:] if rank else weight.detach()[:half]
                shards.append(Shard(name, shape, (rank * half, *(0,) * (len(shape) - 1)), (rows,)))
            handles.append(publisher.publish(shards, version))
        await served.engine.pull_weights(merge_handles(handles))
        assert mismatch(model, await served.sample()) < 1e-4
    assert served.reloads == 1


async def check_other_dtypes(served, folder):
    """Weights in another dtype are left to vLLM, and so is all that follows."""
    served.forget()
    model, publisher = load(folder), make_publisher("shm")
    for version, dtype in enumerate([None, None, torch.bfloat16, None]):
        change(model, None, version)
        weights = whole_tensors(weights_of(model).items())
        await served.engine.pull_weights(publisher.publish(weights, version, dtype=dtype))
        for weight in model.parameters():
            weight.data = weight.data.to(dtype or torch.float32).float()
        assert mismatch(model, await served.sample()) < 1e-4, version
        assert (served.worker.direct is not None) == (version < 2)
    assert served.reloads == 3


async def check_a_model_that_changes_weights_as_it_loads_them(served, folder):
    """The model's modules do not show the change; what vLLM has made of the first weights does."""
    model, publisher = load(folder), make_publisher("shm")
    inside = served.worker.model_runner.get_model()
    load_weights = inside.load_weights
    for changed in ("model.norm.weight", f"{LAYER}.mlp.down_proj.weight", "embed_tokens.weight"):
        served.forget()
        inside.load_weights = lambda weights, changed=changed: load_weights(
            (name, 2 * weight if name.endswith(changed) else weight) for name, weight in weights
        )
        weights = whole_tensors(weights_of(model).items())
        await served.engine.pull_weights(publisher.publish(weights, 0))
        assert served.worker.direct is None, changed
    inside.load_weights = load_weights


def copy_without_weights(folder):
    """A copy of a model's folder as a host has it that gets weights from the trainer."""
    copy = f"{folder}-without-weights"
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("*.safetensors"))
    (Path(copy) / SHAPES_FILE).write_text(json.dumps(tensor_shapes(folder)))
    return copy


async def write_generated(served, folder, *, without_weights=False):
    """Write what an engine samples with a folder's weights, and with weights that it pulls, GROWN
    times as large. `without_weights`: it has pulled also the first."""
    publisher, tensors = make_publisher("shm"), load_file(Path(folder) / "model.safetensors")
    if without_weights:
        with pytest.raises(NoWeightsError, match=r"has no weights: `pull_weights`"):
            await served.sample()
        await served.engine.pull_weights(publisher.publish(whole_tensors(tensors.items()), 0))
    made = [await served.sample()]
    grown = [(name, GROWN * tensor) for name, tensor in tensors.items()]
    await served.engine.pull_weights(publisher.publish(whole_tensors(grown), 1))
    made.append(await served.sample())
    (Path(folder) / "generated.json").write_text(json.dumps(made))
    publisher.close()


async def check_direct_loads(folders, others):
    """Check direct loading for each kind of model that it supports; write what these models and
    others generate."""
    for number, folder in enumerate(others):
        bare = number == 0
        served = Served(copy_without_weights(folder) if bare else folder)
        await write_generated(served, folder, without_weights=bare)
        served.engine.close()
    for folder in folders:
        served = Served(folder)
        await write_generated(served, folder)
        served.forget()
        await check_versions(served, folder)
        if folder == folders[-1]:  # it is the same for all
            await check_parts(served, folder)
            await check_other_dtypes(served, folder)
            await check_a_model_that_changes_weights_as_it_loads_them(served, folder)
        served.engine.close()

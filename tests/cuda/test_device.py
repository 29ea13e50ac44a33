"""What a rank does on its GPU besides computing, with stand-ins for CUDA's calls."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.cuda.pretend import pretend_gpus
from torchtitan_rl.engines.vllm.routing import ReturnedRouting, make_routing_source
from torchtitan_rl.models import offload, rank
from torchtitan_rl.models.offload import HostMemory


@pytest.fixture
def gpu():
    with pretend_gpus((9, 0)):
        yield


def test_a_rank_joins_by_nccl_and_tries_the_kernel_on_its_own_gpu(gpu, monkeypatch):
    done = []
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(dist, "init_process_group", lambda backend: done.append(backend))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: done.append(("current", device)))
    monkeypatch.setattr(rank, "try_attention", lambda device: done.append(("tried", device)))
    own = torch.device("cuda", 3)
    assert rank.join_process_group() == own
    assert done == ["cuda:nccl,cpu:gloo", ("current", own), ("tried", own)]


def test_memory_is_given_back_when_all_copies_have_ended(gpu, monkeypatch):
    weight = torch.arange(6.0).view(2, 3)
    storage, seen, pinned = weight.untyped_storage(), [], []
    empty = torch.empty

    def empty_pinned(*size, pin_memory=False, **options):
        pinned.append(pin_memory)
        return empty(*size, **options)

    def note(what):
        return lambda: seen.append((what, storage.nbytes()))

    monkeypatch.setattr(offload.torch, "empty", empty_pinned)
    monkeypatch.setattr(torch.cuda, "synchronize", note("waited"))
    monkeypatch.setattr(torch.cuda, "empty_cache", note("cache emptied"))
    memory = HostMemory()
    memory.offload([weight])
    assert True in pinned
    memory.restore()
    assert seen == [("waited", 24), ("cache emptied", 0), ("waited", 24)]
    assert torch.equal(weight, torch.arange(6.0).view(2, 3))


def test_routing_is_what_vllm_returns_of_the_layers_with_experts(gpu, moe_model):
    source = make_routing_source(None, str(moe_model))
    assert isinstance(source, ReturnedRouting)
    rows = np.arange(4 * 3 * 2).reshape(4, 3, 2) % 8  # of every layer, the dense first one too
    completion = SimpleNamespace(token_ids=[7, 8], routed_experts=rows)
    output = SimpleNamespace(request_id="0", prompt_token_ids=[1, 2, 3], outputs=[completion])
    taken = source.take(output)
    assert taken.shape == (5, 2, 2)
    assert taken.dtype == np.uint8
    assert np.array_equal(taken[:4], rows[:, 1:])

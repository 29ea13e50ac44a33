"""The model of a GPU against that of a CPU: the same logprobs and gradients. A stand-in computes
what the kernel would."""

import random

import pytest
import torch

from tests.cuda.pretend import pretend_gpus
from tests.cuda.test_attention import varlen
from tests.models.support import noisy_copy, titan_model
from tests.support import episode
from torchtitan_rl.batching.grid import make_grid
from torchtitan_rl.models.cuda import attention
from torchtitan_rl.models.rank import ModelRank


@pytest.fixture
def exact_kernel(monkeypatch):
    monkeypatch.setattr(attention, "varlen_attn", varlen)
    monkeypatch.setattr(attention, "HALF", (torch.float32,))


@pytest.fixture(scope="module")
def folder(tiny_model, tmp_path_factory):
    return noisy_copy(tiny_model, tmp_path_factory.mktemp("models") / "noisy")


def samples(seed):
    """Three prompts, of each several samples of any length."""
    draw = random.Random(seed)

    def tokens(count):
        return [draw.randrange(200) for _ in range(count)]

    made = []
    for number, count in enumerate((4, 1, 3)):
        prompt = tokens(draw.randrange(1, 12))
        for _ in range(count):
            ids = tokens(draw.randrange(1, 9))
            made.append(
                episode(
                    prompt_token_ids=prompt,
                    token_ids=ids,
                    token_logprobs=[-1.0] * len(ids),
                    group_id=f"sums/train/{number}",
                )
            )
    return made


def rank_of(folder) -> ModelRank:
    """A rank without a process group."""
    rank = object.__new__(ModelRank)
    rank.model, rank.device = titan_model(folder), torch.device("cpu")
    rank.row_multiple = 8
    rank.head = rank.model.get_submodule("lm_head")
    return rank


def trained(rank, episodes, *, share):
    """Logprobs of each episode's completion, and the gradient of their sum."""
    grid = make_grid(episodes, dp_degree=1, tokens_per_microbatch=96, share_prompts=share)
    assert any(d.branches for [cell] in grid.cells for d in cell.documents) == share
    rank.model.zero_grad()
    for [cell] in grid.cells:
        rank.predict(cell).logprobs.sum().backward()
    columns = [[rank.logprobs(cell) for [cell] in grid.cells]]
    gradient = torch.cat([p.grad.flatten() for p in rank.model.parameters()])
    return torch.cat(grid.read_back(columns)), gradient


@pytest.mark.parametrize("share", [False, True], ids=["apart", "shared"])
def test_a_gpus_model_computes_what_a_cpus_does(folder, exact_kernel, share):
    episodes = samples(seed=int(share))
    logprobs, gradient = trained(rank_of(folder), episodes, share=share)
    with pretend_gpus((9, 0)):
        found, its_gradient = trained(rank_of(folder), episodes, share=share)
    torch.testing.assert_close(found, logprobs, rtol=0, atol=2e-5)
    torch.testing.assert_close(its_gradient, gradient, rtol=0, atol=2e-4)
    assert gradient.norm() > 1

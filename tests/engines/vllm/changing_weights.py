"""Weights that change in part from one version to the next, and transformers as the reference."""

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from torchtitan_rl.core.types import Completion

PROMPT = list(range(40))
"""Longer than a block of the cache: prefixes that are not forgotten would show."""
GROWN = 1.1
"""Factor of all weights, from what an engine has started with to what it pulls."""
Schedule = list[tuple[list[str] | None, int]]
"""Names of what changes (None: everything), and how many tensors are loaded then: of a layer, all
of attention (7 with biases), all 3 of the MLP, or all 25 of the experts."""
DENSE: Schedule = [
    (None, 26),
    (["model.layers.1.mlp.up_proj.weight"], 3),
    (["model.layers.0.self_attn.k_proj.bias", "model.layers.1.input_layernorm.weight"], 8),
    (["model.embed_tokens.weight"], 1),
    ([], 0),
    (None, 26),
    (["model.norm.weight", "model.layers.1.mlp.down_proj.weight"], 4),
]
EXPERTS: Schedule = [
    (None, 79),
    (["model.layers.1.mlp.experts.3.up_proj.weight"], 25),
    (["model.layers.0.mlp.up_proj.weight"], 3),
    (["model.layers.2.mlp.gate.weight"], 25),
]


def states(folder: Path | str, schedule: Schedule) -> Iterator[dict[str, torch.Tensor]]:
    """The weights of a model as they change, from one version to the next."""
    tensors = load_file(Path(folder) / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for names, _ in schedule:
        for name in tensors if names is None else names:
            tensors[name] += 0.05 * torch.randn(tensors[name].shape, generator=generator)
        yield {name: tensor.clone() for name, tensor in tensors.items()}


def assert_served(
    folder: Path,
    schedule: Schedule,
    made: Sequence[tuple[Any, Sequence[Completion]]],
    work: Path,
) -> None:
    """`made` is, by version, what was loaded and completions of PROMPT: the logprobs are those of
    transformers' model with that version's weights."""
    for tensors, (loaded, completions), (_, count) in zip(
        states(folder, schedule), made, schedule, strict=True
    ):
        assert len(loaded) == count
        model = reference(folder, tensors, work / "reference")
        for completion in completions:
            assert completion.prompt_token_ids == PROMPT
            token_ids = completion.token_ids
            with torch.no_grad():
                logits = model(torch.tensor([[*PROMPT, *token_ids]])).logits[0, len(PROMPT) - 1 :]
            ours = logits[:-1].log_softmax(-1)[range(len(token_ids)), token_ids]
            assert (ours - torch.tensor(completion.token_logprobs)).abs().max() <= 1e-4


def reference(folder: Path, tensors: dict[str, torch.Tensor], target: Path) -> Any:
    """transformers' model with these weights."""
    shutil.copytree(folder, target, dirs_exist_ok=True)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)

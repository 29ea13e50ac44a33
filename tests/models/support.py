"""What tests of models share: torchtitan's model of an HF folder, and folders to tell apart."""

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from torchtitan_rl.models.router_replay import find_routers
from torchtitan_rl.models.spec import build_on_meta, model_spec


def titan_model(folder: Path) -> nn.Module:
    """torchtitan's model with the folder's weights, on the CPU."""
    spec = model_spec(folder)
    model = build_on_meta(spec).to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights()
    adapter = spec.state_dict_adapter(spec.model, str(folder))
    model.load_state_dict(adapter.from_hf(load_file(folder / "model.safetensors")))
    return model


def noisy_copy(source: Path, folder: Path, *, seed: int = 0) -> Path:
    """Noise on every weight: at their initial values the norms are ones, and not told apart."""
    shutil.copytree(source, folder)
    generator = torch.Generator().manual_seed(seed)
    noisy = {
        name: weight
        + torch.randn(weight.shape, generator=generator) * (0.3 if weight.dim() == 1 else 0.06)
        for name, weight in load_file(folder / "model.safetensors").items()
    }
    save_file(noisy, folder / "model.safetensors")
    return folder


def forward(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Logits of [rows, length] tokens."""
    positions = torch.arange(tokens.shape[1]).expand(tokens.shape)
    return model(tokens=tokens, positions=positions)


def selected_experts(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """[rows * length, layers with experts, top_k] experts a forward pass chooses."""
    chosen = []
    hooks = [
        router.register_forward_hook(lambda _, __, output: chosen.append(output[1].flatten(0, 1)))
        for router in find_routers(model)
    ]
    try:
        with torch.no_grad():
            forward(model, tokens)
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack(chosen, dim=1)

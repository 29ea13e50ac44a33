"""Rotary position embedding: plain, scaled as in Llama 3.1 to 3.3, or none."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate
from torchtitan.models.common import CosSinRoPE

from torchtitan_rl.models.hf import head_size, rope_scaling, rope_theta


class FrequencyRoPE(CosSinRoPE):
    """Rotations computed from frequencies and positions in each forward pass.

    torchtitan keeps a table of all positions in every layer, which of a Llama-3.1-8B is 4 GiB, and
    has no scaling for this kind of rotation. Here `cache` is [dim / 2] frequencies.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        pass

    def _precompute_cache(self) -> torch.Tensor:
        config = self.config
        exponents = torch.arange(0, config.dim, 2).float() / config.dim
        frequencies = 1.0 / config.theta**exponents
        return frequencies if config.scaling == "none" else llama3_scaled(frequencies, config)

    def _reshape_cache(
        self, query: torch.Tensor, positions: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[rows, length, 1, 2 * dim] cosines and sines of the positions [rows, length]."""
        frequencies = _local(self.cache)
        if positions is None:
            positions = torch.arange(query.shape[1], device=frequencies.device).unsqueeze(0)
        angles = _local(positions).unsqueeze(-1).float() * frequencies
        cos, sin = angles.cos(), angles.sin()
        rotations = torch.cat([cos, cos, sin, sin], dim=-1).unsqueeze(2)
        if not isinstance(query, DTensor):
            return rotations
        mesh = query.device_mesh
        return DTensor.from_local(rotations, mesh, [Replicate()] * mesh.ndim, run_check=False)


class NoRoPE(FrequencyRoPE):
    """Queries and keys as they are, for layers that know no positions."""

    @dataclass(kw_only=True, slots=True)
    class Config(FrequencyRoPE.Config):
        pass

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The two as they are."""
        return query, key


def llama3_scaled(frequencies: torch.Tensor, config: CosSinRoPE.Config) -> torch.Tensor:
    """Frequencies for a context longer than the one first trained on, as in Llama 3.1.

    Those that turn at least `high_freq_factor` times in the first context stay. Those that turn
    less than `low_freq_factor` times are divided by `scaling_factor`. The others lie in between,
    linearly in the number of turns.
    """
    turns = config.original_max_position_embeddings * frequencies / (2 * torch.pi)
    low, high = config.low_freq_factor, config.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / config.scaling_factor)


def rope_config(hf: dict[str, Any], *, rotates: bool) -> FrequencyRoPE.Config:
    """Config of one layer's rotations, from config.json."""
    make = FrequencyRoPE.Config if rotates else NoRoPE.Config
    config = make(
        dim=head_size(hf), max_seq_len=hf["max_position_embeddings"], theta=rope_theta(hf)
    )
    if scaling := rope_scaling(hf):
        config.scaling = "llama"
        config.scaling_factor = scaling.pop("factor")
        for name, value in scaling.items():
            setattr(config, name, value)
    return config


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

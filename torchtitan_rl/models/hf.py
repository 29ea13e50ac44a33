"""HF folders: reading config.json, and writing folders that are complete or absent."""

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from torchtitan_rl.core.errors import TorchtitanRLError
from torchtitan_rl.core.experts import Experts
from torchtitan_rl.models.archs.architecture import Architecture
from torchtitan_rl.models.archs.registry import ARCHITECTURES, LACKING

COMPANION_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)
"""Files of an HF folder beside its weights."""


@contextmanager
def atomic_folder(folder: str | Path) -> Iterator[Path]:
    """A temporary folder that takes the name `folder` when the block ends without an error.

    Other processes see no folder or a complete one, also after Ctrl-C or SIGKILL half-way.
    """
    final = Path(folder)
    final.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{final.name}-", dir=final.parent))
    try:
        yield temporary
        temporary.chmod(0o755)
        if final.exists():
            shutil.rmtree(final)
        temporary.rename(final)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def copy_companion_files(source: str | Path, target: str | Path) -> None:
    """Copy config and tokenizer of one HF folder to another."""
    for name in COMPANION_FILES:
        if (file := Path(source) / name).is_file():
            shutil.copy(file, Path(target) / name)


class ModelFolderError(TorchtitanRLError, ValueError):
    """An HF folder cannot be used; the message names the folder and the fix."""


def read_hf_config(folder: str | Path) -> dict[str, Any]:
    """Contents of an HF folder's config.json, or an error that says what is missing."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ModelFolderError(
            f"no config.json in {str(folder)!r}: point `model` at a Hugging Face model folder "
            "(config.json, *.safetensors, tokenizer files); `make model` makes a small one"
        )
    try:
        config = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ModelFolderError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelFolderError(f"{path} holds no JSON object")
    architecture = architecture_of(config, path)
    if "num_local_experts" in config:
        config.setdefault("num_experts", config["num_local_experts"])  # transformers 5 renames it
    config.setdefault("tie_word_embeddings", architecture.tied)
    _check_fields(config, architecture, path)
    return config


def _check_fields(config: dict[str, Any], architecture: Architecture, path: Path) -> None:
    for name in architecture.needed:
        if name not in config:
            raise ModelFolderError(f"{path} lacks the field {name!r}")
    rope_theta(config)
    rope_scaling(config)
    for name, supported in architecture.only.items():
        if config.get(name, supported) not in (supported, None):
            raise ModelFolderError(
                f"{path} has {name} = {config[name]!r}; only {supported!r} is supported"
            )
    if windows := set(config.get("layer_types") or ()) - {"full_attention"}:
        raise ModelFolderError(
            f"{path} has layers of the type {', '.join(sorted(windows))}; only full_attention is "
            "supported"
        )


def architecture_of(config: dict[str, Any], path: str | Path = "config.json") -> Architecture:
    """The architecture that a config.json names, or an error that says what lacks."""
    name = (config.get("architectures") or ["<none>"])[0]
    if name in ARCHITECTURES:
        return ARCHITECTURES[name]
    lacking = f", which needs what this library lacks: {LACKING[name]}" if name in LACKING else ""
    raise ModelFolderError(
        f"{path} names the architecture {name!r}{lacking}; "
        f"supported: {', '.join(sorted(ARCHITECTURES))}"
    )


SHAPES_FILE = "tensor_shapes.json"
"""What stands for the weights in a folder of a host that gets them from the trainer."""


def has_weights(folder: str | Path) -> bool:
    """Whether an HF folder has weights; else an engine gets them from a trainer."""
    return any(Path(folder).glob("*.safetensors"))


def tensor_shapes(folder: str | Path) -> dict[str, tuple[int, ...]]:
    """The shapes of all tensors of an HF folder, by name: from its safetensors files, or from what
    stands for them."""
    files = sorted(Path(folder).glob("*.safetensors"))
    instead = Path(folder) / SHAPES_FILE
    if not files and instead.is_file():
        return {name: tuple(shape) for name, shape in json.loads(instead.read_text()).items()}
    if not files:
        raise ModelFolderError(f"no *.safetensors file in {str(folder)!r}")
    shapes = {}
    for file in files:
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118, which is no dict
                shapes[name] = tuple(opened.get_slice(name).get_shape())
    return shapes


def rope_theta(config: dict[str, Any]) -> float:
    """Base of the rotary position embedding."""
    theta = _rope_parameters(config).get("rope_theta") or config.get("rope_theta")
    if theta is None:
        raise ModelFolderError("config.json lacks the field 'rope_theta'")
    return float(theta)


LLAMA3_SCALING = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
)
"""Fields of the scaled rotations of Llama 3.1 to 3.3."""


def rope_scaling(config: dict[str, Any]) -> dict[str, Any]:
    """LLAMA3_SCALING of a model whose rotations are scaled as in Llama 3.1; empty for plain ones.

    Example:
        >>> rope_scaling({"rope_scaling": None, "rope_theta": 10000.0})
        {}
    """
    parameters = _rope_parameters(config)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind not in ("default", "llama3"):
        raise ModelFolderError(
            f"RoPE scaling {kind!r} is not supported, only 'llama3' is; where it only extends the "
            "context, as YaRN does, take it out of config.json and train within "
            "max_position_embeddings"
        )
    for part in (parameters, config):
        if part.get("partial_rotary_factor", 1) != 1:
            raise ModelFolderError("rotation of a part of each head is not supported")
    if kind == "default":
        return {}
    if missing := [name for name in LLAMA3_SCALING if parameters.get(name) is None]:
        raise ModelFolderError(f"RoPE scaling 'llama3' lacks {', '.join(missing)}")
    return {name: parameters[name] for name in LLAMA3_SCALING}


def _rope_parameters(config: dict[str, Any]) -> dict[str, Any]:
    # transformers 5 moved rope_theta into rope_parameters; older folders have it at the top.
    return config.get("rope_parameters") or config.get("rope_scaling") or {}


def head_size(config: dict[str, Any]) -> int:
    """Dimension of one attention head."""
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def moe_layers(config: dict[str, Any]) -> list[int]:
    """Numbers of the layers with experts; empty for a dense model.

    Example:
        >>> moe_layers({"num_hidden_layers": 4, "num_experts": 8, "mlp_only_layers": [0]})
        [1, 2, 3]
        >>> moe_layers({"num_hidden_layers": 4, "num_experts": 8, "decoder_sparse_step": 2})
        [1, 3]
    """
    if not config.get("num_experts"):
        return []
    dense = config.get("mlp_only_layers") or []
    every = config.get("decoder_sparse_step", 1)
    return [
        number
        for number in range(config["num_hidden_layers"])
        if number not in dense and (number + 1) % every == 0
    ]


def experts_of(config: dict[str, Any]) -> Experts | None:
    """Sizes of a model's routing, from its config.json; None if it is dense."""
    layers = len(moe_layers(config))
    if not layers:
        return None
    return Experts(layers, config["num_experts_per_tok"], config["num_experts"])


def hf_dtype(config: dict[str, Any]) -> torch.dtype:
    """Dtype of the weights, from an HF config; older ones name it `torch_dtype`.

    Example:
        >>> hf_dtype({"torch_dtype": "bfloat16"})
        torch.bfloat16
    """
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype):
        raise ModelFolderError(f"config.json names the dtype {name!r}, which torch does not know")
    return dtype


def check_parallelism(
    hf: dict[str, Any], *, tensor_parallel: int, expert_parallel: int = 1, who: str
) -> None:
    """Refuse tensor parallelism that does not divide heads and experts, and expert parallelism that
    does not divide their number, before any process starts."""
    if expert_parallel > 1 and hf.get("num_experts", 0) % expert_parallel:
        raise ValueError(
            f"{who} expert parallelism of {expert_parallel} does not divide the model's "
            f"num_experts ({hf['num_experts']}); choose a divisor of it"
        )
    if expert_parallel > 1 and not moe_layers(hf):
        raise ValueError(
            f"{who} expert parallelism is {expert_parallel}, but the model has no experts; set "
            "expert_parallel_degree to 1"
        )
    names = ["num_attention_heads", "num_key_value_heads"]
    if moe_layers(hf):
        names.append("moe_intermediate_size")
    for name in names:
        if hf[name] % tensor_parallel:
            raise ValueError(
                f"{who} tensor parallelism of {tensor_parallel} does not divide the model's "
                f"{name} ({hf[name]}); choose a divisor of it"
            )


def check_experts(hf: dict[str, Any], *, setting: str) -> None:
    """Refuse a setting for routing if the model has no experts."""
    if not moe_layers(hf):
        raise ValueError(f"{setting} is on, but the model has no experts; switch it off")

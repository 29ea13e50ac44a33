"""The architectures that can be trained, by name, and what the library lacks for others."""

from torchtitan_rl.models.archs.architecture import Architecture, Config
from torchtitan_rl.models.archs.llama import LLAMA
from torchtitan_rl.models.archs.mistral import MISTRAL
from torchtitan_rl.models.archs.qwen2 import QWEN2
from torchtitan_rl.models.archs.qwen3 import QWEN3
from torchtitan_rl.models.archs.qwen3_moe import QWEN3_MOE
from torchtitan_rl.models.archs.smollm3 import SMOLLM3

ARCHITECTURES: dict[str, Architecture] = {
    architecture.name: architecture
    for architecture in (LLAMA, MISTRAL, QWEN2, QWEN3, QWEN3_MOE, SMOLLM3)
}
"""Architectures that can be trained, by their names in config.json."""

SHAPES: dict[str, Config] = {
    name: shape
    for architecture in ARCHITECTURES.values()
    for name, shape in architecture.shapes.items()
}
"""Contents of config.json by the name of a well-known model's folder, so that a run can be planned
before a download."""

_LATENT = "multi-head latent attention, and routing by groups with a bias"
_DELTA = "linear attention (Gated DeltaNet) that ends at the documents of a row"
_GEMMA = "norms after attention and MLP, and layers with a sliding window"
LACKING: dict[str, str] = {
    "DeepseekV2ForCausalLM": _LATENT,
    "DeepseekV3ForCausalLM": _LATENT,
    "Gemma2ForCausalLM": f"{_GEMMA}, and capped logits",
    "Gemma3ForCausalLM": _GEMMA,
    "Gemma3ForConditionalGeneration": f"{_GEMMA}, and images",
    "Glm4ForCausalLM": "norms after attention and MLP, and rotation of a part of each head",
    "Glm4MoeForCausalLM": "shared experts, and rotation of a part of each head",
    "GptOssForCausalLM": "attention sinks, layers with a sliding window, and experts with biases",
    "Llama4ForConditionalGeneration": "chunked attention, a shared expert, and images",
    "MixtralForCausalLM": "the names of its experts' tensors",
    "Olmo2ForCausalLM": "norms after attention and MLP",
    "Phi3ForCausalLM": "its projections, which are stored fused",
    "Qwen2MoeForCausalLM": "a shared expert with a gate",
    "Qwen3NextForCausalLM": _DELTA,
    "Qwen3_5ForCausalLM": _DELTA,
    "Qwen3_5ForConditionalGeneration": f"{_DELTA}, and images",
    "Qwen3_5MoeForConditionalGeneration": f"{_DELTA}, a shared expert, and images",
}
"""What the library lacks for an architecture, by its name in config.json."""

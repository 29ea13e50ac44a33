"""Large matrix products by oneDNN, which torch has beside MKL.

torch itself multiplies matrices in single precision by MKL, which on a CPU that is not Intel's
leaves half of its vector units unused.

Gain of a whole step at 135M, together with `linear`: 47 % (two cores of an AMD EPYC with AVX-512
and BF16, torch 2.13), none on another machine. None for the tiny model, whose products are not
large.
"""

import torch

from torchtitan_rl.platform.switches import enabled

LARGE = 2**27, 2**16
"""A product is large from so many multiplications on, if the two smaller of its three sizes make at
least the second number. For every new shape oneDNN first makes a program, which takes half a
millisecond and stays in memory: a small model would gain nothing, and its heap be full of holes."""

_HAS_ONEDNN = torch.backends.mkldnn.is_available() and enabled("onednn_products")


def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """left @ right of two matrices, without a gradient."""
    if _is_large(left, right):
        return torch.ops.mkldnn._linear_pointwise(left, right.T, None, "none", [], "")
    return left @ right


def _is_large(left: torch.Tensor, right: torch.Tensor) -> bool:
    if not (_HAS_ONEDNN and left.is_cpu and left.dtype == right.dtype == torch.float32):
        return False
    smallest, middle, largest = sorted((*left.shape, right.shape[1]))
    multiplications, matrix = LARGE
    return smallest * middle >= matrix and smallest * middle * largest >= multiplications

"""Matrix products by oneDNN, which torch has beside MKL.

Gain of a whole step: -3 % (tiny), 5 % (135M) (two cores of an AMD EPYC with AVX-512, torch 2.13).
"""

import torch

from torchtitan_rl.platform.switches import enabled

LARGE = 2**27
"""Multiplications from which on a product is worth it: for every new shape oneDNN first makes a
program, which takes half a millisecond and stays in memory."""
LARGE_MATRIX = 2**17
"""Elements from which on a matrix of weights is worth it: a small model gains nothing, and its heap
would be full of holes between the programs, of which each new length of a row needs several."""


def times_transposed(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """left @ right.T, without a gradient: [rows, inner] and [columns, inner].

    In single precision on a CPU by oneDNN, where torch itself uses MKL: by a tenth to a fifth
    faster for products that do not sum over the tokens of a batch.
    """
    single = left.dtype == right.dtype == torch.float32 and left.is_cpu
    large = left.numel() * len(right) >= LARGE and right.numel() >= LARGE_MATRIX
    if single and large and _HAS_ONEDNN:
        return torch.ops.mkldnn._linear_pointwise(left, right, None, "none", [], "")
    return left @ right.T


_HAS_ONEDNN = torch.backends.mkldnn.is_available() and enabled("onednn_products")

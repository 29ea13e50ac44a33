"""Products by oneDNN are those of `@`."""

import pytest
import torch

from torchtitan_rl.models.cpu import products
from torchtitan_rl.models.cpu.products import times_transposed


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(7, 5, 3), (1, 1, 1), (64, 96, 33), (0, 4, 2), (3, 4, 0)])
@pytest.mark.parametrize("large", [0, 2**27], ids=["oneDNN", "MKL"])
def test_a_product_with_a_transposed_matrix(monkeypatch, shape, dtype, large):
    monkeypatch.setattr(products, "LARGE", large)
    monkeypatch.setattr(products, "LARGE_MATRIX", 0)
    rows, inner, columns = shape
    draw = torch.Generator().manual_seed(rows)
    left, right = (torch.randn(n, inner, generator=draw).to(dtype) for n in (rows, columns))
    for a, b in ((left, right), (left.T.contiguous().T, right.T.contiguous().T)):
        out = times_transposed(a, b)
        assert out.dtype == dtype
        torch.testing.assert_close(out, left @ right.T)

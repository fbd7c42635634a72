"""Attention and the matrix product against float64 arithmetic."""

from __future__ import annotations

import pytest
import torch

from roll.strategies.hf_infer.decoder import decode_attention, linear


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2), (4, 1)])
@pytest.mark.parametrize("ragged", [True, False])
def test_decode_attention(dtype, tolerance, num_heads, num_kv_heads, ragged):
    generator = torch.Generator().manual_seed(0)
    batch, length, head_dim, scale = 5, 9, 16, 0.3
    queries = torch.randn(batch, num_heads, head_dim, generator=generator).to(dtype)
    # Views of a longer and larger cache, as the engine has them.
    cache = torch.randn(2, batch + 2, num_kv_heads, length + 3, head_dim, generator=generator).to(dtype)
    keys, values = cache[0, :batch, :, :length], cache[1, :batch, :, :length]
    lengths = torch.tensor([9, 1, 4, 9, 7]) if ragged else torch.full((batch,), length)
    hidden = torch.arange(length) >= lengths[:, None]
    bias = torch.zeros(batch, length, dtype=dtype).masked_fill(hidden, torch.finfo(dtype).min) if ragged else None
    out = decode_attention(queries, keys, values, bias, scale).view(batch, num_heads, head_dim)
    for row in range(batch):
        for head in range(num_heads):
            kv_head = head // (num_heads // num_kv_heads)
            k, v = (part[row, kv_head, : lengths[row]].double() for part in (keys, values))
            expected = (scale * k @ queries[row, head].double()).softmax(-1) @ v
            torch.testing.assert_close(out[row, head].double(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("rows", [1, 8, 64, 257])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
def test_linear_on_both_sides_of_the_size_where_the_kernel_changes(rows, with_bias, dtype, tolerance):
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(320, 192, generator=generator) / 192**0.5).to(dtype)
    bias = torch.randn(320, generator=generator).to(dtype) if with_bias else None
    x = torch.randn(rows, 200, generator=generator).to(dtype)[:, 8:]  # not contiguous
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    torch.testing.assert_close(linear(x, weight, bias).double(), expected, rtol=0, atol=tolerance)

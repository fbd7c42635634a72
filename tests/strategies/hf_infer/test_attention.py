"""Attention against float64 arithmetic."""

from __future__ import annotations

import pytest
import torch

from roll.strategies.hf_infer.decoder import decode_attention


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

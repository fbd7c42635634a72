"""Attention of one new token per row over the cache, and a matrix product for small batches."""

from __future__ import annotations

import torch
import torch.nn.functional as F

# Below this many multiplications oneDNN's call overhead (about 6 microseconds) costs more than its kernels win.
_ONEDNN_MIN_WORK = 1 << 20
# An operator that torch's own compiler uses; without it the plain product gives the same numbers more slowly.
_HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def decode_attention(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Softmax attention of a single query position per row.

    Args:
        queries: (B, num_heads, head_dim).
        keys, values: (B, num_kv_heads, T, head_dim); consecutive query heads share a key head.
        bias: (B, T), added to the scores of all heads, or None.
        scale: factor of the scores.

    Returns:
        (B, num_heads * head_dim).
    """
    batch, num_heads, head_dim = queries.shape
    num_kv_heads, length = keys.shape[1], keys.shape[2]
    grouped = queries.reshape(batch, num_kv_heads, num_heads // num_kv_heads, head_dim)
    if queries.dtype == torch.float32 and queries.device.type == "cpu":
        # 1.5 times as fast as the CPU flash kernel, which is made for many queries a row.
        scores = torch.bmm(grouped.flatten(0, 1) * scale, keys.flatten(0, 1).transpose(1, 2))
        if bias is not None:
            scores.view(batch, num_heads, length).add_(bias[:, None])
        out = torch.bmm(scores.softmax(-1), values.flatten(0, 1))
    else:
        mask = None if bias is None else bias[:, None, None]
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scale)
    return out.reshape(batch, num_heads * head_dim)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x @ weight.T + bias`` for x of shape (N, in) and weight (out, in).

    In float32 on the CPU, oneDNN is asked directly: its generated AVX-512 kernels ran 2.3 times as fast as the BLAS
    behind ``F.linear`` on an AMD Zen 5 (240 against 105 GFLOP/s a core). The choice depends on shapes alone, so equal
    runs give equal bits.
    """
    on_cpu = x.dtype == torch.float32 and x.device.type == "cpu"
    if _HAS_ONEDNN and on_cpu and x.shape[0] * weight.numel() >= _ONEDNN_MIN_WORK:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)

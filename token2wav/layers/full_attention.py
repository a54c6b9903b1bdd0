"""Attention of every position to all positions, without a mask."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def full_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int) -> torch.Tensor:
    """Computes attention of q over k and v, all (B, T, heads * dim_head), in the shape of q."""
    q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

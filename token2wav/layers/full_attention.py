"""Attention of every position to all positions, without a mask, and a transformer layer with it."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn


def full_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int) -> torch.Tensor:
    """Computes attention of q over k and v, all (B, T, heads * dim_head), in the shape of q."""
    q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class FullAttention(nn.Module):
    """Projections around `full_attention`.

    Args:
        bias: whether the projections have biases, except that of the keys, as in Whisper.
    """

    def __init__(self, width: int, heads: int, dim_head: int, *, bias: bool = False) -> None:
        super().__init__()
        self._heads, inner = heads, heads * dim_head
        self.q_proj, self.v_proj = (nn.Linear(width, inner, bias=bias) for _ in range(2))
        self.k_proj = nn.Linear(width, inner, bias=False)
        self.o_proj = nn.Linear(inner, width, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        return self.o_proj(full_attention(q, k, v, self._heads))


class FullTransformerLayer(nn.Module):
    """Attention and a feed-forward part, each after a norm."""

    def __init__(
        self, attention: FullAttention, mlp: nn.Module, norm: Callable[[], nn.Module]
    ) -> None:
        super().__init__()
        self.self_attn, self.mlp = attention, mlp
        self.input_layernorm, self.post_attention_layernorm = norm(), norm()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))

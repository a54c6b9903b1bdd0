"""Projections of attention in the package `moshi`, and in codecs that copied them. They become
weights of `WindowTransformer`.
"""

from __future__ import annotations

import re

import torch
from torch import nn

from token2wav.layers.window_transformer import WindowTransformerAttention

# Older files of the package have the first name, newer files the second one. The third one is that
# of version 2 of the MOSS Audio Tokenizer.
_QKV = re.compile(r"(.+\.layers\.\d+\.self_attn)\.in_proj(_weight|s\.0\.weight|\.weight)")


def attention_rows(name: str, value: torch.Tensor, network: nn.Module) -> dict[str, torch.Tensor]:
    """Splits the projection of queries, keys and values of a layer. Other weights are returned as
    they are.

    The published code rotates pairs of neighbouring channels; `WindowTransformer`, pairs of a
    channel of the first half of a head and a channel of its second half. So the rows of queries and
    keys change places.

    Args:
        network: network that contains the `WindowTransformerAttention` of the layer.
    """
    match = _QKV.fullmatch(name)
    attention = dict(network.named_modules()).get(match[1]) if match else None
    if match is None or not isinstance(attention, WindowTransformerAttention):
        return {name: value}
    heads, key_heads = attention.heads, attention.key_heads
    all_heads = heads + 2 * key_heads
    # The later check of names rejects a tensor without the rows of queries, keys and values.
    if value.dim() != 2 or len(value) % (2 * all_heads):
        return {name: value}
    size = len(value) // all_heads
    q, k, v = value.split([heads * size, key_heads * size, key_heads * size])
    return {
        f"{match[1]}.q_proj.weight": _halves(q, heads),
        f"{match[1]}.k_proj.weight": _halves(k, key_heads),
        f"{match[1]}.v_proj.weight": v,
    }


def _halves(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Moves the even rows of every head before its odd rows."""
    pairs = rows.reshape(heads, -1, 2, rows.shape[1])
    return pairs.transpose(1, 2).reshape(rows.shape)

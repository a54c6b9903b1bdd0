"""Published weights of transformer layers of the package `moshi`, and of codecs that copied them.
They become weights of `WindowTransformer`.
"""

from __future__ import annotations

import re

import torch

_RENAMED = (
    (re.compile(r"\.self_attn\.out_projs?(\.0)?\.weight$"), ".self_attn.o_proj.weight"),
    (re.compile(r"\.norm1\."), ".input_layernorm."),
    (re.compile(r"\.norm2\."), ".post_attention_layernorm."),
    (re.compile(r"\.linear([12])\."), r".mlp.fc\1."),
    (re.compile(r"\.ffn\.0\."), ".mlp.fc1."),
    (re.compile(r"\.ffn\.2\."), ".mlp.fc2."),
    (re.compile(r"\.layer_scale_1\."), ".self_attn_layer_scale."),
    (re.compile(r"\.layer_scale_2\."), ".mlp_layer_scale."),
)
# Older files of the package have the first name, newer files the second one. The third one is that
# of version 2 of the MOSS Audio Tokenizer.
_QKV = re.compile(r"^(.+\.layers\.\d+\.self_attn\.)in_proj(_weight|s\.0\.weight|\.weight)$")


def layer_name(published: str) -> str:
    """Returns the name of a weight in `WindowTransformer`. `attention_rows` renames the projection
    of queries, keys and values.
    """
    for pattern, replacement in _RENAMED:
        published = pattern.sub(replacement, published)
    return published


def attention_rows(
    name: str, value: torch.Tensor, heads: int, key_heads: int | None = None
) -> dict[str, torch.Tensor]:
    """Splits the projection of queries, keys and values of a layer. Other weights are returned as
    they are.

    The published code rotates pairs of neighbouring channels; `WindowTransformer`, pairs of a
    channel of the first half of a head and a channel of its second half. So the rows of queries and
    keys change places.

    Args:
        name: name of the weight, from `layer_name`.
        key_heads: heads of its keys and values; None for `heads`.
    """
    match, key_heads = _QKV.match(name), key_heads or heads
    all_heads = heads + 2 * key_heads
    if match is None or not _splits(value, all_heads):
        return {name: value}
    size = len(value) // all_heads
    q, k, v = value.split([heads * size, key_heads * size, key_heads * size])
    return {
        f"{match[1]}q_proj.weight": _halves(q, heads),
        f"{match[1]}k_proj.weight": _halves(k, key_heads),
        f"{match[1]}v_proj.weight": v,
    }


def _splits(value: torch.Tensor, all_heads: int) -> bool:
    """Returns whether a tensor has the rows of queries, keys and values of heads with pairs. The
    later check of names rejects any other tensor.
    """
    return isinstance(value, torch.Tensor) and value.dim() == 2 and not len(value) % (2 * all_heads)


def _halves(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Moves the even rows of every head before its odd rows."""
    pairs = rows.reshape(heads, -1, 2, rows.shape[1])
    return pairs.transpose(1, 2).reshape(rows.shape)

"""Weights of the package `moshi` become those of `WindowTransformer`: names, and rows of heads."""

from __future__ import annotations

import re

import torch
from torch import nn

from token2wav.layers.feed_forward import FeedForward
from token2wav.layers.window_transformer import TransformerSizes, WindowTransformer
from token2wav.networks.moshi_layers import attention_rows
from token2wav.published.weight_names import MOSHI_LAYERS

LAYER = "transformer.layers.0"


def network(heads: int, size: int, width: int, key_heads: int | None = None) -> nn.Module:
    sizes = TransformerSizes(1, width, heads, size, 4, 10_000.0, key_heads=key_heads)
    transformer = WindowTransformer(sizes, nn.LayerNorm, lambda: FeedForward(width, width))
    return nn.ModuleDict({"transformer": transformer})


def test_names() -> None:
    for published, name in (
        ("self_attn.out_projs.0.weight", "self_attn.o_proj.weight"),
        ("self_attn.out_proj.weight", "self_attn.o_proj.weight"),
        ("norm1.bias", "input_layernorm.bias"),
        ("linear2.weight", "mlp.fc2.weight"),
        ("ffn.0.weight", "mlp.fc1.weight"),
        ("layer_scale_2.scale", "mlp_layer_scale.scale"),
    ):
        renamed = f"{LAYER}.{published}"
        for pattern, replacement in MOSHI_LAYERS:
            renamed = re.sub(pattern, replacement, renamed)
        assert renamed == f"{LAYER}.{name}"


def test_pairs_of_neighbours_become_pairs_of_halves() -> None:
    heads, size, width = 2, 4, 3
    rows = torch.arange(3 * heads * size)[:, None] * torch.ones(1, width)
    module = network(heads, size, width)
    split = attention_rows(f"{LAYER}.self_attn.in_proj_weight", rows, module)
    q, k, v = (split[f"{LAYER}.self_attn.{name}_proj.weight"][:, 0].tolist() for name in "qkv")
    assert q == [0, 2, 1, 3, 4, 6, 5, 7]
    assert k == [8 + row for row in q]
    assert v == [16.0 + row for row in range(8)]


def test_fewer_heads_of_keys() -> None:
    module = network(4, 4, 3, key_heads=2)
    split = attention_rows(f"{LAYER}.self_attn.in_proj.weight", torch.ones(8 * 4, 3), module)
    assert [len(value) for value in split.values()] == [16, 8, 8]


def test_other_weights_stay() -> None:
    value, module = torch.ones(7, 3), network(2, 4, 3)  # no rows of heads
    for name in (
        f"{LAYER}.self_attn.in_proj_weight",
        f"{LAYER}.norm1.weight",
        "transformer.layers.1.self_attn.in_proj_weight",
    ):
        assert attention_rows(name, value, module) == {name: value}

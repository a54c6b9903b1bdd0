"""CosyVoice2's conformer encoder, which turns embedded tokens into hidden vectors of mel frames.

A token attends to its own block and to all earlier blocks, so keys and values of finished blocks
never change. The same layers compute whole sequences, the next chunk of a stream, or a batch of
blocks of many streams: the attention and the convolution states are arguments. The parameters have
the names that public `flow.pt` files use below `encoder.`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from token2wav.config.block_grid import BlockGrid
from token2wav.layers.convolutions import causal_conv
from token2wav.layers.feed_forward import FeedForward
from token2wav.layers.lookahead import PreLookahead, convolved
from token2wav.layers.streaming import OFFLINE, KeyValueSpec, StreamStep
from token2wav.networks.masks import attention_bias
from token2wav.published.sizes import ConformerConfig

_LOOKBEHIND = 2  # tokens that each causal convolution reaches back
_LAYER_EPS = 1e-12  # epsilon of the norms within layers; the other norms have torch's default
_POSITION_BASE = 10000.0
_TABLE_POSITIONS = 8192  # largest distance for which a layer stores its projected positions

# Computes attention (B, T, size) from the index of a layer, its attention module, and its queries,
# keys and values (B, T, size).
LayerAttention = Callable[
    [int, "RelativeAttention", torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor
]
Attend = Callable[
    ["RelativeAttention", torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor
]  # the same for one layer


class ConformerAttention(Protocol):
    """Attention of all layers over the positions that are visible to them."""

    def at_rate(self, x: torch.Tensor, rate: int) -> LayerAttention:
        """Returns the attention of the layers that have `rate` positions per token. They share the
        positions of their input x (B, T, size).
        """


class ConformerContext(Protocol):
    """Keys and values of the tokens before a chunk of a stream.

    Positions count tokens from the start of the prompt.
    """

    @property
    def start(self) -> int:
        """Position of the first token of the chunk."""

    @property
    def past(self) -> Sequence[tuple[int, int]]:
        """Start and stop of each run of earlier positions that the layers attend to."""

    def attend(
        self, layer: int, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores the keys and values (B, T, size) of the chunk in a layer. Returns the keys and
        values of the past and of the chunk, each (B, past + T, size).
        """


class _Whole:
    start = 0
    past: Sequence[tuple[int, int]] = ()

    def attend(
        self, layer: int, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return k, v


WHOLE: ConformerContext = _Whole()  # context of whole sequences


@dataclass(frozen=True, eq=False)
class SequenceAttention:
    """`ConformerAttention` of whole sequences, or of the next chunk of a stream."""

    grid: BlockGrid | None  # block grid, in tokens; None for full attention, which has no chunks
    context: ConformerContext = WHOLE  # keys and values before the chunk

    def at_rate(self, x: torch.Tensor, rate: int) -> LayerAttention:
        positions = _Positions.of(x, self.grid, self.context, rate)

        def attend(
            layer: int,
            attention: RelativeAttention,
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
        ) -> torch.Tensor:
            return attention.attend(q, *self.context.attend(layer, k, v), positions)

        return attend


class Conformer(nn.Module):
    """Conformer encoder. In order, it has the look-ahead layer, conformer layers at the token rate,
    upsampling, and conformer layers at the frame rate.

    Args:
        ratio: mel frames per token.
    """

    lookbehind = _LOOKBEHIND

    def __init__(self, sizes: ConformerConfig, lookahead: int, ratio: int) -> None:
        super().__init__()
        size, self.ratio = sizes.size, ratio
        self.embed = _Embedding(size)
        self.pre_lookahead_layer = PreLookahead(size, size, lookahead, _LOOKBEHIND)
        self.encoders = nn.ModuleList(ConformerLayer(sizes) for _ in range(sizes.layers))
        self.up_layer = _Upsampling(size, ratio)
        self.up_embed = _Embedding(size)
        self.up_encoders = nn.ModuleList(ConformerLayer(sizes) for _ in range(sizes.up_layers))
        self.after_norm = nn.LayerNorm(size)

    @property
    def key_value_specs(self) -> tuple[KeyValueSpec, ...]:
        """Specs of the layers at the token rate, then of the layers at the frame rate."""
        [size] = self.after_norm.normalized_shape
        return (
            KeyValueSpec(len(self.encoders), size, 1),
            KeyValueSpec(len(self.up_encoders), size, self.ratio),
        )

    def forward(
        self,
        x: torch.Tensor,
        attention: ConformerAttention,
        step: StreamStep = OFFLINE,
        *,
        last: bool = True,
    ) -> torch.Tensor:
        """Encodes whole sequences, or the next chunk of streams with the same result. Returns (B,
        ratio * n, size). For x (B, n + right, size), outputs of `embed`, and for `last` see
        `PreLookahead`.
        """
        x = self.pre_lookahead_layer(x, step, last=last)
        return self.encode(x, attention, step)

    def encode(
        self, x: torch.Tensor, attention: ConformerAttention, step: StreamStep = OFFLINE
    ) -> torch.Tensor:
        """Encodes as `forward` does, but takes the outputs (B, n, size) of the look-ahead layer."""
        attend = attention.at_rate(x, 1)
        for index, layer in enumerate(self.encoders):
            x = layer(x, partial(attend, index))
        x = self.up_embed(self.up_layer(x, step))
        attend = attention.at_rate(x, self.ratio)
        for index, layer in enumerate(self.up_encoders, len(self.encoders)):
            x = layer(x, partial(attend, index))
        return self.after_norm(x)


class FlatConformer(nn.Module):
    """Conformer encoder at the token rate alone, for whole sequences."""

    def __init__(self, sizes: ConformerConfig) -> None:
        super().__init__()
        self.embed = _Embedding(sizes.size)
        self.encoders = nn.ModuleList(ConformerLayer(sizes) for _ in range(sizes.layers))
        self.after_norm = nn.LayerNorm(sizes.size)

    def forward(self, x: torch.Tensor, grid: BlockGrid | None = None) -> torch.Tensor:
        """Encodes embedded tokens (B, n, size). `grid` limits attention; None is full attention."""
        x = self.embed(x)
        attend = SequenceAttention(grid).at_rate(x, 1)
        for index, layer in enumerate(self.encoders):
            x = layer(x, partial(attend, index))
        return self.after_norm(x)


class ConformerLayer(nn.Module):
    def __init__(self, sizes: ConformerConfig) -> None:
        super().__init__()
        size = sizes.size
        self.self_attn = RelativeAttention(size, sizes.heads)
        self.feed_forward = FeedForward(size, sizes.units, F.silu, names=("w_1", "w_2"), bias=True)
        self.norm_ff = nn.LayerNorm(size, eps=_LAYER_EPS)
        self.norm_mha = nn.LayerNorm(size, eps=_LAYER_EPS)

    def forward(self, x: torch.Tensor, attend: Attend) -> torch.Tensor:
        x = x + self.self_attn(self.norm_mha(x), attend)
        return x + self.feed_forward(self.norm_ff(x))


class RelativeAttention(nn.Module):
    """Multi-head self-attention with relative positions, in the form of Transformer-XL and ESPnet.

    The score of a query and a key is the sum of two products: query times key, and query times the
    projected sinusoids of the distance between the two. The projected sinusoids depend on the
    distance alone, so they are read from a table.
    """

    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.linear_q = nn.Linear(size, size)
        self.linear_k = nn.Linear(size, size)
        self.linear_v = nn.Linear(size, size)
        self.linear_out = nn.Linear(size, size)
        self.linear_pos = nn.Linear(size, size, bias=False)
        self.pos_bias_u = nn.Parameter(torch.zeros(heads, size // heads))
        self.pos_bias_v = nn.Parameter(torch.zeros(heads, size // heads))
        # Distances in the table, in falling order, and the projected sinusoids of each.
        self._table: tuple[range, torch.Tensor] | None = None

    def forward(self, x: torch.Tensor, attend: Attend) -> torch.Tensor:
        attention = attend(self, self.linear_q(x), self.linear_k(x), self.linear_v(x))
        return self.linear_out(attention)

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: _Positions
    ) -> torch.Tensor:
        """Computes attention of queries (B, T, size) over keys and values (B, keys, size)."""
        q, k, v = (self._split(value) for value in (q, k, v))
        biased = q + self.pos_bias_v[:, None]
        scores = torch.cat(
            [self._by_distance(biased, positions.start, *span) for span in positions.spans], dim=-1
        )
        scores = scores / math.sqrt(q.shape[-1])
        if positions.bias is not None:
            scores = scores + positions.bias
        h = F.scaled_dot_product_attention(q + self.pos_bias_u[:, None], k, v, attn_mask=scores)
        return h.transpose(1, 2).flatten(2)

    def position_queries(self, q: torch.Tensor) -> torch.Tensor:
        """Projects queries (..., size) to the space of sinusoids, (heads, queries, size),
        contiguous. Their product with the sinusoids of a distance is the part of the score that
        depends on this distance.
        """
        heads = (q.unflatten(-1, (self.heads, -1)) + self.pos_bias_v).flatten(0, -3)
        weight = self.linear_pos.weight.unflatten(0, (self.heads, -1))  # (heads, dim, size)
        return torch.bmm(heads.transpose(0, 1), weight)

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(2, (self.heads, -1)).transpose(1, 2)

    def _by_distance(self, q: torch.Tensor, start: int, first: int, stop: int) -> torch.Tensor:
        """Computes the part of the scores (B, heads, T, keys) that depends on the distance between
        query and key. Query 0 of q (B, heads, T, d) has the position `start`, and key 0 the
        position `first`.
        """
        queries, keys = q.shape[2], stop - first
        nearest, farthest = start - stop + 1, start + queries - 1 - first
        # (B, heads, T, distances), farthest first
        scores = q @ self._projected(nearest, farthest).transpose(1, 2)
        # The score of query i and key j is in row i and column queries - 1 - i + j. A view selects
        # these scores without a copy: each of its rows begins one column to the left of the row
        # before.
        rows, columns = scores.shape[:2], scores.shape[3]
        strides = (rows[1] * queries * columns, queries * columns, columns - 1, 1)
        return scores.contiguous().as_strided((*rows, queries, keys), strides, queries - 1)

    def _projected(self, nearest: int, farthest: int) -> torch.Tensor:
        """Returns the projected sinusoids of distances, (heads, farthest - nearest + 1, size /
        heads), the farthest first.
        """
        if max(-nearest, farthest) >= _TABLE_POSITIONS:
            return self._project(farthest, nearest)
        table = self._table
        if table is None or table[0].start < farthest or table[0][-1] > nearest:
            most, least = (farthest, nearest) if table is None else (table[0].start, table[0][-1])
            # The new table has twice the distance that is needed now, because streams grow.
            most = most if most >= farthest else min(2 * farthest, _TABLE_POSITIONS)
            least = least if least <= nearest else max(2 * nearest, -_TABLE_POSITIONS)
            table = self._table = range(most, least - 1, -1), self._project(most, least)
        offset = table[0].start - farthest
        return table[1][:, offset : offset + farthest - nearest + 1]

    def _project(self, farthest: int, nearest: int) -> torch.Tensor:
        weight = self.linear_pos.weight
        distances = torch.arange(farthest, nearest - 1, -1, device=weight.device)
        return (
            self.linear_pos(_sinusoids(distances, weight.shape[1]).to(weight))
            .unflatten(1, (self.heads, -1))
            .transpose(0, 1)
        )


class _Embedding(nn.Module):
    """Linear layer, norm and scale. It adds no positions, because attention uses relative ones."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.out = nn.Sequential(nn.Linear(size, size), nn.LayerNorm(size))
        self._scale = math.sqrt(size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(x) * self._scale


class _Upsampling(nn.Module):
    def __init__(self, size: int, ratio: int) -> None:
        super().__init__()
        self.ratio = ratio
        self.conv = causal_conv(size, size, _LOOKBEHIND * ratio + 1)
        self.conv.place()

    def forward(self, x: torch.Tensor, step: StreamStep) -> torch.Tensor:
        """Upsamples (B, T, size) to (B, ratio * T, size)."""
        x = x.repeat_interleave(self.ratio, dim=1).transpose(1, 2)
        x = step.with_context(self.conv, x, self.conv.left)
        return convolved(self.conv, x).transpose(1, 2)


@dataclass(frozen=True, eq=False)
class _Positions:
    """Positions of queries and keys, which all layers of one rate share."""

    start: int
    spans: list[tuple[int, int]]  # start and stop of each run of keys, in the order of the keys
    bias: torch.Tensor | None  # (T, keys) attention score bias; None if all keys are visible

    @classmethod
    def of(
        cls, x: torch.Tensor, grid: BlockGrid | None, context: ConformerContext, rate: int
    ) -> _Positions:
        start = rate * context.start
        spans = [(rate * first, rate * stop) for first, stop in context.past]
        if spans and spans[-1][1] == start:
            spans[-1] = spans[-1][0], start + x.shape[1]
        else:
            spans.append((start, start + x.shape[1]))
        if grid is None:
            return cls(start, spans, None)
        queries = torch.arange(start, start + x.shape[1])
        keys = torch.cat([torch.arange(*span) for span in spans])
        allowed = grid.scaled(rate).allows(queries, keys)
        return cls(start, spans, None if allowed.all() else attention_bias(allowed).to(x))


def frequencies(size: int, device: torch.device) -> torch.Tensor:
    """Computes the angles per position (size / 2,) of sinusoids."""
    exponents = torch.arange(0, size, 2, device=device).float()
    return torch.exp(exponents * -(math.log(_POSITION_BASE) / size))


def _sinusoids(positions: torch.Tensor, size: int) -> torch.Tensor:
    angles = positions.float()[:, None] * frequencies(size, positions.device)
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1)  # (T, size), alternating

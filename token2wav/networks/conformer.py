"""CosyVoice2's conformer encoder, which turns embedded tokens into hidden vectors of mel frames,
two for each token.

Attention covers the block of a token and all earlier blocks, so keys and values of finished blocks
never change. With a state the encoder continues after the last chunk. Without one it computes whole
sequences. Parameters have the names of public `flow.pt` files below `encoder.`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn

from token2wav.networks.lookahead import PreLookahead
from token2wav.networks.masks import BlockMask, attention_bias
from token2wav.networks.streaming import OFFLINE, Streaming, StreamStep, causal_conv

RATIO = 2  # mel frames per token
LOOKBEHIND = 2  # tokens that the second convolution of the look-ahead layer reaches back
_LAYER_EPS = 1e-12  # epsilon of the norms within layers; the other norms have torch's default
_POSITION_BASE = 10000.0
_TABLE_POSITIONS = 8192  # largest distance for which a layer stores its projected positions


@dataclass(frozen=True, eq=False)
class _Run:
    """Keys and values of consecutive positions.

    Attributes:
        start: first position.
        k, v: (B, T, size) keys and values.
    """

    start: int
    k: torch.Tensor
    v: torch.Tensor

    @property
    def stop(self) -> int:
        return self.start + self.k.shape[1]

    def part(self, start: int, stop: int) -> _Run:
        """Returns the part of the run from position `start` to `stop`."""
        first, last = (min(max(at, self.start), self.stop) - self.start for at in (start, stop))
        return _Run(self.start + first, self.k[:, first:last], self.v[:, first:last])


class ConformerState:
    """State of streams in the encoder: keys and values of every layer, and the state of the
    upsampling convolution.

    Args:
        encoder: encoder that the state belongs to.
        batch: number of streams, all at the same position.
        start: position of the first token, for streams whose blocks do not begin with it.

    Attributes:
        tokens: position of the next token.
        runs: keys and values of every layer: first layers at the token rate, then layers at the
            frame rate.
        tail: state of the upsampling convolution, see `StreamStep.state`.
    """

    def __init__(self, encoder: Conformer, batch: int = 1, start: int = 0) -> None:
        conv = encoder.up_layer.conv
        self.tokens = start
        self.runs: list[list[_Run]] = [
            [] for _ in range(len(encoder.encoders) + len(encoder.up_encoders))
        ]
        self.tail: dict[Streaming, torch.Tensor] = {
            conv: conv.weight.new_zeros(batch, *conv.state_shape)
        }
        self._rates = [1] * len(encoder.encoders) + [RATIO] * len(encoder.up_encoders)

    def fork(self) -> ConformerState:
        """Copies the state for a stream that continues alone; keys and values are shared."""
        other = object.__new__(ConformerState)
        other.tokens, other._rates = self.tokens, self._rates
        other.runs = [list(runs) for runs in self.runs]
        other.tail = {conv: tail.clone() for conv, tail in self.tail.items()}
        return other

    def forget_unseen(self, mask: BlockMask) -> None:
        """Drops keys and values that no later token can attend to. This bounds the memory."""
        if mask.left_blocks < 0:
            return
        size = mask.block_frames
        kept, needed = mask.prefix_blocks * size, mask.first_needed(self.tokens // size) * size
        for place, rate in enumerate(self._rates):
            parts = [
                part
                for run in self.runs[place]
                for part in (run.part(0, rate * kept), run.part(rate * max(kept, needed), run.stop))
            ]
            self.runs[place] = [part for part in parts if part.stop > part.start]


class Conformer(nn.Module):
    """Encoder: look-ahead layer, conformer layers at the token rate, upsampling by two, conformer
    layers at the frame rate.

    Args:
        size: channels of all layers.
        heads: heads of attention.
        hidden: channels within feed-forward layers.
        layers: number of layers before upsampling.
        up_layers: number of layers after upsampling.
        lookahead: tokens to the right that the look-ahead layer depends on.
    """

    def __init__(
        self, size: int, heads: int, hidden: int, layers: int, up_layers: int, lookahead: int
    ) -> None:
        super().__init__()
        self.embed = _Embedding(size)
        self.pre_lookahead_layer = PreLookahead(size, size, lookahead, LOOKBEHIND)
        self.encoders = nn.ModuleList(ConformerLayer(size, heads, hidden) for _ in range(layers))
        self.up_layer = _Upsampling(size)
        self.up_embed = _Embedding(size)
        self.up_encoders = nn.ModuleList(
            ConformerLayer(size, heads, hidden) for _ in range(up_layers)
        )
        self.after_norm = nn.LayerNorm(size)

    @property
    def token_bytes(self) -> int:
        """Bytes of the keys and values of one token."""
        layers = len(self.encoders) + RATIO * len(self.up_encoders)
        return 2 * layers * self.after_norm.normalized_shape[0] * self.after_norm.weight.itemsize

    def forward(
        self,
        x: torch.Tensor,
        mask: BlockMask | None,
        state: ConformerState | None = None,
        *,
        left: int = 0,
        last: bool = True,
    ) -> torch.Tensor:
        """Encodes whole sequences, or the next chunk of streams with the same result.

        Args:
            x: (B, left + n + right, size) embedded tokens. `right` is the look-ahead, or 0 if
                `last`.
            mask: attention mask, in tokens; None for full attention, which has no chunks.
            state: state of the streams, which is advanced by n tokens; None for whole sequences. A
                chunk ends with a block unless it is the last.
            left: number of leading tokens that are context only: `LOOKBEHIND`, or fewer if fewer
                tokens come before.
            last: whether the streams end here; zeros then replace the look-ahead.

        Returns:
            (B, RATIO * n, size) hidden vectors.
        """
        return self.encode(
            self.pre_lookahead_layer(self.embed(x), left=left, last=last), mask, state
        )

    def encode(
        self, x: torch.Tensor, mask: BlockMask | None, state: ConformerState | None
    ) -> torch.Tensor:
        """Encodes as `forward` does, from outputs (B, n, size) of the look-ahead layer."""
        start = state.tokens if state else 0
        runs = (
            state.runs if state else [[] for _ in range(len(self.encoders) + len(self.up_encoders))]
        )
        tokens, up_runs = x.shape[1], runs[len(self.encoders) :]
        bias = _bias(mask, runs[0], start, x)  # same for all layers of a rate
        for layer, past in zip(self.encoders, runs, strict=False):
            x = layer(x, start, bias, past)
        step = OFFLINE if state is None else StreamStep(state.tail, first=not start, frames=tokens)
        x = self.up_embed(self.up_layer(x, step))
        up_mask = mask and replace(mask, block_frames=RATIO * mask.block_frames)
        bias = _bias(up_mask, up_runs[0], RATIO * start, x)
        for layer, past in zip(self.up_encoders, up_runs, strict=True):
            x = layer(x, RATIO * start, bias, past)
        if state:
            state.tokens += tokens
            if mask:
                state.forget_unseen(mask)
        return self.after_norm(x)


class ConformerLayer(nn.Module):
    """Conformer layer: attention with relative positions and a feed-forward layer, each after a
    norm.
    """

    def __init__(self, size: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.self_attn = RelativeAttention(size, heads)
        self.feed_forward = _FeedForward(size, hidden)
        self.norm_ff = nn.LayerNorm(size, eps=_LAYER_EPS)
        self.norm_mha = nn.LayerNorm(size, eps=_LAYER_EPS)

    def forward(
        self, x: torch.Tensor, start: int, bias: torch.Tensor | None, past: list[_Run]
    ) -> torch.Tensor:
        """Computes x (B, T, size), which starts at position `start`, and appends its keys and
        values to `past`.
        """
        x = x + self.self_attn(self.norm_mha(x), start, bias, past)
        return x + self.feed_forward(self.norm_ff(x))


class RelativeAttention(nn.Module):
    """Multi-head self-attention with relative positions, in the form of Transformer-XL and ESPnet.

    The score of a key is its product with the query, plus the product of the query and the
    projected sinusoids of their distance. The projection depends on the distance alone, so it is a
    table.
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
        self._table: tuple[range, torch.Tensor] | None = None  # distances, falling; projections

    def forward(
        self, x: torch.Tensor, start: int, bias: torch.Tensor | None, past: list[_Run]
    ) -> torch.Tensor:
        """Computes attention of x (B, T, size), which starts at position `start`. Its keys and
        values are first appended to `past`.

        `bias` (T, keys) is added to scores; None for full attention.
        """
        past.append(_Run(start, self.linear_k(x), self.linear_v(x)))
        q = self._split(self.linear_q(x))
        k, v = (
            self._split(torch.cat(parts, dim=1))
            for parts in zip(*((run.k, run.v) for run in past), strict=True)
        )
        biased = q + self.pos_bias_v[:, None]
        scores = torch.cat(
            [self._by_distance(biased, start, *span) for span in _spans(past)], dim=-1
        )
        scores = scores / math.sqrt(q.shape[-1])
        if bias is not None:
            scores = scores + bias
        h = F.scaled_dot_product_attention(q + self.pos_bias_u[:, None], k, v, attn_mask=scores)
        return self.linear_out(h.transpose(1, 2).flatten(2))

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        """Reshapes (B, T, size) to (B, heads, T, size / heads)."""
        return x.unflatten(2, (self.heads, -1)).transpose(1, 2)

    def _by_distance(self, q: torch.Tensor, start: int, first: int, stop: int) -> torch.Tensor:
        """Computes the scores (B, heads, T, keys) of queries q (B, heads, T, d) by the distance of
        keys. Queries start at position `start`; keys are the positions from `first` to `stop`.
        """
        queries, keys = q.shape[2], stop - first
        nearest, farthest = start - stop + 1, start + queries - 1 - first
        # (B, heads, T, distances), farthest first
        scores = q @ self._projected(nearest, farthest).transpose(1, 2)
        # The score of query i and key j is in column queries - 1 - i + j. So a view selects it, in
        # which every row begins one column to the left of the row before.
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
            # Twice the distance that is needed, because streams continue.
            most = most if most >= farthest else min(2 * farthest, _TABLE_POSITIONS)
            least = least if least <= nearest else max(2 * nearest, -_TABLE_POSITIONS)
            table = self._table = range(most, least - 1, -1), self._project(most, least)
        at = table[0].start - farthest
        return table[1][:, at : at + farthest - nearest + 1]

    def _project(self, farthest: int, nearest: int) -> torch.Tensor:
        weight = self.linear_pos.weight
        distances = torch.arange(farthest, nearest - 1, -1, device=weight.device)
        return (
            self.linear_pos(_sinusoids(distances, weight.shape[1]).to(weight))
            .unflatten(1, (self.heads, -1))
            .transpose(0, 1)
        )


class _Embedding(nn.Module):
    """Linear layer, norm and scale. Other encoders add positions after the scale."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.out = nn.Sequential(nn.Linear(size, size), nn.LayerNorm(size))
        self._scale = math.sqrt(size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(x) * self._scale


class _Upsampling(nn.Module):
    """Upsampling: every position is repeated, then a causal convolution."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.conv = causal_conv(size, size, 2 * RATIO + 1)

    def forward(self, x: torch.Tensor, step: StreamStep) -> torch.Tensor:
        """Upsamples (B, T, size) to (B, RATIO * T, size)."""
        return self.conv(x.repeat_interleave(RATIO, dim=1).transpose(1, 2), step).transpose(1, 2)


class _FeedForward(nn.Module):
    def __init__(self, size: int, hidden: int) -> None:
        super().__init__()
        self.w_1 = nn.Linear(size, hidden)
        self.w_2 = nn.Linear(hidden, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w_2(F.silu(self.w_1(x)))


def _bias(
    mask: BlockMask | None, past: Sequence[_Run], start: int, x: torch.Tensor
) -> torch.Tensor | None:
    """Computes the bias (T, keys) of attention scores of x (B, T, size), which starts at position
    `start`, over past keys and its own; None if all keys are visible.
    """
    if mask is None:
        return None
    queries = torch.arange(start, start + x.shape[1])
    keys = torch.cat([*(torch.arange(run.start, run.stop) for run in past), queries])
    allowed = mask.allows(queries, keys)
    return None if allowed.all() else attention_bias(allowed).to(x)


def _spans(runs: Sequence[_Run]) -> list[tuple[int, int]]:
    """Returns start and stop of the runs; consecutive runs are joined."""
    spans: list[tuple[int, int]] = []
    for run in runs:
        if spans and spans[-1][1] == run.start:
            spans[-1] = spans[-1][0], run.stop
        else:
            spans.append((run.start, run.stop))
    return spans


def _sinusoids(positions: torch.Tensor, size: int) -> torch.Tensor:
    """Computes alternating sines and cosines (T, size) of positions (T,)."""
    exponents = torch.arange(0, size, 2, device=positions.device).float()
    angles = positions.float()[:, None] * torch.exp(exponents * -(math.log(_POSITION_BASE) / size))
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1)

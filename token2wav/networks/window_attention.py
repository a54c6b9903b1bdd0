"""Causal attention with a sliding window, as streaming layers: a position attends to itself and to
the positions shortly before it.

The keys and values of a window have a fixed size, so they are a state like the context of a
convolution. A stream of any length needs the same memory.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from token2wav.networks.streaming import OFFLINE, Streaming, StreamStep

_BLOCK = 512  # queries of a whole sequence that are computed at once; bounds the memory of the mask


class PositionCounter(Streaming):
    """Counter of the positions of each stream, from 0 at its first position."""

    state_shape = (1,)

    @property
    def state_dtype(self) -> torch.dtype:
        return torch.int64

    def forward(self, x: torch.Tensor, step: StreamStep = OFFLINE) -> torch.Tensor:
        """Returns the positions of x (B, T, C), (B, T) int64 or (1, T) if all rows are equal."""
        positions = torch.arange(x.shape[1], device=x.device)[None]
        if step.state is None:
            return positions
        if not step.first:
            positions = positions + step.state[self]
        step.save_state(self, positions[:, -1:] + 1)
        return positions


def rotary_angles(
    positions: torch.Tensor, dim_head: int, base: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the cosines and sines (B, T, dim_head) float32 of rotary embeddings of positions
    (B, T). The two halves of a head have equal angles.
    """
    exponents = torch.arange(0, dim_head, 2, device=positions.device) / dim_head
    angles = positions[..., None].float() * base**-exponents
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotates every head of x (B, T, heads, dim_head) by the angles of its position. The pairs are
    a channel of the first half and a channel of the second half.
    """
    cos, sin = (value[:, :, None].to(x.dtype) for value in angles)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class WindowAttention(Streaming):
    """Attention of one layer over the last `window` positions, with the keys and values of earlier
    steps as its state. It has no weights.

    Args:
        heads: number of heads.
        dim_head: channels of a head.
        window: number of positions that a position attends to, itself included.
    """

    def __init__(self, heads: int, dim_head: int, window: int) -> None:
        super().__init__()
        self.window = window
        self.state_shape = (2, window - 1, heads, dim_head)  # keys, then values

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        positions: torch.Tensor,
        step: StreamStep = OFFLINE,
    ) -> torch.Tensor:
        """Computes attention of queries (B, T, heads, dim_head), in the same shape.

        Args:
            q: queries.
            k: keys, of the same shape.
            v: values, of the same shape.
            positions: (B, T) positions in the streams, from `PositionCounter`.
            step: position in the streams, and the states.
        """
        if step.state is None:
            return self._whole(q, k, v)
        past = torch.zeros_like(step.state[self]) if step.first else step.state[self]
        kept = self.window - 1
        keys, values = (
            torch.cat((old.to(new.dtype), new), dim=1)
            for old, new in zip(past.unbind(1), (k, v), strict=True)
        )
        step.save_state(self, torch.stack((keys, values), dim=1)[:, :, keys.shape[1] - kept :])
        index = torch.arange(keys.shape[1], device=q.device)
        query = torch.arange(q.shape[1], device=q.device)[:, None]
        visible = (index >= query) & (index <= query + kept)
        # before the first position of a stream there are no keys
        present = index >= kept - positions[:, :1]
        return _attention(q, keys, values, visible & present[:, None])

    def _whole(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Computes attention of whole sequences, some positions at a time."""
        parts = []
        for start in range(0, q.shape[1], _BLOCK):
            stop = min(start + _BLOCK, q.shape[1])
            first = max(0, start - self.window + 1)
            index = torch.arange(first, stop, device=q.device)
            query = torch.arange(start, stop, device=q.device)[:, None]
            visible = (index <= query) & (index > query - self.window)
            parts.append(
                _attention(q[:, start:stop], k[:, first:stop], v[:, first:stop], visible[None])
            )
        return torch.cat(parts, dim=1)


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor
) -> torch.Tensor:
    """Computes attention of q (B, T, heads, dim_head) over k and v (B, S, heads, dim_head).

    Args:
        q: queries.
        k: keys.
        v: values.
        visible: (B or 1, T, S) whether a query attends to a key. A query attends to itself at
            least.
    """
    q, k, v = (value.transpose(1, 2) for value in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible[:, None]).transpose(1, 2)

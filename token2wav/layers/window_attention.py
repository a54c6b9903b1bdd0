"""Causal attention with a sliding window, as streaming layers: a position attends to itself and to
the positions shortly before it.

The keys and values of a window are a state of fixed size, so a stream of any length needs the same
memory. The state is a ring, so a step writes the new keys and values only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from token2wav.layers.streaming import OFFLINE, StatesInPlace, Streaming, StreamStep

_BLOCK = 512  # queries of a whole sequence that are computed at once; bounds the mask's memory
# Positions that are added to a window at once. A longer step is computed in parts.
_MOST_NEW = 32


@dataclass(frozen=True, eq=False)
class StreamKeys:
    """Keys of one stream in a part of a step."""

    slot: int  # of the first new position in the ring
    count: int  # keys in the ring; that of a young stream is not full
    # (n, keys) values to add to the scores, 0 or -inf; None if every position attends to all keys.
    mask: torch.Tensor | None


@dataclass(frozen=True, eq=False)
class StepPart:
    """Positions of a step that are added to the windows at once, and the keys that they attend to.

    Attributes:
        streams: keys of each stream, for rings that are a tensor for each stream; else empty.
        slots: (B or 1, n) slots of the positions in rings that are one tensor; else None. In an
            exported graph, (B or 1, ring) indices of the keys that the rings hold after the step,
            among the old keys of the rings and the keys of the step.
        mask: (B or 1, n, keys) values to add to the scores of all streams, or None like `slots`.
            The keys are those of the rings; in an exported graph, the keys of the step follow.
    """

    start: int
    stop: int
    streams: Sequence[StreamKeys] = ()
    slots: torch.Tensor | None = None
    mask: torch.Tensor | None = None


@dataclass(frozen=True, eq=False)
class Positions:
    """Positions of a step in the streams, for all attention layers of a network."""

    values: torch.Tensor  # (B, T) int64 positions, or (1, T) if all rows are equal
    parts: Sequence[StepPart] = ()  # of the step; none for whole sequences and for a kernel


class PositionCounter(Streaming):
    """Counter of the positions of each stream, from 0 at its first position."""

    state_shape = (1,)

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = window

    @property
    def state_dtype(self) -> torch.dtype:
        return torch.int64

    def forward(
        self, x: torch.Tensor, attention: WindowAttention, step: StreamStep = OFFLINE
    ) -> Positions:
        """Returns the positions of x (B, T, C), for attention layers with a state like that of
        `attention`.
        """
        values = torch.arange(x.shape[1], device=x.device)[None]
        if step.state is None:
            return Positions(values)
        if not step.first:
            values = values + step.state[self]
        step.save_state(self, (values[:, -1:] + 1).expand(x.shape[0], 1))
        if torch.compiler.is_exporting():
            return Positions(values, [self._part_of_graph(values)])
        rings = step.state[attention]
        if isinstance(rings, StatesInPlace):
            return Positions(values)
        starts = range(0, x.shape[1], _MOST_NEW)
        parts = [(start, min(start + _MOST_NEW, x.shape[1])) for start in starts]
        if isinstance(rings, list):
            rows = values.expand(x.shape[0], -1)
            return Positions(
                values, [self._part_of_each(rows[:, start:stop], start) for start, stop in parts]
            )
        return Positions(
            values, [self._part_of_all(values[:, start:stop], start) for start, stop in parts]
        )

    def _part_of_all(self, positions: torch.Tensor, start: int) -> StepPart:
        ring = ring_length(self.window)
        last = positions[:, -1:, None]
        # position of the key in each slot: the latest one that was stored there
        keys = last - (last - torch.arange(ring, device=positions.device)) % ring
        mask = _mask_of(positions[..., None], keys, self.window)
        stop = start + positions.shape[1]
        return StepPart(start, stop, slots=positions % ring, mask=mask)

    def _part_of_graph(self, positions: torch.Tensor) -> StepPart:
        """Makes the only part of a step in an exported graph, where a step has any length.

        The keys of the rings come first, then the keys of the step.
        """
        ring = ring_length(self.window)
        slots = torch.arange(ring, device=positions.device)
        past, last = positions[:, :1] - 1, positions[:, -1:]
        keys = torch.cat((past - (past - slots) % ring, positions), dim=1)
        mask = _mask_of(positions[..., None], keys[:, None], self.window)
        latest = last - (last - slots) % ring
        index = torch.where(latest > past, ring + latest - past - 1, slots)
        return StepPart(0, positions.shape[1], slots=index, mask=mask)

    def _part_of_each(self, positions: torch.Tensor, start: int) -> StepPart:
        ring = ring_length(self.window)
        stream_keys: dict[int, StreamKeys] = {}  # by last position
        lasts: list[int] = positions[:, -1].tolist()
        for row, last in enumerate(lasts):
            if last not in stream_keys:
                count, queries = min(last + 1, ring), positions[row][:, None]
                keys = last - (last - torch.arange(count)) % ring
                sees_all = len(queries) == 1 and last < self.window
                mask = None if sees_all else _mask_of(queries, keys, self.window)
                slot = (last + 1 - len(queries)) % ring
                stream_keys[last] = StreamKeys(slot, count, mask)
        return StepPart(start, start + positions.shape[1], [stream_keys[last] for last in lasts])


def ring_length(window: int) -> int:
    """Returns the length of the ring in which a stream keeps keys and values.

    It has room for the new positions of a part, and for the window before the first of them.
    """
    return window - 1 + _MOST_NEW


def _mask_of(queries: torch.Tensor, keys: torch.Tensor, window: int) -> torch.Tensor:
    visible = (keys >= 0) & (keys <= queries) & (keys > queries - window)
    zeros = torch.zeros(visible.shape, device=visible.device)
    return zeros.masked_fill(~visible, -torch.inf)


def rotary_angles(
    positions: torch.Tensor, dim_head: int, base: float, precision: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes rotary cosines and sines (B, T, dim_head) float32 of positions (B, T), rounded to a
    precision. The two halves of a head have equal angles.
    """
    exponents = torch.arange(0, dim_head, 2, device=positions.device) / dim_head
    # Not base**-exponents, whose last bits differ from those of the public code. At far positions
    # some cosines would then be rounded to another value.
    angles = positions[..., None].float() * (base**exponents).reciprocal()
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(precision).float(), angles.sin().to(precision).float()


def rotate(x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotates every head of x (B, T, heads, dim_head) by the angles of its position. A pair is a
    channel of the first half and one of the second half.
    """
    cos, sin = (value[:, :, None].to(x.dtype) for value in angles)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class WindowAttention(Streaming):
    """Attention of one layer over the last `window` positions. It has no weights.

    Position p has the slot p modulo the length of the ring.

    Args:
        heads: heads of keys and values. Queries have as many heads, or a multiple: several heads in
            sequence then share one head of keys.
    """

    state_in_place = True

    def __init__(self, heads: int, dim_head: int, window: int) -> None:
        super().__init__()
        self.window = window
        self.state_shape = (2, ring_length(window), heads, dim_head)  # keys, then values

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        positions: Positions,
        angles: tuple[torch.Tensor, torch.Tensor],
        step: StreamStep = OFFLINE,
    ) -> torch.Tensor:
        """Rotates q (B, T, query heads, dim_head) and k (B, T, heads, dim_head), and computes
        attention over k and v (B, T, heads, dim_head), in the shape of q. `positions` come from
        `PositionCounter`, and `angles` from `rotary_angles`.
        """
        rings: Any = None if step.state is None else step.state[self]
        if isinstance(rings, StatesInPlace):
            assert self.state_kernel is not None
            return self.state_kernel(q, k, v, positions.values, angles, rings, self.window)
        q, k = rotate(q, angles), rotate(k, angles)
        if rings is None:
            return self._whole(q, k, v)
        kv = torch.stack((k, v), dim=1)  # (B, 2, T, heads, dim_head)
        if torch.compiler.is_exporting():
            [part] = positions.parts
            joined = torch.cat((rings, kv), dim=2)
            assert part.slots is not None
            index = part.slots[:, None, :, None, None].expand(rings.shape)
            step.save_state(self, joined.gather(2, index))
            return _masked_attention(q, joined, part)
        attend = self._together if isinstance(rings, torch.Tensor) else self._one_by_one
        if step.first and isinstance(rings, torch.Tensor):
            rings.zero_()  # a NaN of an earlier stream would pass the mask
        parts = [
            attend(q[:, part.start : part.stop], kv[:, :, part.start : part.stop], rings, part)
            for part in positions.parts
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    @staticmethod
    def _together(
        q: torch.Tensor, kv: torch.Tensor, rings: torch.Tensor, part: StepPart
    ) -> torch.Tensor:
        assert part.slots is not None
        index = part.slots[:, None, :, None, None].expand(kv.shape)
        rings.scatter_(2, index, kv.to(rings.dtype))
        return _masked_attention(q, rings.to(q.dtype), part)

    @staticmethod
    def _one_by_one(
        q: torch.Tensor, kv: torch.Tensor, rings: Sequence[torch.Tensor], part: StepPart
    ) -> torch.Tensor:
        queries = q.transpose(1, 2).split(1)  # (1, heads, n, dim_head) each
        outputs = []
        for ring, new, query, stream in zip(
            rings, kv.unbind(0), queries, part.streams, strict=True
        ):
            room = ring.shape[1] - stream.slot
            if (excess := new.shape[1] - room) > 0:
                ring[:, stream.slot :] = new[:, :room]
                ring[:, :excess] = new[:, room:]
            else:
                ring.narrow(1, stream.slot, new.shape[1]).copy_(new)
            keys, values = ring.narrow(1, 0, stream.count).transpose(1, 2).unsqueeze(1).unbind(0)
            outputs.append(_grouped_attention(query, keys, values, stream.mask))
        return torch.cat(outputs).transpose(1, 2)

    def _whole(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
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


def _masked_attention(q: torch.Tensor, kv: torch.Tensor, part: StepPart) -> torch.Tensor:
    """Computes attention of q (B, T, heads, dim_head) over kv (B, 2, S, heads, dim_head), under the
    mask of a part.
    """
    assert part.mask is not None
    keys, values = kv.transpose(2, 3).unbind(1)
    mask = part.mask[:, None].to(q.dtype)
    return _grouped_attention(q.transpose(1, 2), keys, values, mask).transpose(1, 2)


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor
) -> torch.Tensor:
    q, k, v = (value.transpose(1, 2) for value in (q, k, v))
    return _grouped_attention(q, k, v, visible[:, None]).transpose(1, 2)


def _grouped_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """Computes attention of q (B, query heads, T, dim_head) over k and v (B, heads, S, dim_head).

    Query heads that share their keys are further queries of one head, so no key is copied.

    Args:
        mask: broadcast to (B, 1, T, S); None if every query attends to all keys.
    """
    shared = q.shape[1] // k.shape[1]
    if shared == 1:
        return F.scaled_dot_product_attention(q, k, v, mask)
    queries = q.unflatten(1, (-1, shared)).flatten(2, 3)
    mask = None if mask is None else mask.repeat(1, 1, shared, 1)
    # On a GPU the result may be strided as the queries are, so it may have to be copied.
    return F.scaled_dot_product_attention(queries, k, v, mask).reshape(q.shape)

"""Causal attention with a sliding window, as streaming layers: a position attends to itself and to
the positions shortly before it.

The keys and values of a window have a fixed size, so they are a state like the context of a
convolution. A stream of any length needs the same memory. The state is a ring, so a step writes the
new keys and values only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from token2wav.layers.streaming import OFFLINE, Streaming, StreamStep

_BLOCK = 512  # queries of a whole sequence that are computed at once; bounds the memory of the mask
# Positions that are added to a window at once. A longer step is computed in parts.
_MOST_NEW = 32


@dataclass(frozen=True, eq=False)
class StreamKeys:
    """Keys of one stream in a part of a step.

    Attributes:
        place: place of the first new position in the ring.
        count: number of keys. The ring of a young stream is not full.
        mask: (n, keys) values to add to the scores, 0 or -inf; None if every position attends to
            all keys.
    """

    place: int
    count: int
    mask: torch.Tensor | None


@dataclass(frozen=True, eq=False)
class StepPart:
    """Positions of a step that are added to the windows at once, and the keys that they attend to.

    Attributes:
        start, stop: first position of the part in the step, and the position after its last one.
        streams: keys of each stream, for rings that are a tensor for each stream; else empty.
        places: (B or 1, n) places of the positions in rings that are one tensor; else None.
        mask: (B or 1, n, ring) values to add to the scores of all streams together, or None like
            `places`.
    """

    start: int
    stop: int
    streams: Sequence[StreamKeys] = ()
    places: torch.Tensor | None = None
    mask: torch.Tensor | None = None


@dataclass(frozen=True, eq=False)
class Positions:
    """Positions of a step in the streams, for all attention layers of a network.

    Attributes:
        values: (B, T) int64 positions, or (1, T) if all rows are equal.
        parts: parts of the step; empty for whole sequences.
    """

    values: torch.Tensor
    parts: Sequence[StepPart] = ()


class PositionCounter(Streaming):
    """Counter of the positions of each stream, from 0 at its first position.

    Args:
        window: number of positions that a position attends to, itself included.
    """

    state_shape = (1,)

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = window

    @property
    def state_dtype(self) -> torch.dtype:
        return torch.int64

    def forward(
        self, x: torch.Tensor, step: StreamStep = OFFLINE, *, in_place: bool = False
    ) -> Positions:
        """Returns the positions of x (B, T, C).

        Args:
            x: input of a step.
            step: position in the streams, and the states.
            in_place: whether the states of the attention layers are in place, see `Streaming`.
        """
        values = torch.arange(x.shape[1], device=x.device)[None]
        if step.state is None:
            return Positions(values)
        if not step.first:
            values = values + step.state[self]
        step.save_state(self, (values[:, -1:] + 1).expand(x.shape[0], 1))
        if torch.compiler.is_exporting():
            return Positions(values, [self._part_of_graph(values)])
        starts = range(0, x.shape[1], _MOST_NEW)
        parts = [(start, min(start + _MOST_NEW, x.shape[1])) for start in starts]
        if in_place:
            each = values.expand(x.shape[0], -1)
            return Positions(
                values, [self._part_of_each(each[:, start:stop], start) for start, stop in parts]
            )
        return Positions(
            values, [self._part_of_all(values[:, start:stop], start) for start, stop in parts]
        )

    def _part_of_all(self, positions: torch.Tensor, start: int) -> StepPart:
        """Makes a part for rings that are one tensor."""
        ring = ring_length(self.window)
        last = positions[:, -1:, None]
        # The position of each key: the latest one that has its place in the ring.
        keys = last - (last - torch.arange(ring, device=positions.device)) % ring
        mask = _mask_of(positions[..., None], keys, self.window)
        stop = start + positions.shape[1]
        return StepPart(start, stop, places=positions % ring, mask=mask)

    def _part_of_graph(self, positions: torch.Tensor) -> StepPart:
        """Makes the only part of a step in an exported graph, where a step has any length.

        The keys are those of the rings, then those of the step. `places` are the indices of the
        keys that the rings hold after the step.
        """
        ring = ring_length(self.window)
        slots = torch.arange(ring, device=positions.device)
        past, last = positions[:, :1] - 1, positions[:, -1:]
        keys = torch.cat((past - (past - slots) % ring, positions), dim=1)
        mask = _mask_of(positions[..., None], keys[:, None], self.window)
        kept = last - (last - slots) % ring
        places = torch.where(kept > past, ring + kept - past - 1, slots)
        return StepPart(0, positions.shape[1], places=places, mask=mask)

    def _part_of_each(self, positions: torch.Tensor, start: int) -> StepPart:
        """Makes a part for rings that are a tensor for each stream."""
        ring = ring_length(self.window)
        made: dict[int, StreamKeys] = {}  # by last position
        lasts: list[int] = positions[:, -1].tolist()
        for row, last in enumerate(lasts):
            if last not in made:
                count, queries = min(last + 1, ring), positions[row][:, None]
                keys = last - (last - torch.arange(count)) % ring
                everything = len(queries) == 1 and last < self.window
                mask = None if everything else _mask_of(queries, keys, self.window)
                place = (last + 1 - len(queries)) % ring
                made[last] = StreamKeys(place, count, mask)
        return StepPart(start, start + positions.shape[1], [made[last] for last in lasts])


def ring_length(window: int) -> int:
    """Returns the length of the ring in which a stream keeps keys and values.

    It holds the new positions of a part, and the positions that its first position attends to.
    """
    return window - 1 + _MOST_NEW


def _mask_of(queries: torch.Tensor, keys: torch.Tensor, window: int) -> torch.Tensor:
    """Returns 0 where a query attends to a key, else -inf, by their positions."""
    visible = (keys >= 0) & (keys <= queries) & (keys > queries - window)
    zeros = torch.zeros(visible.shape, device=visible.device)
    return zeros.masked_fill(~visible, -torch.inf)


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
    """Attention of one layer over the last `window` positions. It has no weights.

    Its state is a ring with the keys and values of the latest positions: position p has the place
    p modulo the length of the ring.

    Args:
        heads: number of heads.
        dim_head: channels of a head.
        window: number of positions that a position attends to, itself included.
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
        step: StreamStep = OFFLINE,
    ) -> torch.Tensor:
        """Computes attention of queries (B, T, heads, dim_head), in the same shape.

        Args:
            q: queries.
            k: keys, of the same shape.
            v: values, of the same shape.
            positions: positions in the streams, from `PositionCounter`.
            step: position in the streams, and the states.
        """
        if step.state is None:
            return self._whole(q, k, v)
        rings = step.state[self]
        kv = torch.stack((k, v), dim=1)  # (B, 2, T, heads, dim_head)
        if torch.compiler.is_exporting():
            [part] = positions.parts
            joined = torch.cat((rings, kv), dim=2)
            assert part.places is not None
            index = part.places[:, None, :, None, None].expand(rings.shape)
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
        """Computes a part of a step, with rings (B, 2, ring, heads, dim_head)."""
        assert part.places is not None
        index = part.places[:, None, :, None, None].expand(kv.shape)
        rings.scatter_(2, index, kv.to(rings.dtype))
        return _masked_attention(q, rings.to(q.dtype), part)

    @staticmethod
    def _one_by_one(
        q: torch.Tensor, kv: torch.Tensor, rings: Sequence[torch.Tensor], part: StepPart
    ) -> torch.Tensor:
        """Computes a part of a step, with a ring (2, ring, heads, dim_head) for each stream.

        It copies the new keys and values, and nothing else.
        """
        queries = q.transpose(1, 2).split(1)  # (1, heads, n, dim_head) each
        found = []
        for ring, new, query, own in zip(rings, kv.unbind(0), queries, part.streams, strict=True):
            room = ring.shape[1] - own.place
            if (excess := new.shape[1] - room) > 0:
                ring[:, own.place :] = new[:, :room]
                ring[:, :excess] = new[:, room:]
            else:
                ring.narrow(1, own.place, new.shape[1]).copy_(new)
            keys, values = ring.narrow(1, 0, own.count).transpose(1, 2).unsqueeze(1).unbind(0)
            found.append(F.scaled_dot_product_attention(query, keys, values, own.mask))
        return torch.cat(found).transpose(1, 2)

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


def _masked_attention(q: torch.Tensor, kv: torch.Tensor, part: StepPart) -> torch.Tensor:
    """Computes attention of q (B, T, heads, dim_head) over kv (B, 2, S, heads, dim_head), under the
    mask of a part.
    """
    assert part.mask is not None
    keys, values = kv.transpose(2, 3).unbind(1)
    mask = part.mask[:, None].to(q.dtype)
    return F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, mask).transpose(1, 2)


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

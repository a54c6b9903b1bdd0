"""A batch of chunks as dense tensors of one shape, for engines that know no pages and no ragged rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from token2wav.engines.work import ChunkWork
from token2wav.flow.cache import KeyValueStore
from token2wav.flow.dit import CONTEXT_FRAMES, RotaryEmbedding
from token2wav.flow.masks import allowed_blocks, attention_bias
from token2wav.flow_config import EstimatorConfig

_NOTHING = 1 << 30  # the block of a key that is only padding: later than any query


@dataclass(frozen=True, order=True)
class BatchShape:
    """Room in a packed batch.

    Attributes:
        streams: chunks; each has a conditional and an unconditional row.
        new_blocks: blocks of every chunk.
        past_blocks: blocks before it that it can see.
    """

    streams: int
    new_blocks: int
    past_blocks: int

    @classmethod
    def of(cls, works: Sequence[ChunkWork]) -> BatchShape:
        """The smallest that takes a batch."""
        return cls(len(works), max(len(work.new) for work in works), max(len(work.past.pages) for work in works))

    def fits(self, other: BatchShape) -> bool:
        """Whether a batch of this shape can run in another."""
        return (
            self.streams <= other.streams
            and self.new_blocks <= other.new_blocks
            and self.past_blocks <= other.past_blocks
        )

    def volume(self) -> int:
        """What attention costs in it, in arbitrary units."""
        return self.streams * self.new_blocks * (self.past_blocks + self.new_blocks)


class Batch(Protocol):
    """Tensors of one shape that stay where they are, filled anew for every batch.

    Attributes:
        shape: room.
        x: (R, bands, N) state of the ODE. Rows are the conditional ones of all streams, then, with guidance, the
            unconditional ones.
    """

    shape: BatchShape
    x: torch.Tensor

    def fill(self, works: Sequence[ChunkWork]) -> None:
        """Puts a batch in; it may have fewer streams than there is room for."""

    def take(self, works: Sequence[ChunkWork]) -> list[torch.Tensor]:
        """Mels (bands, frames) of the batch once `x` is its state at the end; the streams get their contexts back."""


def likely_shapes(hops: Sequence[int], most_past: int, most_streams: int) -> list[BatchShape]:
    """Shapes that take every batch up to some size, not too loosely: powers of two of streams and of past blocks.

    Args:
        hops: blocks of the chunks that will come.
        most_past: blocks before a chunk.
        most_streams: in a batch.
    """
    return [
        BatchShape(streams, hop, past)
        for streams in _powers_of_two(1, most_streams)
        for hop in sorted(set(hops))
        for past in _powers_of_two(4, most_past)
    ]


def _powers_of_two(first: int, last: int) -> list[int]:
    """From first on, the last of them not below `last`."""
    values = [first]
    while values[-1] < last:
        values.append(2 * values[-1])
    return values


class PackedBatch:
    """See `Batch`: R rows, N new frames, S frames of past. Padding is masked.

    Args:
        shape: room.
        config: of the estimator.
        store: memory of all pages.
        left_blocks: blocks of the past that stay visible beside the prompt's; negative for all.
        device: where.

    Attributes:
        x, mu, cond: (R, bands, N); spks: (R, bands).
        cos, sin: (R, N, dim_head).
        bias: (R, 1, N, S + N).
        frames: (R,) int64 valid frames.
        contexts: (steps, 2, R, dim, CONTEXT_FRAMES).
        visible_pages: (streams, past + new blocks) numbers of pages to read; past_pages (streams, past blocks) is the
            first part of it.
        new_pages: (streams, new blocks) numbers of pages to write.
    """

    def __init__(
        self,
        shape: BatchShape,
        config: EstimatorConfig,
        store: KeyValueStore,
        left_blocks: int,
        device: torch.device,
    ) -> None:
        self.shape = shape
        self._store = store
        self._left_blocks = left_blocks
        layout = store.layout
        self._rope = RotaryEmbedding(config.dim_head).to(device)
        rows, size = layout.branches * shape.streams, layout.block_frames
        new, keys = shape.new_blocks * size, (shape.past_blocks + shape.new_blocks) * size
        self.x, self.mu, self.cond = (torch.zeros(rows, config.mel_dim, new, device=device) for _ in range(3))
        self.spks = torch.zeros(rows, config.spk_dim, device=device)
        self.cos, self.sin = (torch.zeros(rows, new, config.dim_head, device=device) for _ in range(2))
        self.bias = torch.zeros(rows, 1, new, keys, device=device)
        self.frames = torch.zeros(rows, dtype=torch.int64, device=device)
        self.contexts = torch.zeros(layout.steps, 2, rows, config.dim, CONTEXT_FRAMES, device=device)
        visible = shape.past_blocks + shape.new_blocks
        self.visible_pages = torch.full((shape.streams, visible), store.zeros, device=device)
        self.past_pages = self.visible_pages[:, : shape.past_blocks]
        self.new_pages = torch.full((shape.streams, shape.new_blocks), store.waste, device=device)

    def fill(self, works: Sequence[ChunkWork]) -> None:
        """See `Batch`."""
        streams = self.shape.streams
        for tensor in (self.x, self.mu, self.cond, self.spks):
            tensor.zero_()
        for index, work in enumerate(works):
            self.x[index::streams, :, : work.frames] = work.noise
            self.mu[index, :, : work.frames] = work.mu
            self.cond[index, :, : work.frames] = work.cond
            self.spks[index] = work.speaker
            self.contexts[:, :, index::streams] = work.contexts
        self._place(works)

    def take(self, works: Sequence[ChunkWork]) -> list[torch.Tensor]:
        """See `Batch`."""
        for index, work in enumerate(works):
            work.contexts.copy_(self.contexts[:, :, index :: self.shape.streams])
        return [self.x[index, :, : work.frames].clone() for index, work in enumerate(works)]

    def _place(self, works: Sequence[ChunkWork]) -> None:
        """Positions, pages and who sees whom. Worked out on the CPU, for it is all small integers."""
        size, zeros, waste = self._store.layout.block_frames, self._store.zeros, self._store.waste
        branches = self._store.layout.branches
        empty = self.shape.streams - len(works)
        start = torch.tensor([work.start for work in works] + [0] * empty)
        frames = torch.tensor([work.frames for work in works] + [0] * empty)
        blocks = [_padded(work.past.blocks, self.shape.past_blocks, _NOTHING) for work in works]
        blocks += [[_NOTHING] * self.shape.past_blocks] * empty
        past_pages = [_padded(work.past.pages, self.shape.past_blocks, zeros) for work in works]
        own_pages = [_padded(work.new, self.shape.new_blocks, zeros) for work in works]
        visible_pages = [before + own for before, own in zip(past_pages, own_pages, strict=True)]
        visible_pages += [[zeros] * self.visible_pages.shape[1]] * empty
        new_pages = [_padded(work.new, self.shape.new_blocks, waste) for work in works]
        new_pages += [[waste] * self.shape.new_blocks] * empty

        offsets = torch.arange(self.shape.new_blocks * size)
        position = start[:, None] + offsets  # (streams, N)
        own = torch.where(offsets < frames[:, None], position // size, _NOTHING)
        past = torch.tensor(blocks, dtype=torch.int64).reshape(self.shape.streams, -1)
        key = torch.cat((past.repeat_interleave(size, dim=1), own), dim=1)  # (streams, S + N)
        prefix = torch.tensor([work.past.prefix_blocks for work in works] + [0] * empty)
        seen = allowed_blocks((position // size)[:, :, None], key[:, None], self._left_blocks, prefix[:, None, None])
        self.bias.copy_(attention_bias(seen)[:, None].repeat(branches, 1, 1, 1))
        cos, sin = self._rope(position.to(self.cos.device))
        self.cos.copy_(cos.repeat(branches, 1, 1))
        self.sin.copy_(sin.repeat(branches, 1, 1))
        self.frames.copy_(frames.repeat(branches))
        self.visible_pages.copy_(torch.tensor(visible_pages))
        self.new_pages.copy_(torch.tensor(new_pages))


def _padded(values: list[int], length: int, filler: int) -> list[int]:
    return values + [filler] * (length - len(values))

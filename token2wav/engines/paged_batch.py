"""A batch of chunks for kernels that read pages by themselves: besides its tensors, one table of integers.

All that depends on positions and pages is worked out on the device, from that table, so a batch needs one copy from the
host, whatever its streams remember.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from token2wav.engines.packed import BatchShape
from token2wav.engines.work import ChunkWork
from token2wav.flow.cache import CacheLayout
from token2wav.flow.dit import CONTEXT_FRAMES
from token2wav.flow_config import EstimatorConfig
from token2wav.kernels import chunk_table


class PagedBatch:
    """See `Batch`.

    Args:
        shape: room.
        config: of the estimator.
        layout: of the pages.
        contexts: tensor to use for them, which batches that never run at once may share, (2, streams or more, steps, 2,
            branches, dim, CONTEXT_FRAMES).

    Attributes:
        x: (R, bands, N) state of conditional rows, then of unconditional ones.
        mu, cond: (streams, bands, N); speakers: (streams, bands).
        contexts, contexts_after: (streams, steps, 2, branches, dim, CONTEXT_FRAMES) before and after the chunks.
        table: (streams, columns) int32, see `kernels/chunk_table.py`.
    """

    def __init__(self, shape: BatchShape, config: EstimatorConfig, layout: CacheLayout, contexts: torch.Tensor) -> None:
        self.shape = shape
        self._layout = layout
        streams, frames, device = shape.streams, shape.new_blocks * layout.block_frames, contexts.device
        self._state = torch.zeros(layout.branches, streams, config.mel_dim, frames, device=device)
        self.x = self._state.flatten(0, 1)
        self.mu, self.cond = (torch.zeros(streams, config.mel_dim, frames, device=device) for _ in range(2))
        self.speakers = torch.zeros(streams, config.spk_dim, device=device)
        self.contexts, self.contexts_after = contexts[:, :streams]
        width = chunk_table.table_width(shape.past_blocks + shape.new_blocks)
        self.table = torch.zeros(streams, width, dtype=torch.int32, device=device)
        # Copied from memory that the device reads by itself, so that the host need not wait for what runs there.
        self._staged = torch.zeros(streams, width, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._copied = torch.cuda.Event() if device.type == "cuda" else None

    def fill(self, works: Sequence[ChunkWork]) -> None:
        """See `Batch`. What is in rows that are left over is not read by others."""
        count, frames = len(works), self.mu.shape[2]
        self._state[:, :count] = torch.stack([_padded(work.noise, frames) for work in works])
        torch.stack([_padded(work.mu, frames) for work in works], out=self.mu[:count])
        torch.stack([_padded(work.cond, frames) for work in works], out=self.cond[:count])
        torch.stack([work.speaker for work in works], out=self.speakers[:count])
        torch.stack([work.contexts for work in works], out=self.contexts[:count])
        if self._copied:
            self._copied.synchronize()  # the copy for the batch before, which is long done
        fill_table(self._staged.numpy(), works, self._layout.block_frames)
        self.table.copy_(self._staged, non_blocking=True)
        if self._copied:
            self._copied.record()

    def take(self, works: Sequence[ChunkWork]) -> list[torch.Tensor]:
        """See `Batch`."""
        for work, after in zip(works, self.contexts_after.unbind(), strict=False):
            work.contexts.copy_(after)
        mels = self.x[: len(works)].clone().unbind()
        return [mel[:, : work.frames] for mel, work in zip(mels, works, strict=True)]


def room_for_contexts(streams: int, config: EstimatorConfig, layout: CacheLayout, device: torch.device) -> torch.Tensor:
    """What `PagedBatch` takes as `contexts`."""
    return torch.zeros(*(2, streams, layout.steps, 2, layout.branches, config.dim, CONTEXT_FRAMES), device=device)


def fill_table(table: NDArray[np.int32], works: Sequence[ChunkWork], block_frames: int) -> None:
    """Writes chunks into the rows of a table (see `kernels/chunk_table.py`); rows that are left over become empty."""
    header, pages = chunk_table.HEADER.value, chunk_table.pages_of(table.shape[1])
    table[len(works) :, :header] = 0
    for row, work in zip(table, works, strict=False):
        first, own = work.start // block_frames, len(work.new)
        listed = len(work.past.pages) + own
        row[:header] = work.start, work.frames, len(work.past.pages), work.past.prefix_blocks
        row[header:][:listed] = [*work.past.pages, *work.new]
        row[header + pages :][:listed] = [*work.past.blocks, *range(first, first + own)]


def _padded(x: torch.Tensor, frames: int) -> torch.Tensor:
    return x if x.shape[1] == frames else F.pad(x, (0, frames - x.shape[1]))

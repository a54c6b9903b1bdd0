"""Batches of vocoder pieces on kernels.

Pieces of any length and of any place in their streams run in one batch, because kernels read both
from a table on the device. So a few sizes of batches are enough, and each is one CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from token2wav.cache.states import SCRATCH_SLOT, StateRows, StateStore
from token2wav.execution.buckets import BucketRunner, PaddedSize
from token2wav.execution.cuda_graphs import GraphPool
from token2wav.execution.staging import copy_to
from token2wav.kernels.hift_plan import HiFTPlan
from token2wav.kernels.signals import COLUMNS, FAR, PieceTensors
from token2wav.networks.noise import NoiseTable
from token2wav.stages.waveform import KernelPieces, PieceInput

_NETWORK = "vocoder"  # network name in its state store


class _KernelBatch:
    """Tensors for pieces of a size."""

    def __init__(
        self,
        size: PaddedSize,
        plan: HiFTPlan,
        states: StateStore,
        rows: tuple[StateRows, StateRows],  # states before the pieces, and after them
        noise: NoiseTable,
    ) -> None:
        network, streams, frames = plan.network, size.rows, size.length
        device, samples = network.device, network.frame_samples
        self._plan, self._states, self._noise_table = plan, states, noise
        self._old, self._new = rows
        self._mel = torch.zeros(network.input_channels, streams * frames, device=device)
        self._noise = torch.zeros(streams * (1 + frames), samples, device=device)
        self._audio = torch.empty(streams, frames * samples, device=device)
        # One tensor, so that one copy brings all numbers to the device: slots to read, slots to
        # write, rows of the noise, and the table of the pieces. Numbers of the table have half the
        # width of the others.
        counts = streams, streams, streams * (1 + frames), streams * COLUMNS.value // 2
        self._numbers = torch.zeros(sum(counts), dtype=torch.int64, device=device)
        self._slots, self._targets, self._noise_rows, table = self._numbers.split(counts)
        pieces = table.view(torch.int32).view(streams, COLUMNS.value)
        self._batch = PieceTensors(frames, pieces, self._old.tensors, self._new.tensors)

    def fill(self, items: Sequence[PieceInput]) -> None:
        streams, frames, noise = self._batch.streams, self._batch.frames, self._noise_table
        count, slots = len(items), [item.stream.slot for item in items]
        targets = [
            SCRATCH_SLOT if item.provisional or not item.shape.inside else item.stream.slot
            for item in items
        ]
        lengths = np.array([item.frames.shape[1] for item in items])
        if total := int(lengths.sum()):
            torch.cat([item.frames for item in items], dim=1, out=self._mel[:, :total])
        numbers = np.full(len(self._numbers), SCRATCH_SLOT)
        numbers[:count], numbers[streams : streams + count] = slots, targets
        table = np.zeros((streams, COLUMNS.value), np.int32)
        table[:count, 0] = [min(item.start, FAR) for item in items]
        table[:count, 1] = [item.shape.frames for item in items]
        table[:count, 2] = [FAR if item.shape.inside else item.frames.shape[1] for item in items]
        table[:count, 3] = np.cumsum(lengths) - lengths
        numbers[-table.size // 2 :] = table.view(np.int64).ravel()
        starts = np.zeros(streams, np.int64)
        starts[:count] = [item.start - noise.late - 1 for item in items]
        with noise.lock:
            noise_rows = noise.find(starts, 1 + frames).ravel()
            numbers[2 * streams : 2 * streams + len(noise_rows)] = noise_rows
            copy_to(self._numbers, numbers)
            torch.index_select(noise.rows, 0, self._noise_rows, out=self._noise)
        self._states.read(self._slots, self._old)

    @torch.inference_mode()
    def compute(self) -> None:
        noise = self._noise.view(self._batch.streams, -1)
        self._audio = self._plan.step(self._batch, self._mel, noise)

    def take(self, items: Sequence[PieceInput]) -> list[torch.Tensor]:
        self._states.write(self._targets, self._new)
        delay, samples = self._plan.network.output_delay, self._plan.network.frame_samples
        results = []
        for audio, item in zip(self._audio.clone(), items, strict=False):
            last = item.frames.shape[1] * samples + (0 if item.shape.inside else delay)
            results.append(audio[delay if item.shape.first else 0 : last])
        return results


def kernel_pieces(
    plan: HiFTPlan,
    sizes: Sequence[PaddedSize],
    graphs: GraphPool | None,
    noise: NoiseTable,
    slots: int,  # including the scratch slot
) -> KernelPieces:
    """Makes the runner of the pieces of a vocoder on kernels."""
    network = plan.network
    store = StateStore({_NETWORK: plan.state_specs()}, network.device, slots)
    # Prepared sizes run one at a time, so they share their rows.
    most = max(size.rows for size in sizes)
    old, new = (store.rows(_NETWORK, most) for _ in range(2))

    def make(size: PaddedSize) -> _KernelBatch:
        rows = old.first(size.rows), new.first(size.rows)
        return _KernelBatch(size, plan, store, rows, noise)

    with torch.inference_mode():
        runner = BucketRunner(_size_of, make, sizes, graphs)
    longest = max(size.length for size in sizes) - network.lookahead_frames
    return KernelPieces(runner, store, longest)


def _size_of(pieces: Sequence[PieceInput]) -> PaddedSize:
    return PaddedSize(max(piece.shape.frames for piece in pieces), len(pieces))

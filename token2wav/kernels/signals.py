"""Signals of a vocoder on kernels.

A *piece* is the part of a stream that a batch computes.

A *signal* is a buffer (branches, streams, halo + rows, channels) with the input of a layer. Its
first rows, the *halo*, are the last rows of the previous piece. They are the streaming state of the
layers that read the signal. Every kernel that writes a signal also fills its halo from the old
states, and writes the new states. So the states need no launches of their own. Rows before the
start and after the end of a stream are zero.

Pieces of a batch may have different lengths, and different places in their streams: a table on the
device holds both. A program (an instance of a kernel) returns immediately if its rows lie after the
end of the piece.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

# Columns of the table of pieces.
START = tl.constexpr(0)  # frames of the stream before the piece, at most `FAR`
FRAMES = tl.constexpr(1)  # frames of the piece; 0 for rows of a batch that hold no piece
REMAINING = tl.constexpr(2)  # frames from the start of the piece to the end of the stream, or `FAR`
OFFSET = tl.constexpr(3)  # index of the first frame of the piece in the mel of the batch
COLUMNS = tl.constexpr(4)  # columns of the table
FAR = 1 << 16  # no row depends on a start or an end that is so many frames away

# Strides between streams, and indices of states, are multiples of this number. So Triton compiles
# one binary for all of them, with wide loads and stores.
_ALIGNMENT = 16
_HALO_TILE = tl.constexpr(1024)  # elements of a halo that a program copies at once

# Arguments that differ from layer to layer or from batch to batch, and on which no wide load
# depends; see `OF_A_BATCH` of block_table.py.
OF_A_LAYER = ("streams", "rate", "extra", "slope", "delay", "branches", "row_limit")


@triton.jit
def carry_halo(buffer, old, new, halo, shift, fresh, part, parts):
    """Fills the halo of a signal from the old state, or with zeros where a stream begins.

    The piece has `shift` elements. If it is shorter than the halo, the last `halo - shift` elements
    of the old state become the first ones of the new state. Program `part` of `parts` copies its
    share.
    """
    for begin in range(part * _HALO_TILE, halo, parts * _HALO_TILE):
        at = begin + tl.arange(0, _HALO_TILE)
        values = tl.load(old + at, mask=(at < halo) & (fresh == 0), other=0.0)
        tl.store(buffer + at, values, mask=at < halo)
        tl.store(new + at - shift, values, mask=(at < halo) & (at >= shift))


@triton.jit
def store_rows(values, buffer, new, at, halo, shift, inside):
    """Stores elements of a signal, and stores the last elements in the new state.

    `at` is the index of an element, counted from the end of the halo. `shift` is the number of
    elements of the piece.
    """
    tl.store(buffer + halo + at, values, mask=inside)
    tl.store(new + halo + at - shift, values, mask=inside & (halo + at >= shift))


@dataclass(frozen=True)
class SignalLayout:
    """Layout of a signal: its buffer, and the index of its halo in the states of a stream."""

    channels: int
    rate: int  # rows per frame
    delays: tuple[int, ...]  # rows by which the signal is late, for each branch
    extra: int = 0  # rows after the last frame of a stream
    halo: int = 0
    state_offset: int = 0  # index of the halos of all branches in a row of states
    dtype: torch.dtype = torch.float32

    @property
    def width(self) -> int:
        """Number of elements of the halos of all branches."""
        return len(self.delays) * self.halo * self.channels

    def first(self, history: int) -> int:
        """Returns the index in the buffer of the row that is `history` rows before the piece."""
        return (self.halo - history) * self.channels


@dataclass(frozen=True, eq=False)
class Signal:
    """Signal of a batch: its layout, and its buffer (branches, streams, halo + rows, channels)."""

    layout: SignalLayout
    data: torch.Tensor

    @classmethod
    def empty(cls, layout: SignalLayout, batch: PieceTensors) -> Signal:
        """Allocates the buffer of a signal for the pieces of a batch."""
        rows = aligned(layout.halo + batch.frames * layout.rate)
        shape = len(layout.delays), batch.streams, rows, layout.channels
        return cls(layout, torch.empty(shape, dtype=layout.dtype, device=batch.pieces.device))

    @property
    def reading(self) -> tuple[torch.Tensor, int, int]:
        """Arguments of a kernel that reads the signal. All branches of the kernel read the branch
        of a signal that has only one.
        """
        branch = self.data.stride(0) if len(self.layout.delays) > 1 else 0
        return self.data, self.data.stride(1), branch

    @property
    def writing(self) -> tuple[torch.Tensor, int, int, int, int]:
        """Arguments of a kernel that writes the signal."""
        data, stream, halo, state_offset = self.writing_alone
        return data, stream, data.stride(0), halo, state_offset

    @property
    def writing_alone(self) -> tuple[torch.Tensor, int, int, int]:
        """Arguments of a kernel that writes the signal, which has one branch."""
        halo = self.layout.halo * self.layout.channels
        return self.data, self.data.stride(1), halo, self.layout.state_offset


@dataclass(frozen=True, eq=False)
class PieceTensors:
    """Tensors of a batch of pieces that kernels share."""

    frames: int  # frames that a piece has room for
    pieces: torch.Tensor  # (streams, 4) int32 table of the pieces
    old: Mapping[torch.dtype, torch.Tensor]  # (streams, width) states before the pieces, by dtype
    new: Mapping[torch.dtype, torch.Tensor]  # (streams, width) states after the pieces, by dtype

    @property
    def streams(self) -> int:
        return len(self.pieces)

    def states(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Returns the arguments of a kernel for the states of a dtype."""
        return self.old[dtype], self.new[dtype], self.old[dtype].shape[1]


def aligned(count: int) -> int:
    """Rounds a count up to a multiple of `_ALIGNMENT`."""
    return -(-count // _ALIGNMENT) * _ALIGNMENT


def alignment(channels: int) -> int:
    """Returns a divisor of the index of every row in a buffer."""
    return math.gcd(channels, _ALIGNMENT)

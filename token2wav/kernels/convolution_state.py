"""State of a causal convolution over blocks: the last inputs of a chunk, which precede its next
inputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from token2wav.kernels.block_table import (
    BEFORE,
    CHUNK,
    LAST,
    OF_A_BATCH,
    PROMPT_PADDING,
    START,
    VALID,
    rows_of,
)

_WIDTH = 32  # channels of a program


@triton.jit
def keep_last_inputs(
    x,  # (branches * blocks, BLOCK_FRAMES, channels)
    state,  # (chunks, branches, taps - 1, channels), the first two strided
    header,  # row of the block table
    row,
    branch,
    channel,  # (n,) channels to store
    channels,
    chunk_stride,
    branch_stride,
    BLOCK_FRAMES: tl.constexpr,
    TAPS: tl.constexpr,
    TAPS_UP: tl.constexpr,
):
    """Replaces the state of a chunk by the last inputs of the chunk, if the row is its last block.

    The convolution must have read the state. Prompt padding counts as zeros.
    """
    if tl.load(header + LAST) != 0:
        before = tl.load(header + BEFORE)
        slot = tl.arange(0, TAPS_UP)
        stored = (channel < channels)[:, None] & (slot < TAPS - 1)[None, :]
        offset = tl.load(header + CHUNK).to(tl.int64) * chunk_stride + branch * branch_stride
        offset += channel[:, None]
        # The old state and n new inputs form one sequence. The new state starts at its position n.
        source = (slot + before + tl.load(header + VALID))[None, :]
        old = tl.load(
            state + offset + source * channels, mask=stored & (source < TAPS - 1), other=0.0
        )
        # frame of the block; negative for frames of the blocks before, which are in the rows before
        frame = source - (TAPS - 1) - before
        real = (frame >= -before) & (
            frame + tl.load(header + START) >= tl.load(header + PROMPT_PADDING)
        )
        at = row.to(tl.int64) * BLOCK_FRAMES + frame
        new = tl.load(x + at * channels + channel[:, None], mask=stored & real, other=0.0)
        tl.debug_barrier()  # every read must finish before the state is overwritten
        tl.store(state + offset + slot[None, :] * channels, old + new, mask=stored)


@triton.jit(do_not_specialize=OF_A_BATCH)
def _store_state(
    x,
    state,
    table,
    blocks,
    width,
    channels,
    chunk_stride,
    branch_stride,
    BLOCK_FRAMES: tl.constexpr,
    TAPS: tl.constexpr,
    TAPS_UP: tl.constexpr,
    WIDTH: tl.constexpr,
):
    group, row = tl.program_id(0), tl.program_id(1)
    keep_last_inputs(
        x,
        state,
        table + (row % blocks) * width,
        row,
        row // blocks,
        group * WIDTH + tl.arange(0, WIDTH),
        channels,
        chunk_stride,
        branch_stride,
        BLOCK_FRAMES,
        TAPS,
        TAPS_UP,
    )


def store_state(x: torch.Tensor, state: torch.Tensor, table: torch.Tensor) -> None:
    """Replaces the state of a convolution by the last inputs of every chunk, once the convolution
    has run.

    Args:
        x: (branches * blocks, block_frames, channels) inputs, contiguous; rows are branch by
            branch.
        state: (chunks, branches, channels, taps - 1) last inputs before the chunks, as
            `Estimator.tails` returns them.
        table: block table of the batch, see `execution/block_table.py`.
    """
    assert x.is_contiguous()
    rows, frames, channels = x.shape
    assert state.stride()[2:] == (1, channels)
    positions = state.shape[3]
    sizes = {"BLOCK_FRAMES": frames, "TAPS": positions + 1, "WIDTH": _WIDTH}
    _store_state[(triton.cdiv(channels, _WIDTH), rows)](
        x,
        state,
        *rows_of(table),
        channels,
        *state.stride()[:2],
        TAPS_UP=triton.next_power_of_2(positions),
        **sizes,
    )

"""Causal grouped convolution over blocks that continue from a state, with its Mish, and the update
of the state.

Without TF32, libraries run grouped convolutions in float32 on the ordinary cores, not the tensor
cores. With large batches this takes half as long as all matrix products together, by count of
operations and published rates. Here every tap is a matrix product. It is made of three TF32
products, which together keep the precision of float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from token2wav.execution.kernels.activations import mish
from token2wav.execution.kernels.block_table import BEFORE, CHUNK, OF_A_BATCH, VALID, rows_of
from token2wav.execution.kernels.convolution_state import store_state

# Of the tiles tried, this is the widest that keeps everything in registers, for compute
# capabilities 8.0 and 9.0.
_TILE, _WARPS, _STAGES = 32, 4, 2
_NARROWEST = 16  # smallest matrix of the tensor cores; narrower groups are padded


@triton.jit(do_not_specialize=OF_A_BATCH)
def _convolve(
    x,  # (branches * blocks, BLOCK_FRAMES, channels)
    weights,  # (taps, groups, inputs, outputs)
    bias,
    state,  # (chunks, branches, channels, taps - 1), the first two strided
    out,
    table,
    blocks,
    width,
    chunk_stride,
    branch_stride,
    BLOCK_FRAMES: tl.constexpr,
    TAPS: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_UP: tl.constexpr,
    TILE: tl.constexpr,
):
    first, group, row = tl.program_id(0) * TILE, tl.program_id(1), tl.program_id(2)
    block, branch = row % blocks, row // blocks
    own = table + block * width
    valid, before, chunk = tl.load(own + VALID), tl.load(own + BEFORE), tl.load(own + CHUNK)
    frame, channel = first + tl.arange(0, TILE), tl.arange(0, WIDTH_UP)
    real = channel < WIDTH
    mine = group * WIDTH + channel
    kept = (
        state
        + chunk.to(tl.int64) * chunk_stride
        + branch * branch_stride
        + mine[None, :] * (TAPS - 1)
    )
    rows = row.to(tl.int64) * BLOCK_FRAMES
    result = tl.zeros((TILE, WIDTH_UP), tl.float32)
    if first < valid:
        result += tl.load(bias + mine, mask=real, other=0.0)[None, :]
        for tap in range(TAPS):
            # negative for frames of the blocks before, which are in the rows before
            at = frame - (TAPS - 1) + tap
            inside = ((at >= -before) & (at < valid))[:, None] & real[None, :]
            given = tl.load(
                x + (rows + at)[:, None] * (GROUPS * WIDTH) + mine[None, :], mask=inside, other=0.0
            )
            early = (at < -before)[:, None] & real[None, :]
            older = tl.load(kept + (at + before + TAPS - 1)[:, None], mask=early, other=0.0)
            place = ((tap * GROUPS + group) * WIDTH + channel)[:, None] * WIDTH + channel[None, :]
            weight = tl.load(weights + place, mask=real[:, None] & real[None, :], other=0.0)
            result += tl.dot(given + older, weight, input_precision="tf32x3")
    result = mish(result)
    place = (rows + frame)[:, None] * (GROUPS * WIDTH) + mine[None, :]
    tl.store(out + place, result, mask=(frame < BLOCK_FRAMES)[:, None] & real[None, :])


class PositionConvolution:
    """One of the two convolutions of `ConvPositionEmbedding`, on a kernel.

    Args:
        conv: convolution. Its weights are copied, in the order in which the kernel reads them.
    """

    def __init__(self, conv: torch.nn.Conv1d) -> None:
        assert conv.bias is not None
        self._groups, self._width = conv.groups, conv.in_channels // conv.groups
        self._taps = conv.kernel_size[0]
        # (groups, outputs, inputs, taps)
        weight = conv.weight.detach().unflatten(0, (self._groups, -1))
        self._weights = weight.permute(3, 0, 2, 1).contiguous()
        self._bias = conv.bias.detach()
        self._sizes = {
            "GROUPS": self._groups,
            "WIDTH": self._width,
            "WIDTH_UP": max(_NARROWEST, triton.next_power_of_2(self._width)),
        }

    def __call__(self, x: torch.Tensor, state: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """Computes the convolution of every block after its past inputs, and Mish.

        Args:
            x: (branches * blocks, block_frames, channels) float32, contiguous; rows are branch by
                branch.
            state: (chunks, branches, channels, taps - 1) last inputs before the chunks. They are
                replaced by the last inputs of the chunks. The last two axes are contiguous.
            table: block table of the batch, see `execution/batch.py`.

        Returns:
            (branches * blocks, block_frames, channels). Values after the valid frames of a block
            have no meaning.
        """
        assert x.is_contiguous()
        rows, frames, _ = x.shape
        out = torch.empty_like(x)
        strides = state.stride()[:2]
        sizes = {"BLOCK_FRAMES": frames, "TAPS": self._taps}
        given = x, self._weights, self._bias, state, out
        tile = {"TILE": _TILE, "num_warps": _WARPS, "num_stages": _STAGES}
        grid = triton.cdiv(frames, _TILE), self._groups, rows
        _convolve[grid](*given, *rows_of(table), *strides, **sizes, **self._sizes, **tile)
        store_state(x, state, table)
        return out

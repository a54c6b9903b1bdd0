"""Causal grouped convolution over blocks that continue from a state, with its Mish, and the update
of the state.

Without TF32, libraries run grouped convolutions in float32 on the ordinary cores, not the tensor
cores. With large batches this takes half as long as all matrix products together, by count of
operations and published rates. Here every tap is a matrix product.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from token2wav.kernels.activations import mish
from token2wav.kernels.block_table import BEFORE, CHUNK, OF_A_BATCH, VALID, rows_of
from token2wav.kernels.convolution_state import store_state
from token2wav.kernels.rounding import Precision, rounded_product, rounded_weights

# On an H200 a first chunk takes 22 us with its state; tiles of 16 and 32 rows take 28 and 32 us.
_TILE, _WARPS, _STAGES = 64, 4, 3
_NARROWEST = 16  # smallest matrix of the tensor cores; narrower groups are padded


@triton.jit(do_not_specialize=OF_A_BATCH)
def _convolve(
    x,  # (branches * blocks, BLOCK_FRAMES, channels)
    weights,  # (taps, groups, outputs, inputs)
    bias,
    state,  # (chunks, branches, taps - 1, channels), the first two strided
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
    PRECISION: tl.constexpr,
    TILE: tl.constexpr,
):
    first, group, row = tl.program_id(0) * TILE, tl.program_id(1), tl.program_id(2)
    block, branch = row % blocks, row // blocks
    header = table + block * width
    valid, before = tl.load(header + VALID), tl.load(header + BEFORE)
    frame, channel = first + tl.arange(0, TILE), tl.arange(0, WIDTH_UP)
    real = channel < WIDTH
    group_channel = group * WIDTH + channel
    state += tl.load(header + CHUNK).to(tl.int64) * chunk_stride + branch * branch_stride
    rows = row.to(tl.int64) * BLOCK_FRAMES
    x += rows * (GROUPS * WIDTH)
    result = tl.zeros((TILE, WIDTH_UP), tl.float32)
    if first < valid:
        result += tl.load(bias + group_channel, mask=real, other=0.0)[None, :]
        for tap in range(TAPS):
            # negative for frames of the blocks before, which are in the rows before
            at = frame - (TAPS - 1) + tap
            # One load from either source, because a loop can prefetch loads, but not their sum.
            frames = tl.where(
                at < -before,
                state + (at + before + TAPS - 1) * (GROUPS * WIDTH),
                x + at * (GROUPS * WIDTH),
            )
            inputs = tl.load(
                frames[:, None] + group_channel[None, :],
                mask=(at < valid)[:, None] & real[None, :],
                other=0.0,
            )
            entry = ((tap * GROUPS + group) * WIDTH + channel)[None, :] * WIDTH + channel[:, None]
            weight = tl.load(weights + entry, mask=real[:, None] & real[None, :], other=0.0)
            result += rounded_product(inputs, weight, PRECISION)
    result = mish(result)
    element = (rows + frame)[:, None] * (GROUPS * WIDTH) + group_channel[None, :]
    tl.store(out + element, result, mask=(frame < BLOCK_FRAMES)[:, None] & real[None, :])


class PositionConvolution:
    """One of the two convolutions of `ConvPositionEmbedding`, on a kernel.

    Args:
        conv: convolution. Its weights are copied, in the order in which the kernel reads them.
        precision: arithmetic of the products. With `tf32` and `float16` inputs and weights are
            rounded; the three products of `tf32x3` keep the precision of float32.
    """

    def __init__(self, conv: torch.nn.Conv1d, precision: Precision) -> None:
        assert conv.bias is not None
        self._groups, self._width = conv.groups, conv.in_channels // conv.groups
        self._taps = conv.kernel_size[0]
        # (groups, outputs, inputs, taps)
        weight = conv.weight.detach().unflatten(0, (self._groups, -1))
        self._weights = rounded_weights(weight.permute(3, 0, 1, 2).contiguous(), precision)
        self._bias = conv.bias.detach()
        self._sizes = {
            "GROUPS": self._groups,
            "WIDTH": self._width,
            "WIDTH_UP": max(_NARROWEST, triton.next_power_of_2(self._width)),
            "PRECISION": precision,
        }

    def __call__(self, x: torch.Tensor, state: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """Computes the convolution of every block after its past inputs, and Mish.

        Args:
            x: (branches * blocks, block_frames, channels) float32, contiguous; rows are branch by
                branch.
            state: (chunks, branches, channels, taps - 1) last inputs before the chunks, as
                `Estimator.tails` returns them. They are replaced by the last inputs of the chunks.
            table: block table of the batch, see `execution/block_table.py`.

        Returns:
            (branches * blocks, block_frames, channels). Values after the valid frames of a block
            have no meaning.
        """
        assert x.is_contiguous()
        rows, frames, _ = x.shape
        out = torch.empty_like(x)
        strides = state.stride()[:2]
        sizes = {"BLOCK_FRAMES": frames, "TAPS": self._taps}
        tensors = x, self._weights, self._bias, state, out
        tile = {"TILE": _TILE, "num_warps": _WARPS, "num_stages": _STAGES}
        grid = triton.cdiv(frames, _TILE), self._groups, rows
        _convolve[grid](*tensors, *rows_of(table), *strides, **sizes, **self._sizes, **tile)
        store_state(x, state, table)
        return out

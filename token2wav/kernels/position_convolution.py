"""A causal grouped convolution over chunks that continue what came before them, with its Mish, and what to keep of it.

Without TF32, libraries run grouped convolutions in float32 past the tensor cores; with large batches, by count of
operations and published rates, that is half as long as all matrix products take. Here a tap is a matrix product of its
own, of three TF32 parts, which together keep float32's precision.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from token2wav.kernels.chunk_table import FRAMES, OF_A_BATCH

# The widest of the tiles tried that keeps everything in registers for compute capability 8.0 and for 9.0.
_TILE, _WARPS, _STAGES = 32, 4, 2
_NARROWEST = 16  # matrix that the units take; narrower groups are padded


@triton.jit(do_not_specialize=OF_A_BATCH)
def _convolve(
    x,  # (R, N, channels)
    weights,  # (taps, groups, inputs, outputs)
    bias,
    contexts,  # (streams, branches, channels, taps - 1), the first two strided
    out,
    table,
    streams,
    frames,
    width,
    stream_stride,
    branch_stride,
    TAPS: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_UP: tl.constexpr,
    TILE: tl.constexpr,
):
    first, group, row = tl.program_id(0) * TILE, tl.program_id(1), tl.program_id(2)
    stream, branch = row % streams, row // streams
    valid = tl.load(table + stream * width + FRAMES)
    frame, channel = first + tl.arange(0, TILE), tl.arange(0, WIDTH_UP)
    real = channel < WIDTH
    mine = group * WIDTH + channel
    before = contexts + stream.to(tl.int64) * stream_stride + branch * branch_stride + mine[None, :] * (TAPS - 1)
    rows = row.to(tl.int64) * frames
    result = tl.zeros((TILE, WIDTH_UP), tl.float32)
    if first < valid:
        result += tl.load(bias + mine, mask=real, other=0.0)[None, :]
        for tap in range(TAPS):
            at = frame - (TAPS - 1) + tap
            inside = ((at >= 0) & (at < valid))[:, None] & real[None, :]
            given = tl.load(x + (rows + at)[:, None] * (GROUPS * WIDTH) + mine[None, :], mask=inside, other=0.0)
            early = tl.load(before + (at + TAPS - 1)[:, None], mask=(at < 0)[:, None] & real[None, :], other=0.0)
            place = ((tap * GROUPS + group) * WIDTH + channel)[:, None] * WIDTH + channel[None, :]
            weight = tl.load(weights + place, mask=real[:, None] & real[None, :], other=0.0)
            result += tl.dot(given + early, weight, input_precision="tf32x3")
    # Mish, x * tanh(softplus(x)), with one exponential; beyond 20 it is x to the last bit.
    grown = tl.exp(tl.minimum(result, 20.0))
    grown = grown * (grown + 2.0)
    result = tl.where(result > 20.0, result, result * (grown / (grown + 2.0)))
    place = (rows + frame)[:, None] * (GROUPS * WIDTH) + mine[None, :]
    tl.store(out + place, result, mask=(frame < frames)[:, None] & real[None, :])


@triton.jit(do_not_specialize=OF_A_BATCH)
def _keep(
    x,
    before,
    after,
    table,
    streams,
    frames,
    width,
    channels,
    stream_stride,
    branch_stride,
    TAPS: tl.constexpr,
    TAPS_UP: tl.constexpr,
    WIDTH: tl.constexpr,
):
    group, row = tl.program_id(0), tl.program_id(1)
    stream, branch = row % streams, row // streams
    valid = tl.load(table + stream * width + FRAMES)
    channel, slot = group * WIDTH + tl.arange(0, WIDTH), tl.arange(0, TAPS_UP)
    kept = (channel < channels)[:, None] & (slot < TAPS - 1)[None, :]
    place = stream.to(tl.int64) * stream_stride + branch * branch_stride
    own = place + channel[:, None] * (TAPS - 1)
    # Counted from the first that was kept before, the last ones of `valid` new inputs start at `valid`.
    source = (slot + valid)[None, :]
    old = tl.load(before + own + source, mask=kept & (source < TAPS - 1), other=0.0)
    at = row.to(tl.int64) * frames + source - (TAPS - 1)
    new = tl.load(x + at * channels + channel[:, None], mask=kept & (source >= TAPS - 1), other=0.0)
    tl.store(after + own + slot[None, :], old + new, mask=kept)


class PositionConvolution:
    """One of the two convolutions of `ConvPositionEmbedding`.

    Args:
        conv: whose weights are copied, in the order in which the kernel reads them.
    """

    def __init__(self, conv: torch.nn.Conv1d) -> None:
        assert conv.bias is not None
        self._groups, self._width = conv.groups, conv.in_channels // conv.groups
        self._taps = conv.kernel_size[0]
        weight = conv.weight.detach().unflatten(0, (self._groups, -1))  # (groups, outputs, inputs, taps)
        self._weights = weight.permute(3, 0, 2, 1).contiguous()
        self._bias = conv.bias.detach()

    def __call__(self, x: torch.Tensor, before: torch.Tensor, after: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """Mish of the convolution of every chunk behind its context.

        Args:
            x: (R, N, channels) float32, contiguous; rows are branch by branch.
            before: (streams, branches, channels, taps - 1) last inputs before the chunks; the last two axes contiguous.
            after: as `before`; takes the last inputs of the chunks.
            table: of the batch, see `chunk_table`.

        Returns:
            (R, N, channels); behind the frames of a chunk it means nothing.
        """
        assert x.is_contiguous()
        assert before.stride() == after.stride()
        rows, frames, channels = x.shape
        streams, out = len(table), torch.empty_like(x)
        strides = before.stride()[:2]
        _convolve[(triton.cdiv(frames, _TILE), self._groups, rows)](
            x,
            self._weights,
            self._bias,
            before,
            out,
            table,
            streams,
            frames,
            table.shape[1],
            *strides,
            TAPS=self._taps,
            GROUPS=self._groups,
            WIDTH=self._width,
            WIDTH_UP=max(_NARROWEST, triton.next_power_of_2(self._width)),
            TILE=_TILE,
            num_warps=_WARPS,
            num_stages=_STAGES,
        )
        _keep[(triton.cdiv(channels, _TILE), rows)](
            x,
            before,
            after,
            table,
            streams,
            frames,
            table.shape[1],
            channels,
            *strides,
            TAPS=self._taps,
            TAPS_UP=triton.next_power_of_2(self._taps - 1),
            WIDTH=_TILE,
        )
        return out

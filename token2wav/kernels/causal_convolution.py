"""Causal convolution over blocks that continue from a state, alone or with a norm, Mish, a gate and
sums.

Each tap is a matrix product. It reads frames of the chunk from the rows, frames before the chunk
from the state, and frames before the stream as zeros. So the input is neither copied nor
transposed. The state is replaced in a second launch, because other programs of the first launch may
still read it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from token2wav.kernels import tiles
from token2wav.kernels.activations import mish
from token2wav.kernels.block_table import (
    BEFORE,
    CHUNK,
    OF_A_BATCH,
    PROMPT_PADDING,
    START,
    VALID,
    rows_of,
)
from token2wav.kernels.convolution_state import keep_last_inputs, store_state
from token2wav.kernels.norms import NormVectors, normalized, row_width
from token2wav.kernels.past import Past
from token2wav.kernels.rounding import Precision, rounded_product, rounded_weights
from token2wav.networks.unet import CausalConv


@triton.jit(do_not_specialize=(*OF_A_BATCH, "rows"))
def _causal_convolution(
    x,  # (branches * blocks, BLOCK_FRAMES, INPUTS)
    weights,  # (TAPS, OUTPUTS, INPUTS)
    bias,
    state,  # (chunks, branches, TAPS - 1, INPUTS), the first two strided
    out,
    table,
    blocks,
    width,
    chunk_stride,
    branch_stride,
    rows,  # branches * blocks * BLOCK_FRAMES
    BLOCK_FRAMES: tl.constexpr,
    TAPS: tl.constexpr,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS_OF_TILE: tl.constexpr,
    OUTPUTS_OF_TILE: tl.constexpr,
    INPUTS_OF_TILE: tl.constexpr,
):
    first, in_tile = tl.program_id(0) * ROWS_OF_TILE, tl.arange(0, ROWS_OF_TILE)
    row = first + in_tile
    frame, block = row % BLOCK_FRAMES, row // BLOCK_FRAMES % blocks
    header = table + block * width
    valid = tl.load(header + VALID, mask=row < rows, other=0)
    before = tl.load(header + BEFORE)
    # frames before this one are prompt padding
    start = tl.load(header + PROMPT_PADDING) - tl.load(header + START)
    # a tap reads frames from this one on
    oldest = tl.maximum(start, -before)
    output = tl.program_id(1) * OUTPUTS_OF_TILE + tl.arange(0, OUTPUTS_OF_TILE)
    column = tl.arange(0, INPUTS_OF_TILE)
    branch = row // BLOCK_FRAMES // blocks
    offset = tl.load(header + CHUNK).to(tl.int64) * chunk_stride + branch * branch_stride
    state_rows = state + offset
    x += first.to(tl.int64) * INPUTS
    result = tl.zeros((ROWS_OF_TILE, OUTPUTS_OF_TILE), tl.float32)
    if tl.max((frame < valid).to(tl.int32), axis=0) > 0:
        parts: tl.constexpr = (INPUTS + INPUTS_OF_TILE - 1) // INPUTS_OF_TILE
        for part in range(TAPS * parts):
            tap, channel = part // parts, (part % parts) * INPUTS_OF_TILE + column
            channel_mask = channel < INPUTS
            # negative for frames of earlier blocks, which are in earlier rows
            at = frame - (TAPS - 1) + tap
            stored = at < -before
            # One load from either source, because a loop can prefetch loads, but not their sum.
            frames = tl.where(
                stored,
                state_rows + (at + before + TAPS - 1) * INPUTS,
                x + (in_tile - (TAPS - 1) + tap) * INPUTS,
            )
            input_mask = (stored & (frame < valid)) | ((at >= oldest) & (at < valid))
            inputs = tl.load(
                frames[:, None] + channel[None, :],
                mask=input_mask[:, None] & channel_mask[None, :],
                other=0.0,
            )
            weight = tl.load(
                weights + (tap * OUTPUTS + output)[None, :] * INPUTS + channel[:, None],
                mask=channel_mask[:, None] & (output < OUTPUTS)[None, :],
                other=0.0,
            )
            result += rounded_product(inputs, weight, PRECISION)
        result += tl.load(bias + output, mask=output < OUTPUTS, other=0.0)[None, :]
    tl.store(
        out + row.to(tl.int64)[:, None] * OUTPUTS + output[None, :],
        result,
        mask=(row < rows)[:, None] & (output < OUTPUTS)[None, :],
    )


@triton.jit(do_not_specialize=OF_A_BATCH)
def _finish(
    x,  # (branches * blocks, BLOCK_FRAMES, CHANNELS) results of the convolution
    shift,  # (CHANNELS,) of the norm before Mish, or None for neither
    scale,
    gate,  # (CHANNELS,) float32, or None
    added,  # (CHANNELS,) float32, or None
    residual,  # of the shape of x, or None
    total,  # of the shape of x: the sum; x or the residual
    following,  # of the shape of x: norm of the sum; only with a residual
    following_shift,
    following_scale,
    inputs,  # (branches * blocks, BLOCK_FRAMES, INPUTS) of the convolution
    state,
    table,
    blocks,
    width,
    chunk_stride,
    branch_stride,
    epsilon,
    BLOCK_FRAMES: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    INPUTS: tl.constexpr,
    INPUTS_UP: tl.constexpr,
    TAPS: tl.constexpr,
    TAPS_UP: tl.constexpr,
):
    frame, row = tl.program_id(0), tl.program_id(1)
    if frame == BLOCK_FRAMES:  # the last program of a row stores the state
        keep_last_inputs(
            inputs,
            state,
            table + (row % blocks) * width,
            row,
            row // blocks,
            tl.arange(0, INPUTS_UP),
            INPUTS,
            chunk_stride,
            branch_stride,
            BLOCK_FRAMES,
            TAPS,
            TAPS_UP,
        )
    else:
        column = tl.arange(0, WIDTH)
        inside = column < CHANNELS
        at = (row.to(tl.int64) * BLOCK_FRAMES + frame) * CHANNELS + column
        values = tl.load(x + at, mask=inside, other=0.0)
        if shift is not None:
            values = mish(normalized(values, CHANNELS, shift, scale, column, inside, epsilon))
        if gate is not None:
            values *= tl.load(gate + column, mask=inside, other=0.0)
        if added is not None:
            values += tl.load(added + column, mask=inside, other=0.0)
        if residual is not None:
            values += tl.load(residual + at, mask=inside, other=0.0)
            values = tl.where(inside, values, 0.0)
            normed = normalized(
                values, CHANNELS, following_shift, following_scale, column, inside, epsilon
            )
            tl.store(following + at, normed.to(following.dtype.element_ty), mask=inside)
        tl.store(total + at, values, mask=inside)


class CausalConvolution:
    """Causal convolution on a kernel.

    Args:
        conv: convolution. Its weights are copied, in the order in which the kernel reads them.
        precision: arithmetic of the products, see `PositionConvolution`.
    """

    def __init__(self, conv: CausalConv, precision: Precision) -> None:
        assert conv.bias is not None
        self.index, self._precision = conv.index, precision
        # (taps, outputs, inputs)
        weights = conv.weight.detach().permute(2, 0, 1).contiguous()
        self._weights = rounded_weights(weights, precision)
        self._bias = conv.bias.detach()

    def __call__(self, x: torch.Tensor, past: Past) -> torch.Tensor:
        """Computes the convolution of every block after its past inputs, and stores its state.

        Args:
            x: (branches * blocks, block_frames, inputs) float32, contiguous; the rows of a branch
                are neighbours.

        Returns:
            (branches * blocks, block_frames, outputs). Values after the valid frames of a block
            have no meaning.
        """
        out = self.convolve(x, past)
        store_state(x, past.states[self.index], past.table)
        return out

    def convolve(self, x: torch.Tensor, past: Past) -> torch.Tensor:
        """Computes the convolution, without storing its state."""
        assert x.is_contiguous()
        blocks, frames, inputs = x.shape
        taps, outputs, _ = self._weights.shape
        state, rows = past.states[self.index], blocks * frames
        assert state.stride()[2:] == (1, inputs)
        out = x.new_empty(blocks, frames, outputs)
        size = tiles.ProductSize(rows, outputs, taps * inputs, x.dtype)
        tile = tiles.choose("convolution", size, x.device)
        _causal_convolution[triton.cdiv(rows, tile.rows), triton.cdiv(outputs, tile.outputs)](
            x,
            self._weights,
            self._bias,
            state,
            out,
            *rows_of(past.table),
            *state.stride()[:2],
            rows,
            BLOCK_FRAMES=frames,
            TAPS=taps,
            INPUTS=inputs,
            OUTPUTS=outputs,
            PRECISION=self._precision,
            ROWS_OF_TILE=tile.rows,
            OUTPUTS_OF_TILE=tile.outputs,
            INPUTS_OF_TILE=tile.inputs,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
        return out

    def add_gated(
        self,
        x: torch.Tensor,
        past: Past,
        residual: torch.Tensor,
        gate: torch.Tensor,
        following: NormVectors,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Adds gate * convolution to a residual in place, and returns the norm of the sum. It also
        stores the state of the convolution.

        Args:
            residual: (branches * blocks, block_frames, outputs) float32, contiguous.
            gate: (outputs,) float32, contiguous.
            following: norm of the sum.
        """
        assert residual.is_contiguous()
        out = self.convolve(x, past)
        normed = torch.empty_like(out, dtype=dtype)
        self.finish(
            out,
            x,
            past,
            gate=gate,
            residual=residual,
            into=residual,
            following=following,
            normed=normed,
        )
        return normed

    def finish(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        past: Past,
        *,
        norm: NormVectors | None = None,
        gate: torch.Tensor | None = None,
        shift: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        into: torch.Tensor | None = None,
        following: NormVectors | None = None,
        normed: torch.Tensor | None = None,
    ) -> None:
        """Computes the operations after the convolution, and stores its state.

        Args:
            norm: norm before Mish; None for neither.
            gate, shift: (outputs,) factor and summand of each channel; None to leave them out.
            residual: second summand, of the shape of `out`; None to leave it out.
            into: where the sum is stored; None to replace `out`.
            following: norm of the sum, with the epsilon of `norm`; only with a residual.
            normed: where the norm of the sum is stored.
        """
        rows, frames, channels = out.shape
        state = past.states[self.index]
        _, _, inputs, positions = state.shape
        norms = [vectors for vectors in (norm, following) if vectors is not None]
        assert len({vectors.epsilon for vectors in norms}) == 1
        _finish[(frames + 1, rows)](
            out,
            norm and norm.shift,
            norm and norm.scale,
            gate,
            shift,
            residual,
            out if into is None else into,
            normed,
            following and following.shift,
            following and following.scale,
            x,
            state,
            *rows_of(past.table),
            *state.stride()[:2],
            norms[0].epsilon,
            BLOCK_FRAMES=frames,
            CHANNELS=channels,
            INPUTS=inputs,
            INPUTS_UP=triton.next_power_of_2(inputs),
            TAPS=positions + 1,
            TAPS_UP=triton.next_power_of_2(positions),
            **row_width(channels),
        )


class NormedConvolution:
    """Causal convolution, a norm over channels, and Mish.

    Args:
        conv, precision: see `CausalConvolution`.
    """

    def __init__(self, conv: CausalConv, norm: torch.nn.LayerNorm, precision: Precision) -> None:
        self._convolution = CausalConvolution(conv, precision)
        self._norm = NormVectors.of(norm)

    def __call__(
        self, x: torch.Tensor, past: Past, shift: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Computes mish(norm(convolution)) + shift, and stores the state of the convolution.

        Args:
            x, past: as in `CausalConvolution`.
            shift: (outputs,) float32, contiguous; None for zeros.

        Returns:
            (branches * blocks, block_frames, outputs) float32.
        """
        out = self._convolution.convolve(x, past)
        self._convolution.finish(out, x, past, norm=self._norm, shift=shift)
        return out

    def with_residual(
        self,
        x: torch.Tensor,
        past: Past,
        residual: torch.Tensor,
        following: NormVectors,
        dtype: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes mish(norm(convolution)) + residual and the norm of this sum, and stores the
        state of the convolution.

        Args:
            x, past: as in `CausalConvolution`.
            residual: (branches * blocks, block_frames, outputs) float32, contiguous.
            following: norm of the sum. Both norms have the same epsilon.

        Returns:
            The sum in float32, and its norm, both of the shape of `residual`.
        """
        assert residual.is_contiguous()
        out = self._convolution.convolve(x, past)
        normed = torch.empty_like(out, dtype=dtype)
        self._convolution.finish(
            out, x, past, norm=self._norm, residual=residual, following=following, normed=normed
        )
        return out, normed

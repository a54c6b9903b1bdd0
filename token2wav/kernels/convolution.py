"""Convolutions over signals in channels-last buffers, fused with bias, residual and activation.

A *signal* is a buffer (branches, streams, halo + rows, channels) with the input of a layer. Its
first rows, the *halo*, are the last rows of the previous piece. They are the streaming state of the
layers that read the signal. Every kernel that writes a signal also fills its halo from the old
states, and writes the new states. So the states need no launches of their own. Rows before the
start and after the end of a stream are zero.

One launch computes one layer of several parallel branches, for all streams. Pieces of a batch may
have different lengths, and different places in their streams: a table on the device holds both. A
program (an instance of a kernel) returns immediately if its rows lie after the end of the piece.

With TF32 the kernels round every input of a product to 10 bits of mantissa when they store it.
Tensor cores ignore the other bits. So they compute the same products as any other device. With
float16 they round inputs when they read them, to as many bits of mantissa.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl

from token2wav.kernels import tiles
from token2wav.networks.estimator import Estimator

Activation = Literal["none", "snake", "leaky", "elu"]
Precision = Literal["tf32", "tf32x3", "ieee", "float16"]

# Columns of the table of pieces.
START = tl.constexpr(0)  # frames of the stream before the piece, at most `FAR`
FRAMES = tl.constexpr(1)  # frames of the piece; 0 for rows of a batch that hold no piece
REMAINING = tl.constexpr(2)  # frames from the start of the piece to the end of the stream, or `FAR`
OFFSET = tl.constexpr(3)  # index of the first frame of the piece in the mel of the batch
COLUMNS = tl.constexpr(4)  # columns of the table
FAR = 1 << 16  # frames after which the start and the end of a stream affect no row

# Columns of the geometry of a branch.
TAPS = tl.constexpr(0)
TAP_STEP = tl.constexpr(1)  # elements of the buffer between two taps
FIRST = tl.constexpr(2)  # index in the buffer of the first tap of the first row
RESIDUAL_FIRST = tl.constexpr(3)  # index of the first row in the buffer of the residual
DELAY = tl.constexpr(4)  # rows by which the result is late
SPAN = tl.constexpr(5)  # columns of a geometry

# Strides and indices are multiples of this number. So Triton compiles one binary for all of them,
# with wide loads and stores.
_ALIGNMENT = 16
_HALO_TILE = tl.constexpr(1024)  # elements of a halo that a program copies at once

# Arguments that differ from layer to layer or from batch to batch, and on which no wide load
# depends; see `OF_A_BATCH` of block_table.py.
OF_A_LAYER = ("streams", "rate", "extra", "slope", "delay", "branches", "row_limit")


@triton.jit
def rounded(values):
    """Rounds float32 to the nearest number with 10 bits of mantissa; keeps infinity and NaN."""
    bits = values.to(tl.int32, bitcast=True)
    near = (bits + 0xFFF + ((bits >> 13) & 1)) & -8192
    return tl.where(values == values, near.to(tl.float32, bitcast=True), values)


@triton.jit
def halved(values):
    """Rounds float32 to float16. A number beyond the range becomes the largest one; NaN stays."""
    near = tl.minimum(tl.maximum(values, -65504.0), 65504.0)
    return tl.where(values == values, near, values).to(tl.float16)


@triton.jit
def rounded_product(inputs, weight, PRECISION: tl.constexpr):
    """Computes the product of inputs, which it rounds to a precision, and rounded weights."""
    if PRECISION == "float16":
        result = tl.dot(halved(inputs), weight)
    else:
        if PRECISION == "tf32":
            inputs = rounded(inputs)
        result = tl.dot(inputs, weight, input_precision=PRECISION)
    return result


@triton.jit
def carry_halo(buffer, old, new, halo, shift, fresh, part, parts):
    """Fills the halo of a signal from the old state, or with zeros where a stream begins.

    If a piece is shorter than the halo, `halo - shift` elements of the old state remain in the new
    state.
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


@triton.jit
def activated(values, slopes, width, column, inside, slope, ACTIVATION: tl.constexpr):
    """Applies an activation. `slopes` has the rows a, b, c of Snake: b x + c sin(a x) ** 2."""
    if ACTIVATION == "snake":
        scale = tl.load(slopes + column, mask=inside, other=0.0)[None, :]
        straight = tl.load(slopes + width + column, mask=inside, other=0.0)[None, :]
        gain = tl.load(slopes + 2 * width + column, mask=inside, other=0.0)[None, :]
        sine = tl.sin(values * scale)
        values = values * straight + sine * sine * gain
    elif ACTIVATION == "leaky":
        values = tl.where(values < 0, values * slope, values)
    elif ACTIVATION == "elu":
        values = tl.where(values < 0, tl.exp(values) - 1, values)
    return values


@triton.jit(do_not_specialize=OF_A_LAYER)
def _multiply_rows(
    x,  # signal; products read it
    x_stream,  # elements between streams of the signal
    x_branch,  # elements between branches
    x_step,  # elements between the first taps of neighbouring rows
    weights,  # (branches, outputs, taps * channels)
    bias,  # (branches, outputs)
    geometry,  # (branches, SPAN) int32
    channels,  # elements of a tap
    width,  # elements of all taps, in the branch with the most taps
    outputs,
    residual,  # signal that is added to the result, or None
    residual_stream,
    residual_branch,
    raw,  # signal for the result before the activation, or None
    raw_stream,
    raw_branch,
    raw_halo,
    raw_state,  # index of its halo in a row of states
    out,  # signal for the result after the activation, or None
    out_stream,
    out_branch,
    out_halo,
    out_state,
    slopes,  # (branches, 3, outputs) coefficients of Snake
    old,  # (streams, state_width) states before the piece
    new,  # (streams, state_width) states after the piece
    state_width,
    pieces,  # (streams, COLUMNS) int32
    streams,
    rate,  # rows per frame
    extra,  # rows after the last frame of a stream
    slope,  # of the leaky ReLU
    PHASES: tl.constexpr,  # rows of the result that one row of the product holds
    ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr,
    ROUND: tl.constexpr,
    ALIGNED: tl.constexpr,  # divisor of every index and step in the buffer of x
    TILE_ROWS: tl.constexpr,
    TILE_OUTPUTS: tl.constexpr,
    TILE_INPUTS: tl.constexpr,
):
    tile, part = tl.program_id(0), tl.program_id(1)
    branch, stream = tl.program_id(2) // streams, (tl.program_id(2) % streams).to(tl.int64)
    piece = pieces + stream * COLUMNS
    frames = tl.load(piece + FRAMES)
    start = tl.load(piece + START)
    rows = frames * rate
    first_row = (tile - 1) * TILE_ROWS
    if first_row >= rows:
        return
    old += stream * state_width
    new += stream * state_width
    if raw is not None:
        raw += branch * raw_branch + stream * raw_stream
    if out is not None:
        out += branch * out_branch + stream * out_stream
    if tile == 0:
        if rows == 0:
            return
        if raw is not None:
            state_offset = raw_state + branch * raw_halo
            carry_halo(
                raw,
                old + state_offset,
                new + state_offset,
                raw_halo,
                rows * outputs,
                start == 0,
                part,
                tl.num_programs(1),
            )
        if out is not None:
            state_offset = out_state + branch * out_halo
            carry_halo(
                out,
                old + state_offset,
                new + state_offset,
                out_halo,
                rows * outputs,
                start == 0,
                part,
                tl.num_programs(1),
            )
        return
    branch_geometry = geometry + branch * SPAN
    taps = tl.load(branch_geometry + TAPS)
    tap_step = tl.multiple_of(tl.load(branch_geometry + TAP_STEP), ALIGNED)
    first = tl.multiple_of(tl.load(branch_geometry + FIRST), ALIGNED)
    row = first_row + tl.arange(0, TILE_ROWS)
    output = part * TILE_OUTPUTS + tl.arange(0, TILE_OUTPUTS)
    column = tl.arange(0, TILE_INPUTS)
    x += branch * x_branch + stream * x_stream + first
    weights += branch * outputs * width
    result = tl.zeros((TILE_ROWS, TILE_OUTPUTS), x.dtype.element_ty)
    chunks = tl.cdiv(channels, TILE_INPUTS)
    for step in range(taps * chunks):
        tap, channel = step // chunks, (step % chunks) * TILE_INPUTS + column
        channel_mask = channel < channels
        inputs = tl.load(
            x + row[:, None] * x_step + tap * tap_step + channel[None, :],
            mask=(row < rows)[:, None] & channel_mask[None, :],
            other=0.0,
        )
        weight = tl.load(
            weights + output[None, :] * width + tap * channels + channel[:, None],
            mask=(output < outputs)[None, :] & channel_mask[:, None],
            other=0.0,
        )
        if PRECISION == "float16":
            result = tl.dot(halved(inputs), weight, result)
        else:
            result = tl.dot(
                inputs, weight, result, input_precision=PRECISION, out_dtype=x.dtype.element_ty
            )
    output_mask = output < outputs
    result += tl.load(bias + branch * outputs + output, mask=output_mask, other=0.0)[None, :]
    inside = (row < rows)[:, None] & output_mask[None, :]
    at = row[:, None] * outputs + output[None, :]
    if residual is not None:
        residual += branch * residual_branch + stream * residual_stream
        residual += tl.multiple_of(tl.load(branch_geometry + RESIDUAL_FIRST), ALIGNED)
        result += tl.load(residual + at, mask=inside, other=0.0)
    # Position 0 of the stream is in row `delay - start`, in rows of the result.
    delay, speed = tl.load(branch_geometry + DELAY), rate * PHASES
    position = row[:, None] * PHASES + output[None, :] // (outputs // PHASES) - delay
    remaining = tl.load(piece + REMAINING)
    in_stream = (position >= -start * speed) & (position < remaining * speed + extra)
    shift = rows * outputs
    if raw is not None:
        state_offset = raw_state + branch * raw_halo
        store_rows(
            tl.where(in_stream, result, 0), raw, new + state_offset, at, raw_halo, shift, inside
        )
    if out is not None:
        if ACTIVATION == "snake":
            slopes += branch * 3 * outputs
        result = activated(result, slopes, outputs, output, output_mask, slope, ACTIVATION)
        result = tl.where(in_stream, result, 0)
        if ROUND:
            result = rounded(result)
        state_offset = out_state + branch * out_halo
        store_rows(result, out, new + state_offset, at, out_halo, shift, inside)


@triton.jit(do_not_specialize=OF_A_LAYER)
def _fan_out(
    x,  # (streams, rows, channels)
    source,  # (streams, rows, channels)
    row_limit,  # rows of a stream in both
    channels,
    raw,  # signal for x + source
    raw_stream,
    raw_halo,
    raw_state,
    out,  # signal of several branches for the activations of x + source
    out_stream,
    out_branch,
    out_halo,
    out_state,
    slopes,  # (branches, 3, channels)
    old,
    new,
    state_width,
    pieces,
    rate,
    extra,
    delay,
    MIRROR: tl.constexpr,
    ROUND: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_CHANNELS: tl.constexpr,
):
    tile, branch, stream = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    piece = pieces + stream * COLUMNS
    rows, start = tl.load(piece + FRAMES) * rate, tl.load(piece + START)
    first_row = (tile - 1) * TILE_ROWS
    if first_row >= rows:
        return
    shift = rows * channels
    old += stream * state_width
    new += stream * state_width
    raw += stream * raw_stream
    out += stream * out_stream + branch * out_branch
    out_state += branch * out_halo
    if tile == 0:
        if rows == 0:
            return
        carry_halo(out, old + out_state, new + out_state, out_halo, shift, start == 0, 0, 1)
        if branch == 0:
            carry_halo(raw, old + raw_state, new + raw_state, raw_halo, shift, start == 0, 0, 1)
        return
    row, column = first_row + tl.arange(0, TILE_ROWS), tl.arange(0, TILE_CHANNELS)
    position = row - delay + start * rate
    read = row
    if MIRROR:
        # The STFT has one window more than hops: position 0 repeats position 2.
        read = tl.where(position == 0, row + 2, row)
    channel_mask = column < channels
    inside = (row < rows)[:, None] & channel_mask[None, :]
    begin = stream * row_limit * channels
    readable = (read < rows)[:, None] & channel_mask[None, :]
    values = tl.load(
        x + begin + read[:, None] * channels + column[None, :], mask=readable, other=0.0
    )
    at = row[:, None] * channels + column[None, :]
    values += tl.load(source + begin + at, mask=inside, other=0.0)
    in_stream = (position >= 0) & (
        position - start * rate < tl.load(piece + REMAINING) * rate + extra
    )
    if branch == 0:
        total = tl.where(in_stream[:, None], values, 0)
        store_rows(total, raw, new + raw_state, at, raw_halo, shift, inside)
    values = activated(
        values, slopes + branch * 3 * channels, channels, column, channel_mask, 0.0, "snake"
    )
    values = tl.where(in_stream[:, None], values, 0)
    if ROUND:
        values = rounded(values)
    store_rows(values, out, new + out_state, at, out_halo, shift, inside)


@triton.jit(do_not_specialize=OF_A_LAYER)
def _mean(
    x,  # signal of several branches
    x_stream,
    x_branch,
    geometry,  # of the branches
    branches,
    channels,
    out,  # signal for the leaky ReLU of the mean
    out_stream,
    out_halo,
    out_state,
    old,
    new,
    state_width,
    pieces,
    rate,
    extra,
    delay,
    slope,
    ROUND: tl.constexpr,
    ALIGNED: tl.constexpr,  # divisor of the indices in the buffer of x
    TILE_ROWS: tl.constexpr,
    TILE_CHANNELS: tl.constexpr,
):
    tile, stream = tl.program_id(0), tl.program_id(1).to(tl.int64)
    piece = pieces + stream * COLUMNS
    rows, start = tl.load(piece + FRAMES) * rate, tl.load(piece + START)
    first_row = (tile - 1) * TILE_ROWS
    if first_row >= rows:
        return
    shift = rows * channels
    old += stream * state_width + out_state
    new += stream * state_width + out_state
    out += stream * out_stream
    if tile == 0:
        if rows == 0:
            return
        carry_halo(out, old, new, out_halo, shift, start == 0, 0, 1)
        return
    row, column = first_row + tl.arange(0, TILE_ROWS), tl.arange(0, TILE_CHANNELS)
    inside = (row < rows)[:, None] & (column < channels)[None, :]
    at = row[:, None] * channels + column[None, :]
    values = tl.zeros((TILE_ROWS, TILE_CHANNELS), tl.float32)
    for branch in range(branches):
        first = tl.load(geometry + branch * SPAN + RESIDUAL_FIRST)
        first = tl.multiple_of(first, ALIGNED)
        values += tl.load(
            x + branch * x_branch + stream * x_stream + first + at, mask=inside, other=0.0
        )
    values = values / branches
    values = tl.where(values < 0, values * slope, values)
    in_stream = (row - delay >= -start * rate) & (
        row - delay < tl.load(piece + REMAINING) * rate + extra
    )
    values = tl.where(in_stream[:, None], values, 0)
    if ROUND:
        values = rounded(values)
    store_rows(values, out, new, at, out_halo, shift, inside)


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
        """Arguments of a kernel that reads the signal. All branches can read a single branch."""
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


@dataclass(frozen=True, eq=False)
class Convolution:
    """Convolutions of one or more branches, with bias, residual and activation, in one launch.

    Attributes:
        weights: (branches, outputs, taps * channels).
        bias: (branches, outputs).
        geometry: (branches, 5) int32: taps, elements between taps, index of the first tap, index of
            the residual, delay of the result.
        channels: elements of a tap.
        step: elements between the first taps of neighbouring rows.
        rate: rows of the product per frame.
        phases: rows of the result that a row of the product holds.
        raw: layout of the result before the activation; None if no layer reads it.
        out: layout of the result after the activation; None if no layer reads it.
        slopes: (branches, 3, outputs) coefficients of Snake.
        precision: arithmetic of the products. With `tf32` the activated result is rounded. With
            `float16` the weights are float16, and signals float32.
    """

    weights: torch.Tensor
    bias: torch.Tensor
    geometry: torch.Tensor
    channels: int
    step: int
    rate: int
    phases: int = 1
    raw: SignalLayout | None = None
    out: SignalLayout | None = None
    activation: Activation = "none"
    slopes: torch.Tensor | None = None
    slope: float = 0.0
    precision: Precision = "ieee"

    def __call__(
        self, batch: PieceTensors, x: Signal, residual: Signal | None = None
    ) -> tuple[Signal | None, Signal | None]:
        """Returns the result before the activation, and after it."""
        branches, outputs, width = self.weights.shape
        raw, out = (
            Signal.empty(layout, batch) if layout else None for layout in (self.raw, self.out)
        )
        result_layout = self.out or self.raw
        assert result_layout is not None
        rows, dtype, copies = batch.frames * self.rate, x.layout.dtype, branches * batch.streams
        size = tiles.ProductSize(rows, outputs, width, dtype, copies)
        tile = tiles.choose("vocoder", size, self.weights.device)
        grid = 1 + triton.cdiv(rows, tile.rows), triton.cdiv(outputs, tile.outputs), copies
        _multiply_rows[grid](
            *x.reading,
            self.step,
            self.weights,
            self.bias,
            self.geometry,
            self.channels,
            width,
            outputs,
            *(residual.reading if residual else (None, 0, 0)),
            *(raw.writing if raw else _NOWHERE),
            *(out.writing if out else _NOWHERE),
            self.slopes,
            *batch.states(dtype),
            batch.pieces,
            batch.streams,
            self.rate,
            result_layout.extra,
            self.slope,
            PHASES=self.phases,
            ACTIVATION=self.activation,
            PRECISION=self.precision,
            ROUND=self.precision == "tf32",
            ALIGNED=alignment(x.layout.channels),
            TILE_ROWS=tile.rows,
            TILE_OUTPUTS=tile.outputs,
            TILE_INPUTS=tile.inputs,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
        return raw, out


_NOWHERE = (None, 0, 0, 0, 0)  # arguments of a kernel for a signal that it does not write


def fan_out(
    batch: PieceTensors,
    x: Signal,
    source: Signal,
    raw: SignalLayout,
    out: SignalLayout,
    slopes: torch.Tensor,
    *,
    mirror: bool,
    precision: Precision,
) -> tuple[Signal, Signal]:
    """Returns x + source, and its Snakes for several branches.

    Args:
        x, source: signals without halo.
        slopes: (branches, 3, channels) coefficients of Snake.
        mirror: whether position 0 repeats position 2.
        precision: with `tf32` the Snakes are rounded.
    """
    total, activated_sum = Signal.empty(raw, batch), Signal.empty(out, batch)
    sizes = _rows_of(raw.channels)
    grid = 1 + triton.cdiv(batch.frames * raw.rate, sizes["TILE_ROWS"]), len(slopes), batch.streams
    _fan_out[grid](
        x.data,
        source.data,
        x.data.shape[2],
        raw.channels,
        *total.writing_alone,
        *activated_sum.writing,
        slopes,
        *batch.states(raw.dtype),
        batch.pieces,
        raw.rate,
        raw.extra,
        raw.delays[0],
        MIRROR=mirror,
        ROUND=precision == "tf32",
        **sizes,
    )
    return total, activated_sum


def mean(
    batch: PieceTensors,
    x: Signal,
    geometry: torch.Tensor,
    out: SignalLayout,
    slope: float,
    *,
    precision: Precision,
) -> Signal:
    """Returns the leaky ReLU of the mean of all branches.

    Args:
        geometry: (branches, 5) int32; only the indices of the residuals are read.
        precision: with `tf32` the result is rounded.
    """
    result, sizes = Signal.empty(out, batch), _rows_of(out.channels)
    _mean[(1 + triton.cdiv(batch.frames * out.rate, sizes["TILE_ROWS"]), batch.streams)](
        *x.reading,
        geometry,
        len(geometry),
        out.channels,
        *result.writing_alone,
        *batch.states(out.dtype),
        batch.pieces,
        out.rate,
        out.extra,
        out.delays[0],
        slope,
        ROUND=precision == "tf32",
        ALIGNED=alignment(x.layout.channels),
        **sizes,
    )
    return result


def _rows_of(channels: int) -> dict[str, int]:
    """Returns sizes of tiles of about 1024 elements that hold whole rows."""
    width = max(16, triton.next_power_of_2(channels))
    return {"TILE_ROWS": max(1, 1024 // width), "TILE_CHANNELS": width}


def aligned(count: int) -> int:
    """Rounds a count up to a multiple of `_ALIGNMENT`."""
    return -(-count // _ALIGNMENT) * _ALIGNMENT


def alignment(channels: int) -> int:
    """Returns a divisor of the index of every row in a buffer."""
    return math.gcd(channels, _ALIGNMENT)


def tf32(x: torch.Tensor) -> torch.Tensor:
    """Rounds float32 to the nearest number with 10 bits of mantissa, as `rounded` on a device."""
    bits = x.contiguous().view(torch.int32)
    near = (bits + 0xFFF + ((bits >> 13) & 1)) & -8192
    return torch.where(x == x, near.view(torch.float32), x)


def rounded_weights(weights: torch.Tensor, precision: Precision) -> torch.Tensor:
    """Rounds the weights of a convolution as its precision needs it."""
    if precision == "float16":
        most = torch.finfo(torch.float16).max
        return weights.clamp(-most, most).half().contiguous()
    return tf32(weights) if precision == "tf32" else weights.contiguous()


def precision_of(estimator: Estimator) -> Precision:
    """Returns the arithmetic of the convolutions of an estimator."""
    return precision_beside(estimator.cache_type, half_inputs=estimator.half_convolution_inputs)


def precision_beside(dtype: torch.dtype, *, half_inputs: bool = False) -> Precision:
    """Returns the arithmetic of float32 convolutions in a network whose other products have a
    dtype. TF32 has as many bits of mantissa as float16, and the range of float32.

    Args:
        half_inputs: round to float16 rather than to TF32.
    """
    if dtype != torch.float16:
        return "tf32x3"
    return "float16" if half_inputs else "tf32"

"""Kernels that prepare the input of a streaming layer in one launch. torch would need several.

The *context* of an input is the positions before and after it: the state of a stream, or zeros. A
*window* is the positions that one output of a convolution reads. `with_context` applies the
activation, joins the context and replaces the state (`StreamStep.with_context`). `windows` does the
same, but writes the windows, as rows of a matrix product, and rounds them. `depthwise` computes the
convolution of each channel.

The kernels take strides, so input and result may have either memory order of a tensor (B, C, T).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from token2wav.config.settings import DecoderPrecision
from token2wav.kernels.activations import snake
from token2wav.kernels.rounding import to_float16
from token2wav.layers.packed_linear import INPUT_SCALE, PARTS, SMALL_SCALE
from token2wav.layers.streaming import Curve, KernelContext, is_channels_last

MOST_REACH = 64  # positions of a state, which one program holds in registers
_SHORT_REACH = 16  # one binary serves all states up to this length
_TILE = 32  # channels, and positions; divides common channel counts such as 96
_STATE_ARGUMENTS = "state_stream", "before", "begin", "stop", "positions", "first", "last"
_WARPS = 8
_NO_CURVE = Curve()
_INPUT_SCALE, _SMALL_SCALE = tl.constexpr(INPUT_SCALE), tl.constexpr(SMALL_SCALE)


@triton.jit
def _activated(x, frequency, inverse, channel, snakes, slope, ELU: tl.constexpr):
    """Computes the activation of a tile. 0 stays 0."""
    result = x
    if ELU:
        result = tl.where(x > 0, x, tl.exp(x) - 1.0)
    elif slope is not None:
        result = tl.where(x > 0, x, x * slope)
    if frequency is not None:
        curved = channel < snakes
        frequency = tl.load(frequency + channel, mask=curved, other=0.0)
        inverse = tl.load(inverse + channel, mask=curved, other=0.0)
        result = tl.where(curved, snake(x, frequency, inverse), result)
    return result


@triton.jit
def _replace_state(
    state,  # addresses of the positions `slot`
    slot,
    held,  # whether the state has the position
    x,  # addresses of the first position of x, by channel
    x_time,
    frequency,
    inverse,
    channel,
    snakes,
    slope,
    before,
    begin,
    stop,
    positions,
    first,
    ELU: tl.constexpr,
):
    """Overwrites the state with the last positions of the input with its context.

    If x has fewer `positions` than the state, the old state moves forward by them, and fills the
    beginning of the new state.
    """
    skipped = positions - before
    source = skipped + slot
    read = held & (source >= begin) & (source < stop)
    ending = x + skipped.to(tl.int64) * x_time + slot * x_time
    new = tl.load(ending, mask=read, other=0.0)
    new = _activated(new, frequency, inverse, channel, snakes, slope, ELU)
    kept = held & (first == 0) & (source < 0)
    new = tl.where(kept, tl.load(state + positions, mask=kept, other=0.0), new)
    tl.debug_barrier()  # other threads of the program may still read the old state
    tl.store(state, new, mask=held)


@triton.jit
def _store_in_windows(
    at,  # address of tap 0 in the window that starts at `position`
    values,
    present,
    position,  # of the values in the input with its context
    windows,
    part_stride,
    taps,
    tap_stride,  # from tap t of window w to tap t + 1 of window w - dilation
    dilation,
    PARTS: tl.constexpr,
):
    """Stores values in all windows that contain them, rounded as by `PackedWeight.rounded`.

    Position p is tap t of window p - t * dilation. For example, with 3 taps and dilation 2,
    position 9 is tap 0 of window 9, tap 1 of window 7, and tap 2 of window 5. With three parts, a
    row has all taps of the small part, then twice all taps of the large part.
    """
    if PARTS == 3:
        scaled = values * _INPUT_SCALE
        large = scaled.to(tl.float16)
        small = ((scaled - large.to(tl.float32)) * _SMALL_SCALE).to(tl.float16)
    elif at.dtype.element_ty == tl.float16:
        values = to_float16(values)
    for tap in range(taps):
        window = position - tap * dilation
        mask = present & (window >= 0) & (window < windows)
        if PARTS == 3:
            tl.store(at, small, mask=mask)
            tl.store(at + part_stride, large, mask=mask)
            tl.store(at + 2 * part_stride, large, mask=mask)
        else:
            tl.store(at, values, mask=mask)
        at += tap_stride


@triton.jit(
    do_not_specialize=(*_STATE_ARGUMENTS, "windows", "dilation"),
    do_not_specialize_on_alignment=("state",),
)
def _with_context(
    x,  # (streams, channels, times), strided
    x_stream,
    x_channel,
    x_time,
    state,  # (streams, channels, before) positions before x
    state_stream,
    frequency,  # (snakes,); None if no channel has Snake
    inverse,
    snakes,  # channels with Snake, the first ones
    slope,  # of LeakyReLU for the other channels; None if they have none
    out,  # (streams, PARTS * taps * channels, windows), strided
    out_stream,
    out_channel,
    out_time,
    windows,
    part_stride,  # taps * channels * out_channel
    taps,
    tap_stride,  # channels * out_channel - dilation * out_time
    dilation,
    channels,
    before,  # positions before x
    begin,  # the first position of x that belongs to the streams
    stop,  # the position after the last one
    positions,  # those of x, and zeros after x
    first,  # whether streams begin with this step: zeros replace the state
    last,  # whether streams end with this step: the state is not replaced
    PARTS: tl.constexpr,
    ELU: tl.constexpr,
    REACH: tl.constexpr,  # a power of two, at least `before`; 0 without positions before x
    TILE: tl.constexpr,
):
    tile = tl.program_id(0)
    channel = tl.program_id(1) * TILE + tl.arange(0, TILE)[:, None]
    # A batch, or the signal of a whole utterance, may have 2^31 elements.
    stream = tl.program_id(2).to(tl.int64)
    row = channel.to(tl.int64)
    x += stream * x_stream + row * x_channel
    out += stream * out_stream + row * out_channel
    present = channel < channels
    start = tile * TILE
    lane = tl.arange(0, TILE)[None, :]
    time = start + lane
    mask = present & (time >= begin) & (time < stop)
    values = tl.load(x + start.to(tl.int64) * x_time + lane * x_time, mask=mask, other=0.0)
    values = _activated(values, frequency, inverse, channel, snakes, slope, ELU)
    at = out + (start + before).to(tl.int64) * out_time + lane * out_time
    _store_in_windows(
        at,
        values,
        present & (time < positions),
        before + time,
        windows,
        part_stride,
        taps,
        tap_stride,
        dilation,
        PARTS,
    )
    if REACH:  # noqa: SIM102, decided when the kernel is compiled
        if tile == 0:
            slot = tl.arange(0, REACH)[None, :]
            held = present & (slot < before)
            old = state + stream * state_stream + channel * before + slot
            _store_in_windows(
                out + slot * out_time,
                tl.load(old, mask=held & (first == 0), other=0.0),
                held,
                slot,
                windows,
                part_stride,
                taps,
                tap_stride,
                dilation,
                PARTS,
            )
            if last == 0:
                activation = frequency, inverse, channel, snakes, slope
                span = before, begin, stop, positions, first
                _replace_state(old, slot, held, x, x_time, *activation, *span, ELU)


@triton.jit(
    do_not_specialize=(*_STATE_ARGUMENTS, "outputs", "dilation"),
    do_not_specialize_on_alignment=("state",),
)
def _depthwise(
    x,  # (streams, channels, times), strided
    x_stream,
    x_channel,
    x_time,
    state,  # (streams, channels, before) positions before x
    state_stream,
    frequency,  # arguments of the activation, as of `_with_context`
    inverse,
    snakes,
    slope,
    weight,  # (channels, taps)
    bias,  # (channels,); None for none
    out,  # (streams, outputs, channels)
    outputs,
    taps,
    dilation,
    channels,
    before,  # and the following, as of `_with_context`
    begin,
    stop,
    positions,
    first,
    last,
    ELU: tl.constexpr,
    REACH: tl.constexpr,
    TIMES: tl.constexpr,  # at least `before`, so that only the first program reads the state
    TILE: tl.constexpr,
):
    tile = tl.program_id(0)
    channel = tl.program_id(1) * TILE + tl.arange(0, TILE)[:, None]
    stream = tl.program_id(2).to(tl.int64)
    x += stream * x_stream + channel.to(tl.int64) * x_channel
    present = channel < channels
    start = (tile * TIMES).to(tl.int64)
    lane = tl.arange(0, TIMES)[None, :]
    old = state + stream * state_stream + channel * before
    result = tl.zeros((TILE, TIMES), tl.float32)
    if bias is not None:
        result += tl.load(bias + channel, mask=present, other=0.0)
    for tap in range(taps):
        position = start + lane + tap * dilation  # in the input with its context
        time = position - before
        read = present & (time >= begin) & (time < stop)
        values = tl.load(x + time * x_time, mask=read, other=0.0)
        values = _activated(values, frequency, inverse, channel, snakes, slope, ELU)
        if REACH:
            stored = present & (position < before) & (first == 0)
            values += tl.load(old + position, mask=stored, other=0.0)
        result += values * tl.load(weight + channel * taps + tap, mask=present, other=0.0)
    at = out + (stream * outputs + start + lane) * channels + channel
    tl.store(at, result, mask=present & (start + lane < outputs))
    if REACH:  # noqa: SIM102, decided when the kernel is compiled
        if (tile == 0) & (last == 0):
            slot = tl.arange(0, REACH)[None, :]
            held = present & (slot < before)
            activation = frequency, inverse, channel, snakes, slope
            span = before, begin, stop, positions, first
            _replace_state(old + slot, slot, held, x, x_time, *activation, *span, ELU)


def with_context(
    x: torch.Tensor,
    context: KernelContext,
    curve: Curve | None = None,
    *,
    channels_last: bool | None = None,
) -> torch.Tensor:
    """Returns x (B, C, T) after its activation with its context (B, C, before + T + after), and
    replaces the state of streams that continue.

    Args:
        context: at most `MOST_REACH` positions before x.
        curve: activation of x.
        channels_last: memory order of the result; None for that of x.
    """
    streams, channels, times = x.shape
    length = context.before + times + context.after
    if is_channels_last(x) if channels_last is None else channels_last:
        out = x.new_empty(streams, length, channels).transpose(1, 2)
    else:
        out = x.new_empty(streams, channels, length)
    _write(x, context, curve, out)
    return out


def windows(
    x: torch.Tensor,
    context: KernelContext,
    curve: Curve | None,
    taps: int,
    dilation: int,
    precision: DecoderPrecision,
) -> torch.Tensor:
    """Returns the windows (B, count, parts * taps * C) of the input with its context, and replaces
    the state as `with_context` does.

    Args:
        precision: rounding of the windows, as by `PackedWeight.rounded`.
    """
    streams, channels, times = x.shape
    reach, parts = (taps - 1) * dilation, PARTS[precision]
    count = context.before + times + context.after - reach
    if precision == "float32" and taps == 1 and curve is None and count == times:
        return x.transpose(1, 2)
    dtype = torch.float32 if precision == "float32" else torch.float16
    rows = x.new_empty(streams, count, taps * parts * channels, dtype=dtype)
    _write(x, context, curve, rows.transpose(1, 2), taps, dilation, parts)
    return rows


def depthwise(
    x: torch.Tensor,
    context: KernelContext,
    curve: Curve | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dilation: int,
) -> torch.Tensor:
    """Convolves each channel of the input with its context, and replaces the state as
    `with_context` does.

    Args:
        weight: (C, 1, taps), contiguous.

    Returns:
        (B, C, outputs), with channels last.
    """
    (streams, channels, times), taps = x.shape, weight.shape[2]
    outputs = context.before + times + context.after - (taps - 1) * dilation
    out = x.new_empty(streams, outputs, channels)
    _depthwise[max(1, triton.cdiv(outputs, MOST_REACH)), triton.cdiv(channels, _TILE), streams](
        *_inputs(x, context, curve),
        weight,
        bias,
        out,
        outputs,
        taps,
        dilation,
        channels,
        *_ends(x, context),
        **_constants(context, curve),
        TIMES=MOST_REACH,
    )
    return out.transpose(1, 2)


def _write(
    x: torch.Tensor,
    context: KernelContext,
    curve: Curve | None,
    out: torch.Tensor,
    taps: int = 1,
    dilation: int = 1,
    parts: int = 1,
) -> None:
    streams, channels, times = x.shape
    tiles = max(1, triton.cdiv(times + context.after, _TILE))
    # A single tap of a single part needs no strides. 0 saves binaries of the Triton language.
    width = channels * out.stride(1) if taps * parts > 1 else 0
    _with_context[tiles, triton.cdiv(channels, _TILE), streams](
        *_inputs(x, context, curve),
        out,
        *out.stride(),
        out.shape[2],
        taps * width,
        taps,
        width - dilation * out.stride(2) if taps > 1 else 0,
        dilation,
        channels,
        *_ends(x, context),
        **_constants(context, curve),
        PARTS=parts,
    )


def _inputs(x: torch.Tensor, context: KernelContext, curve: Curve | None) -> tuple[Any, ...]:
    """Returns the first arguments of a kernel: x, the state, and the activation."""
    assert x.dtype == torch.float32
    state, curve = context.state, curve or _NO_CURVE
    if state is None:
        state = x  # in place of None: as `first` and `last` are set, no kernel reads it
    else:
        assert not context.after
        assert state.stride()[1:] == (context.before, 1)
    snakes = 0 if curve.frequency is None else curve.frequency.numel()
    coefficients = curve.frequency, curve.inverse, snakes, curve.slope
    return x, *x.stride(), state, state.stride(0), *coefficients


def _ends(x: torch.Tensor, context: KernelContext) -> tuple[int, ...]:
    """Returns the last arguments of a kernel, from `before` to `last`."""
    before, after, state, span, first, last = context
    begin, stop = span or (0, x.shape[2])
    whole = state is None
    positions = x.shape[2] + after
    return before, begin, min(stop, x.shape[2]), positions, int(first or whole), int(last or whole)


def _constants(context: KernelContext, curve: Curve | None) -> dict[str, Any]:
    before = context.before
    return {
        "ELU": curve is not None and curve.elu,
        "REACH": triton.next_power_of_2(max(before, _SHORT_REACH)) if before else 0,
        "TILE": _TILE,
        "num_warps": _WARPS,
    }

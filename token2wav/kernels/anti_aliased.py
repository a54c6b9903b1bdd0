"""Anti-aliased Snake of BigVGAN in one launch: upsampling by two, Snake, and downsampling by two.

Separate launches would write the signal at twice the rate to memory and read it again, which is at
least two thirds of all their bytes. Here this signal exists only in registers. A *row* is a segment
of the time of a stream. One program (an instance of the kernel) computes several rows, from their
first to their last time. For each row it keeps the last inputs, and partial sums of the next
outputs. Neighbouring rows both compute the activations on which the first output of the later row
depends.

The same launch reads and replaces the streaming state of the layers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from token2wav.kernels.activations import snake

# The filter of the upsampling reads an input and the 5 inputs before it. The filter of the
# downsampling reads a pair of activations and the 5 pairs before it.
REACH = 5
_REACH = tl.constexpr(REACH)
_THREADS = 128  # threads of a program; each computes one channel of one row
_MOST_CHANNELS = 32  # channels of a program: 32 numbers in float32 are one memory transaction
# Bounds of the outputs of a row, and threads that fill a GPU. Long rows repeat fewer activations,
# but a GPU needs many rows at once. These numbers are computed from the number of multiprocessors
# of one H200, not measured.
_SHORTEST, _LONGEST, _GPU_THREADS = 8, 64, 1 << 17


@triton.jit
def _input(x, time_stride, state, time, channel, begin, stop, tile, START: tl.constexpr):
    """Loads the inputs at a time of each row. Times before the first and after the last input of a
    stream give that input. Inputs at negative times come from the state; only tile 0 needs them.
    """
    time = tl.minimum(tl.maximum(time, begin), stop - 1)
    value = tl.load(x + tl.maximum(time, 0) * time_stride)
    if not START:  # noqa: SIM102, decided when the kernel is compiled
        if tile == 0:
            stored = time < 0
            old = tl.load(state + channel * _REACH + time + _REACH, mask=stored, other=0.0)
            value = tl.where(stored, old, value)
    return value


@triton.jit
def _window(x, time_stride, state, time, channel, begin, stop, tile, START: tl.constexpr):
    """Loads the input at a time and the inputs before it that the filter reads, newest first."""
    return (
        _input(x, time_stride, state, time, channel, begin, stop, tile, START),
        _input(x, time_stride, state, time - 1, channel, begin, stop, tile, START),
        _input(x, time_stride, state, time - 2, channel, begin, stop, tile, START),
        _input(x, time_stride, state, time - 3, channel, begin, stop, tile, START),
        _input(x, time_stride, state, time - 4, channel, begin, stop, tile, START),
        _input(x, time_stride, state, time - 5, channel, begin, stop, tile, START),
    )


@triton.jit
def _taps(filter):
    """Loads the taps of a filter in pairs: for the first and the second activation of a pair."""
    return (
        (tl.load(filter), tl.load(filter + 1)),
        (tl.load(filter + 2), tl.load(filter + 3)),
        (tl.load(filter + 4), tl.load(filter + 5)),
        (tl.load(filter + 6), tl.load(filter + 7)),
        (tl.load(filter + 8), tl.load(filter + 9)),
        (tl.load(filter + 10), tl.load(filter + 11)),
    )


@triton.jit
def _activation(window, taps, frequency, inverse, PHASE: tl.constexpr):
    """Computes one activation of the pair at the time of the newest input: the first one for phase
    0, and the second one for phase 1.
    """
    total = window[0] * taps[0][PHASE]
    for tap in tl.static_range(1, _REACH + 1):
        total += window[tap] * taps[tap][PHASE]
    return snake(2.0 * total, frequency, inverse)


@triton.jit(do_not_specialize=("times", "length", "begin", "stop", "skipped"))
def _anti_aliased(
    x,  # (streams, channels, times), strided
    x_stream,
    x_channel,
    x_time,
    up,  # (12,) filter of the upsampling
    down,  # (12,) filter of the downsampling
    frequency,  # (channels,)
    inverse,
    # State: inputs before x, and activations before those of x. It is not read if START, and not
    # written if END.
    inputs,  # (streams, channels, REACH)
    activations,  # (streams, channels, 2 * REACH)
    inputs_stream,
    activations_stream,
    out,  # (streams, channels, times - skipped), strided
    out_stream,
    out_channel,
    out_time,
    times,  # number of outputs with those that are dropped
    length,  # number of outputs of a row
    begin,  # time of the first input of the streams; -REACH unless they start here
    stop,  # time after the last input of the streams
    skipped,  # number of first outputs that are dropped
    START: tl.constexpr,  # whether streams start here
    END: tl.constexpr,  # whether streams end here
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,  # a divisor of the number of channels
):
    tile, stream = tl.program_id(0), tl.program_id(2).to(tl.int64)
    # One axis holds rows and channels. With two axes, Triton would choose a layout for each load,
    # and convert between the layouts.
    lane = tl.arange(0, ROWS * CHANNELS)
    channel = tl.program_id(1) * CHANNELS + lane % CHANNELS
    # Row 0 computes the last outputs, and row 1 begins at time 0. So one program (tile 0) reads the
    # state and replaces it.
    row = tile * ROWS + lane // CHANNELS
    last_row = row == 0
    start = tl.where(row == 0, times - length, (row - 1) * length)
    x += stream * x_stream + channel * x_channel
    out += stream * out_stream + channel * out_channel
    inputs += stream * inputs_stream
    activations += stream * activations_stream + channel * (2 * _REACH)
    frequency, inverse = tl.load(frequency + channel), tl.load(inverse + channel)
    up, down = _taps(up), _taps(down)
    # The activations of a stream begin with the second one of a pair, two positions after the first
    # input. They end with the first one of a pair, two positions after the last input. Their first
    # and their last value are repeated too.
    if START:
        first = begin + 2
        window = _window(x, x_time, inputs, first, channel, begin, stop, tile, START)
        first_value = _activation(window, up, frequency, inverse, 1)
    if END:
        last = stop + 2
        window = _window(x, x_time, inputs, last, channel, begin, stop, tile, START)
        last_value = _activation(window, up, frequency, inverse, 0)
    window = _window(x, x_time, inputs, start - _REACH - 1, channel, begin, stop, tile, START)
    following = _input(x, x_time, inputs, start - _REACH, channel, begin, stop, tile, START)
    zeros = tl.zeros((ROWS * CHANNELS,), tl.float32)
    sums = (zeros, zeros, zeros, zeros, zeros)  # partial sums of the next five outputs
    for step in range(length + _REACH):
        time = start - _REACH + step
        window = (following, window[0], window[1], window[2], window[3], window[4])
        # loaded one step before its use
        following = _input(x, x_time, inputs, time + 1, channel, begin, stop, tile, START)
        even = _activation(window, up, frequency, inverse, 0)
        odd = _activation(window, up, frequency, inverse, 1)
        if START:
            even = tl.where(time <= first, first_value, even)
            odd = tl.where(time < first, first_value, odd)
        elif tile == 0:
            stored = (time < 0) & (time >= -_REACH)
            old = activations + 2 * (time + _REACH)
            even = tl.where(stored, tl.load(old, mask=stored, other=0.0), even)
            odd = tl.where(stored, tl.load(old + 1, mask=stored, other=0.0), odd)
        if END:
            even = tl.where(time > last, last_value, even)
            odd = tl.where(time >= last, last_value, odd)
        elif (tile == 0) & (step >= length):
            if step == length:
                tl.debug_barrier()  # no other row reads the state any more
            slot = step - length
            tl.store(inputs + channel * _REACH + slot, window[0], mask=last_row)
            tl.store(activations + 2 * slot, even, mask=last_row)
            tl.store(activations + 2 * slot + 1, odd, mask=last_row)
        result = sums[0] + even * down[5][0] + odd * down[5][1]
        sums = (
            sums[1] + even * down[4][0] + odd * down[4][1],
            sums[2] + even * down[3][0] + odd * down[3][1],
            sums[3] + even * down[2][0] + odd * down[2][1],
            sums[4] + even * down[1][0] + odd * down[1][1],
            even * down[0][0] + odd * down[0][1],
        )
        if step >= _REACH:
            position = time - skipped
            inside = (position >= 0) & (time < times)
            tl.store(out + position * out_time, result, mask=inside)


def anti_aliased(
    x: torch.Tensor,
    filters: tuple[torch.Tensor, torch.Tensor],
    coefficients: tuple[torch.Tensor, torch.Tensor],
    states: tuple[torch.Tensor, torch.Tensor] | None = None,
    span: tuple[int, int] = (0, 0),
    *,
    first: bool = True,
    last: bool = True,
) -> torch.Tensor:
    """Computes the activation of x (B, C, T). Replaces the state of streams that continue.

    Args:
        filters: filters (1, 1, 12) of the upsampling and of the downsampling.
        coefficients: frequency (C, 1) of Snake, and its inverse.
        states: (B, C, 5) last inputs, and (B, C, 10) last activations at twice the rate; None to
            compute whole sequences.
        span: `StreamStep.span` of x.
        first, last: whether streams begin with this step, or end with it.

    Returns:
        (B, C, T), channels-last.
    """
    streams, channels, count = x.shape
    begin, stop, skipped = span[0] if first else -REACH, span[1], 0
    if states is None:
        # The outputs of a stream are late by REACH. A whole sequence drops the first REACH outputs,
        # and computes as many more at its end.
        states, begin, stop, skipped = (x, x), 0, count, REACH
    else:
        assert [state.stride()[1:] for state in states] == [(REACH, 1), (2 * REACH, 1)]
    out = x.new_empty(streams, count, channels).transpose(1, 2)
    width = min(_MOST_CHANNELS, channels & -channels)
    rows, outputs = _THREADS // width, count + skipped
    longest = min(_LONGEST, max(_SHORTEST, out.numel() // _GPU_THREADS))
    tiles = max(1, outputs // (rows * longest))
    _anti_aliased[tiles, channels // width, streams](
        x,
        *x.stride(),
        *filters,
        *coefficients,
        *states,
        *(state.stride(0) for state in states),
        out,
        *out.stride(),
        outputs,
        max(_SHORTEST, -(-outputs // (rows * tiles - 1))),
        begin,
        stop,
        skipped,
        START=first,
        END=last,
        ROWS=rows,
        CHANNELS=width,
        num_warps=_THREADS // 32,
    )
    return out

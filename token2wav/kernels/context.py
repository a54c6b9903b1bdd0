"""Input of a streaming layer with its context, in one launch: the state of the layer, the input
after its activation, and the new state (`StreamStep.with_context`).

Operators of torch need a launch for each of these. The strides of the input and of the result are
arguments of the kernel, so either may be in the order of its axes or have its channels last.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from token2wav.kernels.activations import snake
from token2wav.layers.streaming import Curve, is_channels_last

MOST_REACH = 64  # positions of a state, which one program holds in registers
_SHORT_REACH = 16  # shorter states need no binary of their own
_TILE = 32  # channels and positions; 96 channels and the like fill their tiles
_WARPS = 8
_NO_CURVE = Curve()


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


@triton.jit(
    do_not_specialize=("state_stream", "before", "begin", "stop", "positions", "first", "last"),
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
    out,  # (streams, channels, before + positions), strided
    out_stream,
    out_channel,
    out_time,
    channels,
    before,  # positions of the context
    begin,  # the first time of x that belongs to the streams
    stop,  # the time after the last one
    positions,  # after the context; zeros where x does not belong to the streams
    first,  # whether streams begin here; zeros are then read in place of the state
    last,  # whether streams end here, so that the state is not replaced
    ELU: tl.constexpr,
    REACH: tl.constexpr,  # a power of two, at least `before`; 0 if that is 0
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
    later = out + (start + before).to(tl.int64) * out_time
    tl.store(later + lane * out_time, values, mask=present & (time < positions))
    if REACH:  # noqa: SIM102, decided when the kernel is compiled
        if tile == 0:
            slot = tl.arange(0, REACH)[None, :]
            held = present & (slot < before)
            old = state + stream * state_stream + channel * before + slot
            stored = held & (first == 0)
            tl.store(out + slot * out_time, tl.load(old, mask=stored, other=0.0), mask=held)
            if last == 0:
                # The new state is the end of the result. If x is shorter, it begins with a part of
                # the old state.
                skipped = positions - before
                source = skipped + slot
                read = held & (source >= begin) & (source < stop)
                ending = x + skipped.to(tl.int64) * x_time + slot * x_time
                new = tl.load(ending, mask=read, other=0.0)
                new = _activated(new, frequency, inverse, channel, snakes, slope, ELU)
                kept = stored & (source < 0)
                new = tl.where(kept, tl.load(old + positions, mask=kept, other=0.0), new)
                tl.debug_barrier()  # until the whole old state was read
                tl.store(old, new, mask=held)


def with_context(
    x: torch.Tensor,
    before: int = 0,
    after: int = 0,
    curve: Curve | None = None,
    state: torch.Tensor | None = None,
    span: tuple[int, int] | None = None,
    *,
    first: bool = True,
    last: bool = True,
    channels_last: bool | None = None,
) -> torch.Tensor:
    """Returns x (B, C, T) after its activation with its context (B, C, before + T + after), and
    replaces the state of streams that continue.

    Args:
        before, after: positions of context, at most `MOST_REACH` before x. They are zeros, except
            for those of the state.
        curve: activation of x.
        state: (B, C, before) positions before x; the last `before` positions of the result are the
            new state. None to compute whole sequences.
        span: part of x that belongs to the streams (`StreamStep.span`). Zeros replace the rest.
        first, last: whether streams begin with this step, or end with it.
        channels_last: memory order of the result; None for that of x.
    """
    (streams, channels, times), curve = x.shape, curve or _NO_CURVE
    positions = times + after
    begin, stop = span or (0, times)
    assert x.dtype == torch.float32
    if state is None:
        state, first, last = x, True, True
    else:
        assert not after
        assert state.stride()[1:] == (before, 1)
    if is_channels_last(x) if channels_last is None else channels_last:
        out = x.new_empty(streams, before + positions, channels).transpose(1, 2)
    else:
        out = x.new_empty(streams, channels, before + positions)
    tiles = max(1, triton.cdiv(positions, _TILE))
    _with_context[tiles, triton.cdiv(channels, _TILE), streams](
        x,
        *x.stride(),
        state,
        state.stride(0),
        curve.frequency,
        curve.inverse,
        0 if curve.frequency is None else curve.frequency.numel(),
        curve.slope,
        out,
        *out.stride(),
        channels,
        before,
        begin,
        min(stop, times),
        positions,
        int(first),
        int(last),
        ELU=curve.elu,
        REACH=triton.next_power_of_2(max(before, _SHORT_REACH)) if before else 0,
        TILE=_TILE,
        num_warps=_WARPS,
    )
    return out

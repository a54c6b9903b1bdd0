"""Kernels at both ends of HiFT's convolutions: mel in, harmonic source, STFT, and inverse STFT.

Phases are computed in double precision, and no product here uses TF32. For signals, halos and the
table of pieces see `signals.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from token2wav.kernels.rounding import rounded
from token2wav.kernels.signals import (
    COLUMNS,
    FRAMES,
    OFFSET,
    REMAINING,
    START,
    carry_halo,
    store_rows,
)

_TURN = tl.constexpr(6.283185307179586)  # radians of a cycle
_MAX_MAGNITUDE = tl.constexpr(100.0)  # the same as in networks/hift_layers.py
_TAPS_TILE = tl.constexpr(16)
_SMALL = tl.constexpr(0.1)  # tanh of smaller numbers is computed as a polynomial

# see `OF_A_LAYER` in signals.py
OF_A_BATCH = (
    "mel_frames",
    "frame_limit",
    "delay",
    "first",
    "rate",
    "harmonics",
    "shift",
    "most",
    "audio_delay",
)


@triton.jit(do_not_specialize=OF_A_BATCH)
def take_in(
    mel,  # (bands, mel_frames) frames of all pieces
    mel_frames,
    bands,
    exact,  # signal in double precision, for F0
    exact_stream,
    exact_halo,
    exact_state,
    exact_old,
    exact_new,
    exact_width,
    out,  # signal for the first convolution
    out_stream,
    out_halo,
    out_state,
    old,
    new,
    state_width,
    pieces,
    ROUND: tl.constexpr,
    TILE_FRAMES: tl.constexpr,
    TILE_BANDS: tl.constexpr,
):
    """Copies the mel into two signals (streams, halo + frames, bands)."""
    tile, stream = tl.program_id(0), tl.program_id(1).to(tl.int64)
    piece = pieces + stream * COLUMNS
    frames, start = tl.load(piece + FRAMES), tl.load(piece + START)
    first_frame = (tile - 1) * TILE_FRAMES
    if first_frame >= frames:
        return
    shift = frames * bands
    exact += stream * exact_stream
    out += stream * out_stream
    exact_old += stream * exact_width + exact_state
    exact_new += stream * exact_width + exact_state
    old += stream * state_width + out_state
    new += stream * state_width + out_state
    if tile == 0:
        if frames == 0:
            return
        carry_halo(exact, exact_old, exact_new, exact_halo, shift, start == 0, 0, 1)
        carry_halo(out, old, new, out_halo, shift, start == 0, 0, 1)
        return
    frame, band = first_frame + tl.arange(0, TILE_FRAMES), tl.arange(0, TILE_BANDS)
    inside = (frame < frames)[:, None] & (band < bands)[None, :]
    in_stream = inside & (frame < tl.load(piece + REMAINING))[:, None]
    mel_index = band[None, :] * mel_frames + tl.load(piece + OFFSET) + frame[:, None]
    values = tl.load(mel + mel_index, mask=in_stream, other=0.0)
    at = frame[:, None] * bands + band[None, :]
    store_rows(values.to(tl.float64), exact, exact_new, at, exact_halo, shift, inside)
    if ROUND:
        values = rounded(values)
    store_rows(values, out, new, at, out_halo, shift, inside)


@triton.jit(do_not_specialize=OF_A_BATCH)
def frame_phases(
    f0,  # (streams, frame_limit) double, strided: F0 in Hz, with any sign
    f0_stream,
    frame_limit,
    delay,  # delay of F0, in frames
    begins,  # (harmonics,) double: phase of each harmonic at the start of a stream
    phases,  # (streams, frame_limit, harmonics, 2) double: phase at the end of a frame, and advance
    voiced,  # (streams, 1 + frame_limit) float32: 1 or 0, from the last frame of the previous piece
    carry_state,  # index of the phases in a row of states; the state of `voiced` follows them
    old,  # (streams, state_width) double
    new,
    state_width,
    pieces,
    harmonics,
    sample_rate,
    frame_samples,
    voiced_threshold,
    ROUND: tl.constexpr,  # whether F0 is rounded to float32
    ADVANCES: tl.constexpr,  # whether phases advance within a frame
    MIDDLES: tl.constexpr,  # whether frames begin and end in the middle of frames of F0
    TILE_FRAMES: tl.constexpr,
    TILE_HARMONICS: tl.constexpr,
):
    """Computes the phases of all harmonics in cycles; see `HarmonicSource` in networks/source.py.

    One program computes all frames of a stream, because phases add up.
    """
    stream = tl.program_id(0).to(tl.int64)
    piece = pieces + stream * COLUMNS
    frames, start = tl.load(piece + FRAMES), tl.load(piece + START)
    if frames == 0:
        return
    remaining = tl.load(piece + REMAINING)
    harmonic = tl.arange(0, TILE_HARMONICS)
    harmonic_mask = harmonic < harmonics
    carry = stream * state_width + carry_state
    phase = tl.load(old + carry + harmonic, mask=harmonic_mask & (start > 0), other=0.0)
    phase += tl.load(begins + harmonic, mask=harmonic_mask & (start == 0), other=0.0)
    voiced += stream * (1 + frame_limit)
    before = tl.load(old + carry + harmonics, mask=start > 0, other=0.0)
    tl.store(voiced, before.to(tl.float32))
    for first_frame in range(0, frames, TILE_FRAMES):
        frame = first_frame + tl.arange(0, TILE_FRAMES)
        real = frame < frames
        position = frame - delay
        pitch = tl.abs(tl.load(f0 + stream * f0_stream + frame, mask=real, other=0.0))
        pitch = tl.where(position >= -start, pitch, 0.0)
        loud = pitch > voiced_threshold
        tl.store(voiced + 1 + frame, loud.to(tl.float32), mask=real)
        if ROUND:
            multiple = pitch.to(tl.float32)[:, None] * (harmonic + 1)[None, :].to(tl.float32)
            ratio = tl.div_rn(multiple, tl.full(multiple.shape, sample_rate, tl.float32))
        else:
            ratio = pitch[:, None] * (harmonic + 1)[None, :] / sample_rate
        advance = (ratio - tl.floor(ratio)).to(tl.float64) * frame_samples
        if MIDDLES:
            advance = tl.where((position < remaining)[:, None], advance, 0.0)
        ends = phase[None, :] + tl.cumsum(advance, axis=0)
        ends -= tl.floor(ends)
        last = tl.minimum(frames - 1, first_frame + TILE_FRAMES - 1)
        phase = tl.sum(tl.where((frame == last)[:, None], ends, 0.0), axis=0)
        before = tl.sum(tl.where(frame == last, loud.to(tl.float64), 0.0), axis=0)
        if MIDDLES:
            # phases do not advance before the first middle
            advance = tl.where((position == -start)[:, None], 0.0, advance)
        at = ((stream * frame_limit + frame)[:, None] * harmonics + harmonic[None, :]) * 2
        inside = real[:, None] & harmonic_mask[None, :]
        tl.store(phases + at, ends, mask=inside)
        tl.store(phases + at + 1, advance if ADVANCES else advance * 0, mask=inside)
    tl.store(new + carry + harmonic, phase, mask=harmonic_mask)
    tl.store(new + carry + harmonics, before)


@triton.jit
def _tanh(x):
    """Hyperbolic tangent, with a small relative error for small numbers too."""
    square = x * x
    small = x * (1 + square * (-1 / 3 + square * (2 / 15 - square * (17 / 315))))
    power = tl.exp(-2 * tl.abs(x))
    large = (1 - power) / (1 + power)
    large = tl.where(x < 0, -large, large)
    return tl.where(square < _SMALL * _SMALL, small, large)


@triton.jit(do_not_specialize=OF_A_BATCH)
def excite(
    phases,  # (streams, frame_limit, harmonics, 2) double, see `frame_phases`
    voiced,  # (streams, 1 + frame_limit)
    noise,  # (streams, (1 + frame_limit) * frame_samples), from one frame before the piece
    merge,  # (harmonics + 1,) weights of the harmonics, then the bias
    frame_limit,
    harmonics,
    frame_samples,
    shift,  # samples by which loudness and noise are later than phases
    offset,  # samples from the start of a sample to the time of its phase
    sine_level,
    noise_level,
    unvoiced_level,
    out,  # signal of samples
    out_stream,
    out_halo,
    out_state,
    old,
    new,
    state_width,
    pieces,
    delay,  # delay of the result, in samples
    TILE: tl.constexpr,
):
    """Computes the excitation: tanh of the merged sines of the harmonics and of the noise."""
    tile, stream = tl.program_id(0), tl.program_id(1).to(tl.int64)
    piece = pieces + stream * COLUMNS
    rows, start = tl.load(piece + FRAMES) * frame_samples, tl.load(piece + START)
    first_row = (tile - 1) * TILE
    if first_row >= rows:
        return
    old += stream * state_width + out_state
    new += stream * state_width + out_state
    out += stream * out_stream
    if tile == 0:
        if rows == 0:
            return
        carry_halo(out, old, new, out_halo, rows, start == 0, 0, 1)
        return
    row = first_row + tl.arange(0, TILE)
    inside = row < rows
    position = row - delay
    in_stream = inside & (position >= -start * frame_samples)
    in_stream &= position < tl.load(piece + REMAINING) * frame_samples
    back = ((row % frame_samples).to(tl.float64) + offset) / frame_samples - 1
    phases += (stream * frame_limit + row // frame_samples) * harmonics * 2
    merged = tl.zeros((TILE,), tl.float32)
    for harmonic in range(harmonics):
        end = tl.load(phases + harmonic * 2, mask=in_stream, other=0.0)
        cycles = end + tl.load(phases + harmonic * 2 + 1, mask=in_stream, other=0.0) * back
        cycles -= tl.floor(cycles)
        merged += tl.load(merge + harmonic) * tl.sin(cycles.to(tl.float32) * _TURN)
    noise_sample = row + frame_samples - shift
    loud = tl.load(
        voiced + stream * (1 + frame_limit) + noise_sample // frame_samples,
        mask=in_stream,
        other=0.0,
    )
    amplitude = loud * noise_level + (1 - loud) * unvoiced_level
    draw = tl.load(
        noise + stream * (1 + frame_limit) * frame_samples + noise_sample, mask=in_stream, other=0.0
    )
    values = _tanh(loud * sine_level * merged + amplitude * draw + tl.load(merge + harmonics))
    store_rows(tl.where(in_stream, values, 0), out, new, row, out_halo, rows, inside)


@triton.jit(do_not_specialize=OF_A_BATCH)
def analyse(
    x,  # signal of samples
    x_stream,
    first,  # index in the buffer of the first sample of the first window
    kernels,  # (bins, size)
    bins,
    size,
    hop,
    out,  # signal (streams, halo + windows, bins)
    out_stream,
    out_halo,
    out_state,
    old,
    new,
    state_width,
    pieces,
    rate,  # windows per frame
    delay,  # delay of the result, in windows
    ROUND: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_BINS: tl.constexpr,
):
    """Computes the STFT. Half a window is mirrored at both ends of a stream."""
    tile, stream = tl.program_id(0), tl.program_id(1).to(tl.int64)
    piece = pieces + stream * COLUMNS
    rows, start = tl.load(piece + FRAMES) * rate, tl.load(piece + START)
    first_row = (tile - 1) * TILE_ROWS
    if first_row >= rows:
        return
    shift = rows * bins
    old += stream * state_width + out_state
    new += stream * state_width + out_state
    out += stream * out_stream
    if tile == 0:
        if rows == 0:
            return
        carry_halo(out, old, new, out_halo, shift, start == 0, 0, 1)
        return
    row, column = first_row + tl.arange(0, TILE_ROWS), tl.arange(0, TILE_BINS)
    # Positions count from the start of the piece. Windows begin at position -delay, and also read
    # earlier samples.
    window = row - delay
    remaining = tl.load(piece + REMAINING)
    in_stream = (window >= -start * rate) & (window < remaining * rate + 1) & (row < rows)
    begin, end = -start * rate * hop, remaining * rate * hop
    x += stream * x_stream + first + delay * hop + size // 2
    result = tl.zeros((TILE_ROWS, TILE_BINS), tl.float32)
    for first_tap in range(0, size, _TAPS_TILE):
        tap = first_tap + tl.arange(0, _TAPS_TILE)
        sample = window[:, None] * hop + tap[None, :] - size // 2
        sample = tl.where(sample < begin, 2 * begin - sample, sample)
        sample = tl.where(sample >= end, 2 * (end - 1) - sample, sample)
        samples = tl.load(x + sample, mask=in_stream[:, None] & (tap < size)[None, :], other=0.0)
        kernel = tl.load(
            kernels + column[None, :] * size + tap[:, None],
            mask=(column < bins)[None, :] & (tap < size)[:, None],
            other=0.0,
        )
        result = tl.dot(samples, kernel, result, input_precision="ieee")
    if ROUND:
        result = rounded(result)
    inside = (row < rows)[:, None] & (column < bins)[None, :]
    at = row[:, None] * bins + column[None, :]
    store_rows(result, out, new, at, out_halo, shift, inside)


@triton.jit(do_not_specialize=OF_A_BATCH)
def synthesise(
    x,  # signal (streams, halo + windows, 2 * bins): log-magnitudes, then phases
    x_stream,
    first,  # index in the buffer of the earliest window of the first samples
    kernels,  # (2 * bins, size): of real parts, then of imaginary parts
    weights,  # (size,) squared window
    bins,
    size,
    hop,
    audio,  # (streams, frame_limit * rate * hop)
    frame_limit,
    pieces,
    rate,
    delay,  # delay of the signal, in windows
    limit,
    gains,  # (most + 1,) gains of the fade-in at the start of a stream, or None
    most,
    audio_delay,  # delay of the audio, in samples
    OVERLAP: tl.constexpr,  # windows that a sample depends on
    TILE_ROWS: tl.constexpr,
    TILE_HOP: tl.constexpr,
):
    """Computes the inverse STFT: `hop` samples of every row."""
    tile, stream = tl.program_id(0), tl.program_id(1).to(tl.int64)
    piece = pieces + stream * COLUMNS
    rows, start = tl.load(piece + FRAMES) * rate, tl.load(piece + START)
    if tile * TILE_ROWS >= rows:
        return
    remaining = tl.load(piece + REMAINING)
    row = tile * TILE_ROWS + tl.arange(0, TILE_ROWS)
    phase, lane = tl.arange(0, TILE_HOP), tl.arange(0, _TAPS_TILE)
    x += stream * x_stream + first
    result = tl.zeros((TILE_ROWS, TILE_HOP), tl.float32)
    weight = tl.zeros((TILE_ROWS, TILE_HOP), tl.float32)
    for tap in range(OVERLAP):
        window = row + tap - (OVERLAP - 1) - delay
        in_stream = (window >= -start * rate) & (window < remaining * rate + 1) & (row < rows)
        sample = (OVERLAP - 1 - tap) * hop + phase
        real = (phase < hop) & (sample < size)
        share = tl.load(weights + sample, mask=real, other=0.0)
        weight += tl.where(in_stream[:, None], share[None, :], 0.0)
        for first_bin in range(0, bins, _TAPS_TILE):
            bin = first_bin + lane
            inside = in_stream[:, None] & (bin < bins)[None, :]
            magnitudes = x + (row + tap)[:, None] * (2 * bins) + bin[None, :]
            magnitude = tl.exp(tl.load(magnitudes, mask=inside, other=0.0))
            magnitude = tl.where(magnitude > _MAX_MAGNITUDE, _MAX_MAGNITUDE, magnitude)
            magnitude = tl.where(inside, magnitude, 0.0)
            # As in the public code, the phase in radians is the sine of the network's output.
            angle = tl.sin(tl.load(magnitudes + bins, mask=inside, other=0.0))
            at = kernels + bin[:, None] * size + sample[None, :]
            mask = (bin < bins)[:, None] & real[None, :]
            kernel = tl.load(at, mask=mask, other=0.0)
            result = tl.dot(magnitude * tl.cos(angle), kernel, result, input_precision="ieee")
            kernel = tl.load(at + bins * size, mask=mask, other=0.0)
            result = tl.dot(magnitude * tl.sin(angle), kernel, result, input_precision="ieee")
    values = tl.where(weight > 0, result / weight, result)
    values = tl.where(values > limit, limit, values)
    values = tl.where(values < -limit, -limit, values)
    sample = row[:, None] * hop + phase[None, :]
    if gains is not None:
        position = sample - audio_delay + start * rate * hop
        values *= tl.load(gains + tl.minimum(tl.maximum(position, 0), most))
    audio_index = stream * frame_limit * rate * hop + sample
    tl.store(audio + audio_index, values, mask=(row < rows)[:, None] & (phase < hop)[None, :])

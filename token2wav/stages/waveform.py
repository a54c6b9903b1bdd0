"""Waveform stage: it computes the audio of frames, which are mel frames, codes or latents. A chunk
costs only its own frames. The layers of the network declare the state that they need from earlier
chunks, and the stage stores it.

A piece is a part of a chunk that runs through the network at once. Pieces that have the same length
and the same place in their streams (start, inside or end) run together. On a GPU a CUDA graph is
captured for each of several prepared lengths. A chunk of another length is cut into pieces of the
prepared lengths, without padding, the longest first. Frames that are left over are the last piece
of the chunk.

With kernels (`kernel_pieces.py`), pieces of any length and any place run together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from token2wav.cache.states import SCRATCH_SLOT, StateRows, StateStore
from token2wav.config.model_config import ModelConfig
from token2wav.errors import ConfigError
from token2wav.execution.buckets import BucketRunner
from token2wav.execution.cuda_graphs import GraphPool
from token2wav.execution.staging import copy_to, frames_to_device, joined
from token2wav.layers.streaming import StreamStep, state_specs
from token2wav.networks.noise import NoiseTable, SourceNoise
from token2wav.networks.waveform_network import WaveformNetwork
from token2wav.stages.stage import (
    DEFAULT_OPTIONS,
    FrameChunk,
    StreamOptions,
    VocoderInput,
    VocoderStage,
)
from token2wav.voice import Voice

_NETWORK = "vocoder"  # network name in its state store
_PREPARED_BLOCKS = 60  # blocks of noise at load, one minute; later blocks are drawn on demand


@dataclass(frozen=True, order=True)
class PieceShape:
    """Shape of a batch of pieces that have the same place in their streams.

    Attributes:
        inside: whether the streams continue after these pieces. If not, each piece ends with
            `lookahead_frames` frames after the end of the stream. They flush the audio that the
            network holds back.
        frames: frames in each piece, including frames after the end of the stream.
        rows: pieces, each from another stream.
    """

    first: bool
    inside: bool
    frames: int
    rows: int = 1

    def fits(self, other: PieceShape) -> bool:
        same = (self.first, self.inside, self.frames) == (other.first, other.inside, other.frames)
        return same and self.rows <= other.rows

    @property
    def cost(self) -> int:
        return self.rows * self.frames


def likely_pieces(
    network: WaveformNetwork, config: ModelConfig, hops: tuple[int, int], most_streams: int
) -> list[PieceShape]:
    """Lists the shapes to prepare. Every chunk can be assembled from pieces of these shapes.

    The list has every shape for 1, 2, 4 ... `most_streams` streams. Hops grow by doubling, and the
    chunk of each hop is one piece. A first chunk is longer than its hop, because it also fills the
    last block of the prompt. A last chunk has any length. Both are assembled from pieces whose
    lengths are hops or powers of two. If the network attends to windows, pieces inside a stream
    have whole windows, and the rest of a last chunk is part of the piece that ends the stream.

    Args:
        hops: first and longest hop, in tokens.
        most_streams: most streams in a batch, a power of two.
    """
    lookahead = network.lookahead_frames
    window, past = network.window_frames, network.frames_past_window
    first, longest = (config.token_mel_ratio * hop for hop in hops)
    doubled = {first << doublings for doublings in range((longest // first).bit_length())} | {
        longest
    }
    powers = {window << doublings for doublings in range((first // window).bit_length())}
    starts = {network.first_frames, max(first, network.first_frames)}
    if window > 1:
        boundary = past % window  # the first end of a piece is `boundary` after a whole window
        least = window * -(-(network.first_frames - boundary) // window)
        starts = {boundary + max(length, least) for length in (window, first)}
    shapes = [(True, True, frames) for frames in starts]
    shapes += [(False, True, frames) for frames in doubled | powers]
    if lookahead:
        shapes += [(False, False, lookahead + rest) for rest in range(window)]
    return [
        PieceShape(*shape, 1 << doublings)
        for shape in shapes
        for doublings in range(most_streams.bit_length())
    ]


@dataclass(eq=False)
class _WaveformStream:
    """State of one stream.

    Attributes:
        pending: (channels, n) first frames of the stream, while there are fewer than the
            `first_frames` that the network needs.
        frames: frames that were computed so far, without pending frames.
        extrapolated: samples at the end of the audio so far that were extrapolated. The next chunk
            computes them again, but does not send them.
    """

    options: StreamOptions
    slot: int
    pending: torch.Tensor
    frames: int = 0
    extrapolated: int = 0


@dataclass(frozen=True, eq=False)
class PieceInput:
    """Piece of a chunk of one stream."""

    stream: _WaveformStream
    start: int
    frames: torch.Tensor  # (channels, n), without frames that flush the end of the stream
    shape: PieceShape
    provisional: bool = False  # whether the states after the piece are dropped


@dataclass(frozen=True, eq=False)
class _Cut:
    """Chunk of a stream, cut into pieces. The stream changes only after they were computed."""

    pieces: list[PieceInput]  # none while the start of a stream is too short to yield audio
    pending: torch.Tensor  # of the stream, after the pieces
    frames: int  # of the stream, after the pieces


class KernelPieces(NamedTuple):
    """Runner of batches of pieces that may have different lengths and places in their streams."""

    runner: BucketRunner[Any, PieceInput]
    store: StateStore
    longest: int  # most frames of a piece, without those that flush the end of a stream


class _Batch:
    """Tensors for pieces of one shape: S streams, T frames.

    Attributes:
        frames: (S, channels, T) input.
        noise: (S * T, frame_samples) source noise.
        audio: (S, samples) output.
    """

    def __init__(
        self,
        shape: PieceShape,
        network: WaveformNetwork,
        states: StateStore,
        rows: StateRows,
        noise: NoiseTable | None,
        decode: Callable[..., torch.Tensor] | None,
    ) -> None:
        streams, frames, device = shape.rows, shape.frames, network.device
        self.frames = torch.zeros(
            streams, network.input_channels, frames, dtype=network.input_dtype, device=device
        )
        self.noise = torch.empty(streams * frames, network.frame_samples, device=device)
        self.audio = self.noise  # a placeholder until the first output
        # Slots, noise factors, offsets of states in place and noise rows share one tensor, so that
        # one copy brings them to the device.
        self._numbers = torch.zeros(streams * (3 + frames), dtype=torch.int64, device=device)
        self._slots, noise_factor, self._offsets = self._numbers[: 3 * streams].view(3, streams)
        self._noise_rows = self._numbers[3 * streams :]
        self._shape, self._network, self._states, self._rows = shape, network, states, rows
        self._noise_table = noise
        self._step = StreamStep(
            states.states_of([SCRATCH_SLOT] * streams, self._offsets, rows),
            shape.first,
            frames,
            0 if shape.inside else network.lookahead_frames,
            noise_factor=noise_factor,
        )
        self._decode = decode if shape.inside and not shape.first else None

    def fill(self, items: Sequence[PieceInput]) -> None:
        streams, count, noise = len(self._slots), items[0].frames.shape[1], self._noise_table
        if count:
            self.frames[: len(items), :, :count].copy_(torch.stack([item.frames for item in items]))
        numbers = np.full(len(self._numbers), SCRATCH_SLOT)
        numbers[: len(items)] = [item.stream.slot for item in items]
        numbers[streams : streams + len(items)] = [
            item.stream.options.decoder_noise for item in items
        ]
        slots = numbers[:streams].tolist()
        numbers[2 * streams : 3 * streams] = self._states.offsets(slots)
        states = self._states.states_of(slots, self._offsets, self._rows)
        self._step = dataclasses.replace(self._step, state=states)
        with noise.lock if noise else nullcontext():
            if noise:
                starts = np.zeros(streams, np.int64)
                starts[: len(items)] = [item.start - noise.late for item in items]
                numbers[3 * streams :] = noise.find(starts, self._shape.frames).ravel()
            copy_to(self._numbers, numbers)
            if noise:
                torch.index_select(noise.rows, 0, self._noise_rows, out=self.noise)
        if not self._shape.first:
            self._states.read(self._slots, self._rows)

    @torch.inference_mode()
    def compute(self) -> None:
        """Computes `audio`, and overwrites the states in the rows with the new states."""
        noise = self.noise.view(len(self.frames), -1)
        self.audio = self._network.run_step(self.frames, noise, self._step, self._decode)

    def take(self, items: Sequence[PieceInput]) -> list[torch.Tensor]:
        shape, network = self._shape, self._network
        if shape.inside and not items[0].provisional:
            self._states.write(self._slots, self._rows)
        first = network.output_delay if shape.first else 0
        last = items[0].frames.shape[1] * network.frame_samples
        if not shape.inside:
            last += network.output_delay - network.missing_samples
        return list(self.audio[: len(items), first:last].clone())


def check_lookahead_frames(lookahead_frames: int, network: WaveformNetwork) -> None:
    """Raises ConfigError if a vocoder cannot hold back a number of frames. Only the sizes of the
    network are read.
    """
    lookahead = network.lookahead_frames
    if lookahead_frames and lookahead_frames >= lookahead:
        expected = f"0 to {lookahead - 1}" if lookahead > 1 else "0"
        raise ConfigError(
            f"stream.lookahead_frames: {lookahead_frames}, expected {expected}; the look-ahead of "
            f"this model has {lookahead} frames"
        )


class WaveformStage(VocoderStage[_WaveformStream]):
    """Stage from frames to audio, on a network that runs step by step. The audio of a stream equals
    the audio of `whole` up to float rounding.

    Args:
        noise: source noise; None for a network without a harmonic source.
        decode: runs the network, or only `HiFT.decode`, on another backend; None for torch. The
            first and the last piece of a stream always run on torch.
        shapes: shapes to prepare. If there are none, every chunk is one piece, and any number of
            threads may use the stage at the same time.
        graphs: pool of CUDA graphs that the shapes are captured in; None to run eagerly.
        kernels: makes the runner of pieces on kernels, from the source noise and the slot count of
            the state store; None to run the network on torch. `shapes` and `graphs` must then be
            left out.
        lookahead_frames: frames to hold back, below the network's look-ahead; 0 for the whole
            look-ahead. With fewer frames, the last samples of a chunk are extrapolated: they are
            computed as if the last frame were repeated. The next chunk continues with exact
            samples. All samples of a stream that is not longer than the look-ahead are
            extrapolated. `FrameChunk.next_frames` take the place of repeated frames; if there are
            enough, the samples are exact.
        streams: streams whose states are allocated at once. Further streams allocate more.
    """

    def __init__(
        self,
        network: WaveformNetwork,
        noise: SourceNoise | None = None,
        decode: Callable[..., torch.Tensor] | None = None,
        *,
        shapes: Sequence[PieceShape] = (),
        graphs: GraphPool | None = None,
        kernels: Callable[[NoiseTable, int], KernelPieces] | None = None,
        lookahead_frames: int = 0,
        streams: int = 0,
    ) -> None:
        super().__init__()
        self._net, self._source_noise, self._decode = network, noise, decode
        self._noise = NoiseTable(noise, network.m_source) if noise else None
        self._device = network.device
        network.check_attributes()
        check_lookahead_frames(lookahead_frames, network)
        self._lookahead_frames = lookahead_frames
        self._extrapolated_samples = 0
        if lookahead_frames:
            held = lookahead_frames * network.frame_samples
            self._extrapolated_samples = network.output_delay - held
        # frames that give these samples
        self._repeated_frames = -(-self._extrapolated_samples // network.frame_samples)
        if self._noise and (graphs or kernels):
            self._noise.prepare(_PREPARED_BLOCKS)
        self._pieces: BucketRunner[Any, PieceInput]
        self._mixes_places = kernels is not None
        if self._noise and kernels:
            self._pieces, self.store, longest = kernels(self._noise, 1 + streams)
            self._lengths = [(first, longest) for first in (True, False)]
        else:
            self._prepare(shapes, graphs, 1 + streams)

    @property
    def withheld_samples(self) -> int:
        return self._net.output_delay - self._extrapolated_samples

    def _prepare(self, shapes: Sequence[PieceShape], graphs: GraphPool | None, slots: int) -> None:
        """Prepares shapes of batches that run on torch or on an exported network."""
        if self._extrapolated_samples:
            repeated = {
                dataclasses.replace(shape, inside=True, frames=self._repeated_frames)
                for shape in shapes
                if not shape.inside
            }
            # the longest such piece that starts a stream
            longest = self._net.lookahead_frames + self._repeated_frames
            starts = {dataclasses.replace(shape, first=True, frames=longest) for shape in repeated}
            shapes = [*{*shapes, *repeated, *starts}]
        # States in place keep the values of provisional pieces, so streams with such pieces copy.
        # An exported graph takes the states of a batch as one tensor.
        specs = state_specs(self._net)
        layers: list[Any] = [*specs]
        on_kernel = all(layer.state_kernel for layer in layers if layer.state_in_place)
        in_place = (
            (on_kernel or (self._device.type == "cpu" and not shapes))
            and not self._extrapolated_samples
            and self._decode is None
        )
        self.store = StateStore({_NETWORK: specs}, self._device, slots, in_place=in_place)
        self._lengths = sorted(
            {(shape.first, shape.frames) for shape in shapes if shape.inside}, reverse=True
        )
        # Prepared shapes run one at a time, so they share their rows.
        self._most_rows = max((shape.rows for shape in shapes), default=0)
        self._rows = self.store.rows(_NETWORK, self._most_rows)
        with torch.inference_mode():
            self._pieces = BucketRunner(_shape_of, self._make, shapes, graphs)

    @torch.inference_mode()
    def whole(self, frames: torch.Tensor) -> torch.Tensor:
        return self._net.vocode(frames.to(self._device)[None], self._source_noise)[0]

    def open(self, voice: Voice | None = None, options: StreamOptions = DEFAULT_OPTIONS) -> int:
        # Allocated before the slot is taken, because no code would release the slot on a failure.
        nothing = self._net.no_frames()
        return self.register(_WaveformStream(options, self.store.take(), nothing))

    def close(self, handle: int) -> None:
        if (stream := self._streams.pop(handle, None)) is not None:
            self.store.release(stream.slot)

    @torch.inference_mode()
    def advance(self, batch: Sequence[tuple[int, VocoderInput]]) -> list[torch.Tensor]:
        streams = [self.state(handle) for handle, _ in batch]
        chunks = self._on_device([chunk for _, chunk in batch])
        cuts = [self._cut(stream, chunk) for stream, chunk in zip(streams, chunks, strict=True)]
        waiting = {index: list(cut.pieces) for index, cut in enumerate(cuts)}
        audio: list[list[torch.Tensor]] = [[] for _ in batch]
        while waiting := {index: pieces for index, pieces in waiting.items() if pieces}:
            # The largest shape runs first. Starts therefore come before inner pieces, which run
            # from long to short, and ends come last. The pieces of every stream are in this order.
            shape = max(pieces[0].shape for pieces in waiting.values())
            indices = [
                index
                for index, pieces in waiting.items()
                if self._mixes_places or pieces[0].shape == shape
            ]
            samples = self._pieces.run([waiting[index].pop(0) for index in indices])
            for index, new in zip(indices, samples, strict=True):
                audio[index].append(new)
        if self._extrapolated_samples:
            for index, new in self._extrapolate(streams, cuts, chunks).items():
                audio[index].append(new)
        results = [
            samples[stream.extrapolated :]
            for samples, stream in zip(self._join_pieces(audio), streams, strict=True)
        ]
        for stream, cut, chunk in zip(streams, cuts, chunks, strict=True):
            stream.pending, stream.frames = cut.pending, cut.frames
            stream.extrapolated = 0 if chunk.last else self._extrapolated_samples_after(cut)
        return results

    def _on_device(self, chunks: Sequence[VocoderInput]) -> list[FrameChunk]:
        """Returns chunks whose frames are on the device. One copy brings the codes of all codec
        streams there.
        """
        known = [chunk.next_frames for chunk in chunks if chunk.next_frames is not None]
        parts = frames_to_device([*(chunk.frames for chunk in chunks), *known], self._device)
        following = iter(parts[len(chunks) :])
        return [
            FrameChunk(frames, chunk.last, None if chunk.next_frames is None else next(following))
            for chunk, frames in zip(chunks, parts, strict=False)
        ]

    def _extrapolated_samples_after(self, cut: _Cut) -> int:
        if cut.frames or not self._extrapolated_samples:
            return self._extrapolated_samples
        return max(0, cut.pending.shape[1] - self._lookahead_frames) * self._net.frame_samples

    def _extrapolate(
        self, streams: Sequence[_WaveformStream], cuts: Sequence[_Cut], chunks: Sequence[FrameChunk]
    ) -> dict[int, torch.Tensor]:
        """Computes the samples after the exact audio, as if the last known frame of each stream
        were repeated: (samples,) by the index of the stream in the batch.
        """
        indices = [
            index
            for index, (cut, chunk) in enumerate(zip(cuts, chunks, strict=True))
            if chunk.frames.shape[1] and not chunk.last and self._extrapolated_samples_after(cut)
        ]
        if not indices:
            return {}
        # One launch joins the frames of all streams.
        extensions = joined([self._extension(cuts[index], chunks[index]) for index in indices])
        groups: dict[PieceShape | None, dict[int, PieceInput]] = {}
        for index, frames in zip(indices, extensions, strict=True):
            start = cuts[index].frames
            shape = PieceShape(not start, True, frames.shape[1])
            piece = PieceInput(streams[index], start, frames, shape, provisional=True)
            groups.setdefault(None if self._mixes_places else shape, {})[index] = piece
        return {
            index: new[: self._extrapolated_samples_after(cuts[index])]
            for pieces in groups.values()
            for index, new in zip(pieces, self._pieces.run(list(pieces.values())), strict=True)
        }

    def _extension(self, cut: _Cut, chunk: FrameChunk) -> list[torch.Tensor]:
        """Returns the parts of the piece after a chunk: the pending frames of the stream, known
        frames of the next chunk, and repetitions of the last frame.
        """
        pending, count = cut.pending, self._repeated_frames
        if not cut.frames:
            # The piece starts the stream.
            least = max(pending.shape[1] + count, self._net.first_frames)
            prepared = [length for first, length in self._lengths if first and length >= least]
            padded = least if self._mixes_places else min(prepared, default=least)
            count = padded - pending.shape[1]
        following = chunk.frames[:, :0]
        if chunk.next_frames is not None:
            following = chunk.next_frames[:, :count]
        known = following if following.shape[1] else chunk.frames
        return [pending, following, known[:, -1:].expand(-1, count - following.shape[1])]

    def _cut(self, stream: _WaveformStream, chunk: FrameChunk) -> _Cut:
        new = chunk.frames
        if stream.pending.shape[1]:
            new = torch.cat((stream.pending, new), dim=1)
        count, lookahead = new.shape[1], self._net.lookahead_frames
        if not stream.frames and count < self._net.first_frames and not chunk.last:
            return _Cut([], new, 0)
        pieces: list[PieceInput] = []
        if not stream.frames + count:
            return _Cut(pieces, new, 0)
        at = 0
        for first, frames in self._lengths:
            while frames <= count - at and first == (stream.frames + at == 0):
                shape, part = PieceShape(first, True, frames), new[:, at : at + frames]
                pieces.append(PieceInput(stream, stream.frames + at, part, shape))
                at += frames
        if rest := count - at + (lookahead if chunk.last else 0):
            shape = PieceShape(stream.frames + at == 0, not chunk.last, rest)
            pieces.append(PieceInput(stream, stream.frames + at, new[:, at:], shape))
        return _Cut(pieces, new[:, :0], stream.frames + count)

    def _join_pieces(self, audio: list[list[torch.Tensor]]) -> list[torch.Tensor]:
        if all(len(parts) == 1 for parts in audio):
            return [samples for [samples] in audio]
        parts = [samples for stream in audio for samples in stream] or [
            torch.empty(0, device=self._device)
        ]
        counts = [sum(len(samples) for samples in stream) for stream in audio]
        return list(torch.cat(parts).split(counts))

    def _make(self, shape: PieceShape) -> _Batch:
        shared = shape.rows <= self._most_rows
        rows = self._rows if shared else self.store.rows(_NETWORK, shape.rows)
        return _Batch(
            shape, self._net, self.store, rows.first(shape.rows), self._noise, self._decode
        )


def _shape_of(pieces: Sequence[PieceInput]) -> PieceShape:
    return dataclasses.replace(pieces[0].shape, rows=len(pieces))

"""Window stage: it computes the audio of frames with a network that reads a whole utterance.

The network decodes windows of a stream, each with context on both sides. The windows of all streams
of a batch run together if they have equal lengths. Where a window ends, its audio fades into that
of the next one. The audio of a stream depends on its frames alone, and differs from that of the
whole utterance (docs/exactness.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from token2wav.config.windows import Window, Windows
from token2wav.execution.buckets import BucketRunner, ExactSize, map_grouped
from token2wav.execution.captured_sizes import CAPTURED_WINDOW_FRAMES, CAPTURED_WINDOWS
from token2wav.execution.cuda_graphs import GraphPool
from token2wav.execution.staging import frames_to_device
from token2wav.networks.waveform_network import WindowNetwork
from token2wav.stages.stage import (
    DEFAULT_OPTIONS,
    StreamOptions,
    VocoderInput,
    VocoderStage,
)
from token2wav.voice import Voice

_MOST_ROWS = CAPTURED_WINDOWS[-1]
_MOST_FRAMES = CAPTURED_WINDOW_FRAMES * _MOST_ROWS  # of a batch of several windows


@dataclass(eq=False)
class _WindowStream:
    """State of one stream."""

    past: torch.Tensor  # (channels, n) last computed frames, the context of the next window
    tail: torch.Tensor  # (samples,) audio that fades into that of the next window
    position: int = 0  # frames that were computed so far


@dataclass(frozen=True, eq=False)
class _WindowInput:
    """Window of a stream with its frames (channels, n)."""

    window: Window
    frames: torch.Tensor


class _Batch:
    """Tensors for windows of one size: B windows, T frames with context."""

    def __init__(self, size: ExactSize, network: WindowNetwork) -> None:
        self._network, device = network, network.device
        shape = size.rows, network.input_channels, size.length
        self._frames = torch.zeros(shape, dtype=network.input_dtype, device=device)
        self._positions = torch.zeros(size.rows, dtype=torch.int64, device=device)
        self._audio = torch.empty(0)

    def fill(self, items: Sequence[_WindowInput]) -> None:
        """Copies frames and positions of at most B windows into the tensors."""
        self._frames[: len(items)].copy_(torch.stack([item.frames for item in items]))
        positions = torch.tensor([item.window.position for item in items])
        self._positions[: len(items)].copy_(positions)

    @torch.inference_mode()
    def compute(self) -> None:
        """Computes the audio of all frames."""
        self._audio = self._network(self._frames, self._positions)[:, 0]

    def take(self, items: Sequence[_WindowInput]) -> list[torch.Tensor]:
        """Returns the audio (samples,) of each window, and of the frames that fade out after it."""
        samples = self._network.frame_samples
        spans = [
            (samples * (window.start - window.first), samples * (window.fade_stop - window.first))
            for window in (item.window for item in items)
        ]
        rows = self._audio[: len(items)].clone()
        return [row[first:last] for row, (first, last) in zip(rows, spans, strict=True)]


class WindowStage(VocoderStage[_WindowStream]):
    """Stage from frames to audio, on a network that decodes windows.

    Args:
        rows: numbers of whole windows to prepare. If there are none, any number of threads may use
            the stage at the same time.
        graphs: pool of CUDA graphs for batches of the prepared numbers; None to run eagerly.
    """

    def __init__(
        self,
        network: WindowNetwork,
        windows: Windows,
        *,
        rows: Sequence[int] = (),
        graphs: GraphPool | None = None,
    ) -> None:
        super().__init__()
        self._net, self._windows, self._device = network, windows, network.device
        self._nothing = torch.empty(0, device=self._device)
        samples = windows.overlap * network.frame_samples
        # weight of the new window; that of the old one is 1 minus it
        ramp = (torch.arange(samples, device=self._device) + 0.5) / max(1, samples)
        self._ramp = torch.sin(0.5 * torch.pi * ramp).square()
        with torch.inference_mode():
            self._batches = BucketRunner(
                lambda items: ExactSize(items[0].frames.shape[1], len(items)),
                lambda size: _Batch(size, network),
                [ExactSize(windows.longest, count) for count in rows],
                graphs,
            )

    @torch.inference_mode()
    def whole(self, frames: torch.Tensor) -> torch.Tensor:
        return self._net.vocode(frames.to(self._device)[None], None)[0]

    def open(self, voice: Voice | None = None, options: StreamOptions = DEFAULT_OPTIONS) -> int:
        return self.register(_WindowStream(self._net.no_frames(), self._nothing))

    @torch.inference_mode()
    def advance(self, batch: Sequence[tuple[int, VocoderInput]]) -> list[torch.Tensor]:
        streams = [self.state(handle) for handle, _ in batch]
        frames = frames_to_device([_known(chunk) for _, chunk in batch], self._device)
        known = [
            torch.cat((stream.past, new), dim=1)
            for stream, new in zip(streams, frames, strict=True)
        ]
        windows = [
            self._cut(stream, chunk, all_frames)
            for stream, (_, chunk), all_frames in zip(streams, batch, known, strict=True)
        ]
        inputs = [item for items in windows for item in items]
        decoded = iter(map_grouped(inputs, lambda item: item.frames.shape[1], self._decode))
        audio = []
        for stream, items, (_, chunk), all_frames in zip(
            streams, windows, batch, known, strict=True
        ):
            audio.append(self._join(stream, [(item.window, next(decoded)) for item in items]))
            computed = stream.past.shape[1] + chunk.frames.shape[1]
            stream.position += chunk.frames.shape[1]
            stream.past = all_frames[:, max(0, computed - self._windows.past) : computed].clone()
        return audio

    def _cut(
        self, stream: _WindowStream, chunk: VocoderInput, frames: torch.Tensor
    ) -> list[_WindowInput]:
        """Divides a chunk into windows. `frames` are all frames that are known: the context, the
        chunk and its look-ahead.
        """
        origin = stream.position - stream.past.shape[1]
        stop, end = stream.position + chunk.frames.shape[1], origin + frames.shape[1]
        return [
            _WindowInput(window, frames[:, window.first - origin : window.last - origin])
            for window in self._windows.over(stream.position, stop, end)
        ]

    def _decode(self, items: Sequence[_WindowInput]) -> list[torch.Tensor]:
        """Computes windows of one length, in batches that are not larger than the largest captured
        one, or are one window.
        """
        rows = max(1, min(_MOST_ROWS, _MOST_FRAMES // items[0].frames.shape[1]))
        batches = [items[start : start + rows] for start in range(0, len(items), rows)]
        return [audio for batch in batches for audio in self._batches.run(batch)]

    def _join(
        self, stream: _WindowStream, decoded: Sequence[tuple[Window, torch.Tensor]]
    ) -> torch.Tensor:
        """Joins the audio of the windows of a chunk, and stores the part that fades into the next
        one.
        """
        parts = [self._nothing]
        for window, audio in decoded:
            count = (window.stop - window.start) * self._net.frame_samples
            if fading := len(stream.tail):
                audio[:fading] = torch.lerp(stream.tail, audio[:fading], self._ramp[:fading])
            parts.append(audio[:count])
            stream.tail = audio[count:].clone()  # a view would keep the audio of the whole batch
        return torch.cat(parts)


def _known(chunk: VocoderInput) -> torch.Tensor:
    """Returns the frames of a chunk and of its look-ahead."""
    if chunk.next_frames is None:
        return chunk.frames
    return torch.cat((chunk.frames, chunk.next_frames), dim=1)

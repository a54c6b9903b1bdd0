"""Decoder stage of CosyVoice1. The flow computes the mel of windows of a stream, each after the
prompt of the voice. The mel of a window fades into that of the next one, and the vocoder continues
the stream with a state. So no phase jumps at the end of a window.

A token has 1.72 mel frames. Frames therefore count from the start of the utterance, and a chunk has
the frames that its tokens complete.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from token2wav.config.windows import Window, Windows
from token2wav.execution.buckets import map_grouped
from token2wav.execution.captured_sizes import CAPTURED_WINDOW_FRAMES, CAPTURED_WINDOWS
from token2wav.execution.staging import joined, to_device
from token2wav.families.cosyvoice1 import CosyVoice1Config
from token2wav.families.cosyvoice1.network import CosyVoice1
from token2wav.networks.noise import FlowNoise, NormalNoise
from token2wav.networks.ode import EulerSolver
from token2wav.stages.stage import (
    DEFAULT_OPTIONS,
    FrameChunk,
    Stage,
    StreamOptions,
    TokenChunk,
)
from token2wav.stages.waveform import WaveformStage
from token2wav.voice import Voice

# The public code gives the first and the last 20 tokens of a whole utterance the rounded number of
# frames of 20 tokens, and all others the rest.
_EDGE_TOKENS = 20
_MOST_ROWS = CAPTURED_WINDOWS[-1]
_MOST_FRAMES = CAPTURED_WINDOW_FRAMES * _MOST_ROWS  # of a batch of several windows


@dataclass(eq=False)
class _Stream:
    """State of one stream.

    Attributes:
        tail: (bands, n) mel of the frames after the last chunk, from its last window. The mel of
            the next window replaces it over these frames.
    """

    voice: Voice
    steps: int
    vocoder: int  # handle of its vocoder
    past: NDArray[np.int32]  # last tokens before the next chunk, the context of the next window
    tail: torch.Tensor
    position: int = 0  # tokens that were computed so far


@dataclass(frozen=True, eq=False)
class _WindowInput:
    """Window of a stream.

    Attributes:
        start, count: first mel frame of the window in the utterance, and number of frames.
    """

    stream: _Stream
    window: Window
    tokens: NDArray[np.int32]  # tokens of the window
    start: int
    count: int

    @property
    def has_all(self) -> bool:
        """Whether the window is a whole utterance."""
        return self.window.start == 0 and self.window.stop == self.window.last

    @property
    def shape(self) -> tuple[int, ...]:
        """Key of a batch: windows with equal values run together."""
        voice = self.stream.voice
        lengths = len(voice.prompt_tokens), len(voice.prompt_mel), len(self.tokens), self.count
        return self.stream.steps, *lengths


class CosyVoice1Decoder(Stage[_Stream]):
    """Stage from tokens to audio: a flow in windows, and a vocoder with a state.

    Windows of the same length run together, if their prompts have the same length too.
    """

    def __init__(self, config: CosyVoice1Config, network: CosyVoice1) -> None:
        super().__init__()
        self._config, self._sizes, self._flow = config, config.sizes, network.flow
        self._device = network.device
        self._windows: Windows = config.windows
        self._noise = FlowNoise(config.mel_bands).to(self._device)
        self._solvers: dict[int, EulerSolver] = {}
        self._vocoder = WaveformStage(
            network.hift, NormalNoise(config.sizes.hift.nb_harmonics + 1), streams=1
        )
        self._no_tokens = config.tokens.zeros(0)

    def open(self, voice: Voice, options: StreamOptions = DEFAULT_OPTIONS) -> int:
        steps = options.steps or self._config.ode_steps
        nothing = torch.empty(self._config.mel_bands, 0, device=self._device)
        vocoder = self._vocoder.open()
        return self.register(_Stream(voice, steps, vocoder, self._no_tokens, nothing))

    def close(self, handle: int) -> None:
        if (stream := self._streams.pop(handle, None)) is not None:
            self._vocoder.close(stream.vocoder)

    @property
    def withheld_samples(self) -> int:
        """Samples of the vocoder, and of a frame that the tokens of a chunk do not complete."""
        return self._vocoder.withheld_samples + self._sizes.hift.samples_per_frame

    @torch.inference_mode()
    def advance(self, batch: Sequence[tuple[int, TokenChunk]]) -> list[torch.Tensor]:
        streams = [self.state(handle) for handle, _ in batch]
        windows = [
            self._cut(stream, chunk) for stream, (_, chunk) in zip(streams, batch, strict=True)
        ]
        inputs = [item for items in windows for item in items]
        mels = iter(map_grouped(inputs, lambda item: item.shape, self._solve_in_parts))
        frames = [
            (stream.vocoder, FrameChunk(self._join(stream, items, mels), chunk.last))
            for stream, items, (_, chunk) in zip(streams, windows, batch, strict=True)
        ]
        for stream, (_, chunk) in zip(streams, batch, strict=True):
            count = chunk.stop - chunk.start
            stream.position += count
            computed = np.concatenate((stream.past, chunk.tokens[:count]))
            stream.past = computed[max(0, len(computed) - self._windows.past) :]
        return [
            self._completed(stream, audio) if chunk.last else audio
            for stream, (_, chunk), audio in zip(
                streams, batch, self._vocoder.advance(frames), strict=True
            )
        ]

    def _cut(self, stream: _Stream, chunk: TokenChunk) -> list[_WindowInput]:
        """Divides a chunk into windows."""
        known = np.concatenate((stream.past, chunk.tokens))
        origin, stop = (
            stream.position - len(stream.past),
            stream.position + chunk.stop - chunk.start,
        )
        return [
            self._input(stream, window, known[window.first - origin : window.last - origin])
            for window in self._windows.over(stream.position, stop, origin + len(known))
        ]

    def _input(self, stream: _Stream, window: Window, tokens: NDArray[np.int32]) -> _WindowInput:
        """Finds the frames of a window. The U-Net joins pairs of frames at each level below the
        first. The first frame of a window is chosen so that the joined frames are those of the
        whole utterance. All windows with a full context on the right have equal numbers of frames,
        and extrapolate only the last ones. A window that ends the utterance has the frames of its
        tokens.
        """
        joined_frames = 2 ** (self._sizes.levels - 1)
        start = self._sizes.mel_frames(window.first) // joined_frames * joined_frames
        count = self._sizes.mel_frames(len(tokens)) + joined_frames
        if window.last - window.stop < self._windows.right:
            count = self._sizes.mel_frames(window.last) - start
        return _WindowInput(stream, window, tokens, start, count)

    def _solve_in_parts(self, items: Sequence[_WindowInput]) -> list[torch.Tensor]:
        """Computes windows of one shape, in batches of limited size."""
        frames = len(items[0].stream.voice.prompt_mel) + items[0].count
        rows = max(1, min(_MOST_ROWS, _MOST_FRAMES // frames))
        batches = [items[first : first + rows] for first in range(0, len(items), rows)]
        return [mel for batch in batches for mel in self._solve(batch)]

    def _solve(self, items: Sequence[_WindowInput]) -> list[torch.Tensor]:
        """Computes the mel (bands, frames) of windows of one shape."""
        voices, first = [item.stream.voice for item in items], items[0]
        prompt = len(voices[0].prompt_mel)
        tokens = np.stack(
            [np.concatenate((item.stream.voice.prompt_tokens, item.tokens)) for item in items]
        )
        places = np.stack([self._places(item) for item in items])
        mu = self._flow.mu(to_device(tokens, self._device), to_device(places, self._device))
        cond = torch.zeros_like(mu)
        mels, embeddings = (
            to_device(np.stack([getattr(voice, name) for voice in voices]), self._device)
            for name in ("prompt_mel", "speaker_embedding")
        )
        if not self._config.takes_voice:
            embeddings = mels.new_zeros(len(items), self._sizes.spk_embed_dim)
        cond[:, :, :prompt] = mels.transpose(1, 2)
        noise = [
            [
                *self._noise.pieces(0, prompt),
                *self._noise.pieces(prompt + item.start, prompt + item.start + item.count),
            ]
            for item in items
        ]
        mel = self._solver(first.stream.steps).solve(
            torch.stack(joined(noise)), mu, self._flow.speaker(embeddings), cond, None
        )
        return list(mel[:, :, prompt:])

    def _solver(self, steps: int) -> EulerSolver:
        if steps not in self._solvers:
            guidance = self._sizes.inference_cfg_rate
            self._solvers[steps] = EulerSolver(self._flow.estimator, steps, guidance)
        return self._solvers[steps]

    def _places(self, item: _WindowInput) -> NDArray[np.float64]:
        """Returns the position of every frame of the prompt and of a window among their tokens. A
        whole utterance has the positions of the public code. A frame of any other window has its
        own time, which is the same in both windows that fade into each other.
        """
        voice, tokens = item.stream.voice, len(item.tokens)
        nearest = self._sizes.block_size > 0
        prompt = len(voice.prompt_tokens)
        if self._windows == self._config.whole and item.has_all:
            edge = self._sizes.mel_frames(_EDGE_TOKENS)
            parts = [(tokens, item.count)]
            if tokens > 2 * _EDGE_TOKENS and not nearest:
                inner = tokens - 2 * _EDGE_TOKENS, item.count - 2 * edge
                parts = [(_EDGE_TOKENS, edge), inner, (_EDGE_TOKENS, edge)]
            places, position = [], prompt
            for part_tokens, part_frames in parts:
                places.append(position + _stretched(part_tokens, part_frames, nearest))
                position += part_tokens
        else:
            frame, token = self._sizes.hift.samples_per_frame, self._sizes.frame_samples
            frames = np.arange(item.start, item.start + item.count)
            at = frames * frame // token if nearest else (frames + 0.5) * frame / token - 0.5
            places = [prompt + (at - item.window.first).clip(0, tokens - 1)]
        return np.concatenate((_stretched(prompt, len(voice.prompt_mel), nearest), *places))

    def _join(
        self, stream: _Stream, items: Sequence[_WindowInput], mels: Iterator[torch.Tensor]
    ) -> torch.Tensor:
        """Joins the mels of the windows of a chunk, and stores the tail of the last window."""
        parts = [stream.tail[:, :0]]
        for item in items:
            window, mel = item.window, next(mels)
            start, stop, fade_stop = (
                self._sizes.mel_frames(token) - item.start
                for token in (window.start, window.stop, window.fade_stop)
            )
            new = mel[:, start:fade_stop]
            if fading := stream.tail.shape[1]:
                ramp = (torch.arange(fading, device=self._device) + 0.5) / fading
                new[:, :fading] = torch.lerp(stream.tail, new[:, :fading], ramp)
            parts.append(new[:, : stop - start])
            stream.tail = new[:, stop - start :].clone()
        return torch.cat(parts, dim=1)

    def _completed(self, stream: _Stream, audio: torch.Tensor) -> torch.Tensor:
        """Adds zeros for the end of the last token, which completes no frame."""
        tokens, frame = stream.position, self._sizes.hift.samples_per_frame
        missing = tokens * self._sizes.frame_samples - self._sizes.mel_frames(tokens) * frame
        return torch.nn.functional.pad(audio, (0, missing))


def _stretched(tokens: int, frames: int, nearest: bool) -> NDArray[np.float64]:
    """Returns the positions of frames that divide a number of tokens evenly.

    Args:
        nearest: whether a frame has the position of a token, rounded as in torch.
    """
    scale = tokens / max(1, frames)
    if nearest:
        return np.floor(np.arange(frames, dtype=np.float32) * np.float32(scale)).astype(float)
    return ((np.arange(frames) + 0.5) * scale - 0.5).clip(0, max(0, tokens - 1))

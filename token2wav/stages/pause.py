"""Stages that compute nothing: a batch takes a set time, and its audio is a test signal.

They take the place of the networks for measurements of a server (docs/benchmarking.md). Their
chunks have the lengths of the real chunks. The signal of a token is a constant that depends on the
token alone, so audio that reaches a wrong client or a wrong place is found by comparing bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from token2wav.config.model_config import ModelConfig
from token2wav.execution.step_boundary import step_boundary
from token2wav.networks.waveform_network import WaveformNetwork
from token2wav.stages.stage import (
    DEFAULT_OPTIONS,
    FlowStage,
    StreamOptions,
    TokenChunk,
    VocoderInput,
    VocoderStage,
)
from token2wav.stages.waveform import check_lookahead_frames
from token2wav.voice import Voice

# Multiples of the golden ratio, modulo 1, differ most for tokens that are close to each other.
_GOLDEN_RATIO = 0.618034
_LEAST_LEVEL, _LEVELS = 0.25, 0.5  # levels of the signal are 0.25 to 0.75, far above silence


@dataclass(frozen=True)
class Pause:
    """Time of a batch, in milliseconds: `batch_ms`, and `token_ms` for each token of its chunks."""

    batch_ms: float
    token_ms: float
    sleep: Callable[[float], None] = time.sleep

    def wait(self, tokens: int, steps: int = 1) -> None:
        """Waits for the time of a batch, in equal parts for its ODE steps."""
        seconds = (self.batch_ms + self.token_ms * tokens) / 1000
        for step in range(steps):
            if step:
                step_boundary()
            self.sleep(seconds / steps)


class PauseFlow(FlowStage[None]):
    """Flow stage that repeats the first code of each token in all values of its mel frames."""

    def __init__(self, config: ModelConfig, pause: Pause) -> None:
        super().__init__()
        self._config, self._pause = config, pause

    def open(self, voice: Voice, options: StreamOptions = DEFAULT_OPTIONS) -> int:
        return self.register(None)

    def advance(self, batch: Sequence[tuple[int, TokenChunk]]) -> list[torch.Tensor]:
        for handle, _ in batch:
            self.state(handle)
        tokens = sum(chunk.stop - chunk.start for _, chunk in batch)
        self._pause.wait(tokens, self._config.ode_steps)
        return [self._mel(chunk.tokens[: chunk.stop - chunk.start]) for _, chunk in batch]

    def whole(
        self, tokens: NDArray[np.int32], voice: Voice, *, streaming: bool, steps: int = 0
    ) -> torch.Tensor:
        self._pause.wait(len(tokens))
        return self._mel(tokens)

    def _mel(self, tokens: NDArray[np.int32]) -> torch.Tensor:
        codes = torch.from_numpy(tokens if tokens.ndim == 1 else tokens[:, 0])
        frames = codes.float().repeat_interleave(self._config.token_mel_ratio)
        return frames.repeat(self._config.mel_bands, 1)


@dataclass(eq=False)
class _Signal:
    """Audio of a stream."""

    frames: int = 0
    sent: int = 0
    withheld: torch.Tensor = field(default_factory=lambda: torch.empty(0))


class PauseVocoder(VocoderStage[_Signal]):
    """Vocoder stage that holds a level for each frame, made from its first channel. Only the
    sizes of the network are read. The batches of a codec take the time `pause`.
    """

    def __init__(
        self, network: WaveformNetwork, lookahead_frames: int = 0, pause: Pause | None = None
    ) -> None:
        super().__init__()
        check_lookahead_frames(lookahead_frames, network)
        self._net, self._lookahead_frames, self._pause = network, lookahead_frames, pause

    @property
    def withheld_samples(self) -> int:
        return self._lookahead_frames * self._net.frame_samples or self._net.output_delay

    def open(self, voice: Voice | None = None, options: StreamOptions = DEFAULT_OPTIONS) -> int:
        return self.register(_Signal())

    def advance(self, batch: Sequence[tuple[int, VocoderInput]]) -> list[torch.Tensor]:
        streams = [self.state(handle) for handle, _ in batch]
        if self._pause:
            self._pause.wait(sum(chunk.frames.shape[1] for _, chunk in batch))
        return [
            self._advance_one(stream, chunk)
            for stream, (_, chunk) in zip(streams, batch, strict=True)
        ]

    def whole(self, frames: torch.Tensor) -> torch.Tensor:
        return self._signal(frames)[: self._ready(frames.shape[1], last=True)]

    def _advance_one(self, stream: _Signal, chunk: VocoderInput) -> torch.Tensor:
        stream.frames += chunk.frames.shape[1]
        samples = torch.cat((stream.withheld, self._signal(chunk.frames)))
        count = max(0, self._ready(stream.frames, last=chunk.last) - stream.sent)
        stream.sent += count
        stream.withheld = samples[count:]
        return samples[:count]

    def _ready(self, frames: int, *, last: bool) -> int:
        """Returns the samples that a stream has sent after its first `frames` frames."""
        network, samples = self._net, frames * self._net.frame_samples
        return max(0, samples - (network.missing_samples if last else self.withheld_samples))

    def _signal(self, frames: torch.Tensor) -> torch.Tensor:
        levels = frames[0].float() * _GOLDEN_RATIO % 1 * _LEVELS + _LEAST_LEVEL
        return levels.repeat_interleave(self._net.frame_samples)

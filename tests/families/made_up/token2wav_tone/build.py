"""Stages of a tone: pitches slide from token to token, and a sine follows them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from token2wav.config import StreamConfig
from token2wav.execution.backends import Host
from token2wav.execution.stages import CacheUsage, FlowChunk, MelChunk, Stage, Stages, StageSummary
from token2wav.model_config import ModelConfig
from token2wav.voice import Voice

_FRAMES, _FRAME_SAMPLES = 2, 40  # of a token; of a frame


def check(folder: Path, config: ModelConfig) -> None:
    float(json.loads((folder / "tone.json").read_text())["loudness"])


def build(host: Host, config: ModelConfig, stream: StreamConfig) -> Stages:
    loudness = float(json.loads((host.folder / "tone.json").read_text())["loudness"])
    return Stages(ToneFlow(), ToneVocoder(loudness, config.sample_rate), StageSummary("torch", "float32", "cpu"))


class ToneFlow(Stage[Voice]):
    """Tokens to pitches (1, frames) in Hz: of the token, then of the middle between it and the next one."""

    def open(self, voice: Voice, steps: int = 0) -> int:
        return self.keep(voice)

    def advance(self, batch: Sequence[tuple[int, FlowChunk]]) -> list[torch.Tensor]:
        return [self._pitches(chunk) for handle, chunk in batch if self.state(handle)]

    def usage(self) -> CacheUsage:
        return CacheUsage()

    def whole(self, tokens: NDArray[np.int32], voice: Voice, *, streaming: bool, steps: int = 0) -> torch.Tensor:
        return self._pitches(FlowChunk(tokens, 0, 0, len(tokens), last=True))

    @staticmethod
    def _pitches(chunk: FlowChunk) -> torch.Tensor:
        tokens = torch.from_numpy(chunk.tokens).float()[chunk.left :]
        own = tokens[: chunk.stop - chunk.start]
        following = tokens[1:] if len(tokens) > len(own) else torch.cat((own[1:], own[-1:]))
        return 100 + torch.stack((own, (own + following) / 2), dim=1).reshape(1, _FRAMES * len(own))


class ToneVocoder(Stage[list[float]]):
    """Pitches to a sine, whose phase is kept from chunk to chunk."""

    def __init__(self, loudness: float, sample_rate: int) -> None:
        super().__init__()
        self._loudness, self._rate = loudness, sample_rate

    def open(self) -> int:
        return self.keep([0.0])

    def advance(self, batch: Sequence[tuple[int, MelChunk]]) -> list[torch.Tensor]:
        return [self._sine(chunk.mel, self.state(handle)) for handle, chunk in batch]

    def whole(self, mel: torch.Tensor) -> torch.Tensor:
        return self._sine(mel, [0.0])

    def _sine(self, mel: torch.Tensor, phase: list[float]) -> torch.Tensor:
        cycles = phase[0] + (mel[0].double().repeat_interleave(_FRAME_SAMPLES) / self._rate).cumsum(0)
        phase[0] = float(cycles[-1]) if len(cycles) else phase[0]
        return (self._loudness * torch.sin(2 * math.pi * cycles)).float()

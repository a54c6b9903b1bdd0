"""Networks of a tone: pitches slide from token to token, and a sine follows them.

It brings both stages itself.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from token2wav.config.model_config import StageName
from token2wav.families.family import Family, StageParts
from token2wav.stages.stage import (
    DEFAULT_OPTIONS,
    FrameChunk,
    Stage,
    StreamOptions,
    TokenChunk,
)
from token2wav.voice import Voice

_FRAMES, _FRAME_SAMPLES = 2, 40  # of a token; of a frame


class Loudness(nn.Module):
    """Network of the vocoder: one number."""

    def __init__(self) -> None:
        super().__init__()
        self.loudness = nn.Parameter(torch.ones(()))


class Tone(Family):
    torch_only = "a tone"
    paged_flow = False

    def network(self, config: Any, stage: StageName) -> nn.Module:
        return Loudness() if stage == "vocoder" else nn.Identity()

    def weights(self, network: Any, path: Path, stage: StageName) -> dict[str, torch.Tensor]:
        loudness = float(json.loads(path.read_text())["loudness"])
        return {"loudness": torch.tensor(loudness)} if stage == "vocoder" else {}

    def own_stage(self, parts: StageParts) -> Stage[Any] | None:
        return (
            ToneVocoder(float(parts.network.loudness), parts.config.sample_rate)
            if parts.name == "vocoder"
            else ToneFlow()
        )


class ToneFlow(Stage[Voice]):
    """Tokens to pitches (1, frames) in Hz: of the token, then of the middle between it and the next
    one.
    """

    def open(self, voice: Voice, options: StreamOptions = DEFAULT_OPTIONS) -> int:
        return self.register(voice)

    def advance(self, batch: Sequence[tuple[int, TokenChunk]]) -> list[torch.Tensor]:
        return [self._pitches(chunk) for handle, chunk in batch if self.state(handle)]

    def whole(
        self, tokens: NDArray[np.int32], voice: Voice, *, streaming: bool, steps: int = 0
    ) -> torch.Tensor:
        return self._pitches(TokenChunk(tokens, 0, len(tokens), last=True))

    @staticmethod
    def _pitches(chunk: TokenChunk) -> torch.Tensor:
        tokens = torch.from_numpy(chunk.tokens).float()
        current = tokens[: chunk.stop - chunk.start]
        following = (
            tokens[1:] if len(tokens) > len(current) else torch.cat((current[1:], current[-1:]))
        )
        return 100 + torch.stack((current, (current + following) / 2), dim=1).reshape(
            1, _FRAMES * len(current)
        )


class ToneVocoder(Stage[list[float]]):
    """Vocoder that turns pitches into a sine and keeps its phase from chunk to chunk."""

    def __init__(self, loudness: float, sample_rate: int) -> None:
        super().__init__()
        self._loudness, self._rate = loudness, sample_rate

    def open(self, voice: Voice, options: StreamOptions = DEFAULT_OPTIONS) -> int:
        return self.register([0.0])

    def advance(self, batch: Sequence[tuple[int, FrameChunk]]) -> list[torch.Tensor]:
        return [self._sine(chunk.frames, self.state(handle)) for handle, chunk in batch]

    def whole(self, mel: torch.Tensor) -> torch.Tensor:
        return self._sine(mel, [0.0])

    def _sine(self, mel: torch.Tensor, phase: list[float]) -> torch.Tensor:
        cycles = phase[0] + (mel[0].double().repeat_interleave(_FRAME_SAMPLES) / self._rate).cumsum(
            0
        )
        phase[0] = float(cycles[-1]) if len(cycles) else phase[0]
        return (self._loudness * torch.sin(2 * math.pi * cycles)).float()


FAMILY = Tone()

"""Torch vocoder engine that vocodes the whole mel so far for every chunk and cuts off what was sent before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from token2wav.engines.base import MelChunk
from token2wav.engines.handles import HandleTable
from token2wav.vocoder.hift import HiFT
from token2wav.vocoder.noise import SourceNoise


@dataclass(eq=False)
class _History:
    mel: torch.Tensor  # (bands, frames)
    speech_offset: int = 0  # samples already sent


class TorchVocoderEngine:
    """Runs HiFT on the mel so far.

    Args:
        hift: on the device that is to be used.
        noise: of the harmonic source.
        phase: rounding of the source's phase, see `StreamConfig`.
    """

    def __init__(self, hift: HiFT, noise: SourceNoise, phase: Literal["exact", "reference"] = "exact") -> None:
        self._hift = hift
        self._noise = noise
        self._phase = phase
        self._device = hift.window.device
        self._streams: HandleTable[_History] = HandleTable()

    def open(self) -> int:
        return self._streams.add(_History(torch.empty(self._hift.config.in_channels, 0, device=self._device)))

    def advance(self, batch: Sequence[tuple[int, MelChunk]]) -> list[torch.Tensor]:
        return [self._advance_one(self._streams[handle], chunk) for handle, chunk in batch]

    def close(self, handle: int) -> None:
        self._streams.remove(handle)

    @property
    def open_streams(self) -> int:
        return len(self._streams)

    def whole(self, mel: torch.Tensor) -> torch.Tensor:
        """Audio of a whole mel (bands, frames) in one call, (samples,)."""
        return self._vocode(mel.to(self._device), final=True)

    def _vocode(self, mel: torch.Tensor, *, final: bool) -> torch.Tensor:
        return self._hift.vocode(mel[None], self._noise, final=final, phase=self._phase)[0]

    def _advance_one(self, history: _History, chunk: MelChunk) -> torch.Tensor:
        history.mel = torch.cat((history.mel, chunk.mel.to(self._device)), dim=1)
        if not chunk.last and history.mel.shape[1] <= self._hift.lookahead_frames:
            return history.mel.new_empty(0)
        audio = self._vocode(history.mel, final=chunk.last)[history.speech_offset :]
        history.speech_offset += len(audio)
        return audio

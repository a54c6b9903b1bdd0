"""What all incremental vocoder engines have in common: handles for the states of open utterances."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import torch

from token2wav.engines.base import MelChunk
from token2wav.engines.handles import HandleTable

State = TypeVar("State")


class IncrementalVocoder(Protocol[State]):
    """Vocodes utterances piece by piece; what it knows of one is in a state."""

    def start(self) -> State:
        """The state of a new utterance."""

    def advance_batch(self, batch: Sequence[tuple[State, torch.Tensor, bool]]) -> list[torch.Tensor]:
        """Takes (state, mel (bands, n), final) of several utterances and returns the new samples (m,) of each."""

    def whole(self, mel: torch.Tensor) -> torch.Tensor:
        """Audio of a whole mel (bands, frames) at once, (samples,)."""


class IncrementalVocoderEngine(Generic[State]):
    """A `VocoderEngine` whose chunks cost only themselves.

    Args:
        vocoder: what computes.
        device: that it computes on.
    """

    def __init__(self, vocoder: IncrementalVocoder[State], device: torch.device) -> None:
        self._vocoder = vocoder
        self._device = device
        self._streams: HandleTable[State] = HandleTable()

    def open(self) -> int:
        return self._streams.add(self._vocoder.start())

    def advance(self, batch: Sequence[tuple[int, MelChunk]]) -> list[torch.Tensor]:
        """See `VocoderEngine.advance`."""
        return self._vocoder.advance_batch(
            [(self._streams[handle], chunk.mel.to(self._device), chunk.last) for handle, chunk in batch]
        )

    def close(self, handle: int) -> None:
        self._streams.remove(handle)

    def whole(self, mel: torch.Tensor) -> torch.Tensor:
        """See `VocoderEngine.whole`."""
        return self._vocoder.whole(mel.to(self._device))

    @property
    def open_streams(self) -> int:
        return len(self._streams)

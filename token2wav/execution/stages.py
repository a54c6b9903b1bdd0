"""Stages between tokens and audio: what the pipeline hands to them, and what a family gives them.

A stage works on chunks, not on layers, so that it may run all ODE steps as one captured graph. It owns tensors
(weights, states of streams); the handle that `open` returns is the only claim on what it keeps for one stream, and
`close` the only release.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from token2wav.cache.paged_kv_cache import CacheLayout
from token2wav.errors import StreamClosedError
from token2wav.networks.configs import ScheduleConfig
from token2wav.networks.masks import BlockMask
from token2wav.voice import Voice

BackendName = Literal["torch", "onnx", "tensorrt"]
State = TypeVar("State")


@dataclass(frozen=True, eq=False)
class FlowChunk:
    """The next piece of an utterance. Positions are tokens counted from the first prompt token.

    `tokens` are (left + stop - start + right,) int32, or (..., codebooks): the chunk between `left` tokens that come
    before it and `right` that follow (the look-ahead; none if `last`). Nothing is kept of a `provisional` chunk, whose
    last block is not complete: the next chunk starts where it did.
    """

    tokens: NDArray[np.int32]
    left: int
    start: int  # the stop of the chunk before that was kept, or the prefix length of the voice
    stop: int  # a multiple of the attention block unless `last` or `provisional`
    last: bool  # the utterance ends here
    skip: int = 0  # tokens at its start that are the prompt's, or were heard already
    provisional: bool = False


@dataclass(frozen=True, eq=False)
class MelChunk:
    """The next mel frames of an utterance, (bands, frames) float32 without its prompt; the `last` ones end it."""

    mel: torch.Tensor
    last: bool


@dataclass(frozen=True)
class CacheUsage:
    """Use of a stage's cache, in pages."""

    capacity: int = 0
    used: int = 0
    shared: int = 0  # those of them that belong to voices' prompts
    idle: int = 0  # those of these that no stream uses, and that are free for whoever needs them
    page_bytes: int = 0
    prompt_hits: int = 0  # utterances whose voice's prompt was there
    prompt_misses: int = 0  # and those for which it had to be computed


class FlowStage(Protocol):
    """Stage from tokens to mel."""

    def open(self, voice: Voice, steps: int = 0) -> int:
        """Starts an utterance and computes what depends on its voice alone; returns a handle.

        `steps` of the ODE are one of the numbers that the stage was made for; 0 for the usual one.
        """

    def advance(self, batch: Sequence[tuple[int, FlowChunk]]) -> list[torch.Tensor]:
        """Mel of every chunk, (bands, 2 * (stop - start)) float32, whatever else is in the batch."""

    def close(self, handle: int) -> None:
        """Frees an utterance; a handle that is not open is ignored."""

    def usage(self) -> CacheUsage:
        """Of the cache now; all zero for a stage that has none."""
        return CacheUsage()

    def whole(self, tokens: NDArray[np.int32], voice: Voice, *, streaming: bool, steps: int = 0) -> torch.Tensor:
        """Mel of a whole utterance in one call, (bands, ratio * tokens): under the streaming mask or the full one."""

    @property
    def open_streams(self) -> int:
        """Utterances that hold memory."""


class VocoderStage(Protocol):
    """Stage from mel to audio."""

    def open(self) -> int:
        """Starts an utterance; returns a handle."""

    def advance(self, batch: Sequence[tuple[int, MelChunk]]) -> list[torch.Tensor]:
        """New audio of every utterance, (samples,) float32; some is held back until the last chunk."""

    def close(self, handle: int) -> None:
        """Frees an utterance; a handle that is not open is ignored."""

    def whole(self, mel: torch.Tensor) -> torch.Tensor:
        """Audio of a whole mel (bands, frames) in one call, (samples,)."""

    @property
    def open_streams(self) -> int:
        """Utterances that hold memory."""


class Encoder(Protocol):
    """Part of a flow that turns tokens into conditions. What it keeps of a stream is its own: the stage hands it on."""

    @property
    def device(self) -> torch.device: ...

    def start(self, voice: Voice, mask: BlockMask | None) -> Any:
        """State of a stream that begins with the tokens of its voice's prompt; None if nothing is kept.

        The mask says who sees whom, in frames; None stands for full attention, under which an utterance is one chunk.
        """

    def fork(self, state: Any, mask: BlockMask) -> Any:
        """Copy of a state, for a stream that goes on from a prefix which others share, under a mask of its own."""

    def encode(self, batch: Sequence[tuple[Any, FlowChunk]]) -> list[torch.Tensor]:
        """Conditions (bands, frames) of chunks behind the states of their streams, which are taken on to their ends."""

    def speaker(self, embedding: torch.Tensor) -> torch.Tensor:
        """Vector (bands,) of a speaker embedding."""


@dataclass(frozen=True)
class StageSummary:
    """Summary of what the stages of a model run on, for reports and logs."""

    name: BackendName
    precision: str
    device: str


@dataclass(frozen=True, eq=False)
class Stages:
    """Stages of a model, in the order in which a chunk passes them."""

    flow: FlowStage
    vocoder: VocoderStage
    summary: StageSummary


@dataclass(frozen=True, eq=False)
class Networks:
    """Networks of a model without weights, for who asks what they will need."""

    flow: Any  # with its `estimator`; it is its own `Encoder`
    vocoder: Any
    layout: CacheLayout
    guidance: float  # classifier-free guidance rate
    schedule: ScheduleConfig = ScheduleConfig()  # noqa: RUF009 (it is frozen)
    token_bytes: int = 0  # of what the encoder keeps of a token beside the cache


class Stage(Generic[State]):
    """Base of stages, which keep a state of each stream under its handle; several threads may use it."""

    def __init__(self) -> None:
        self._streams: dict[int, State] = {}
        self._handles = itertools.count(1)

    def keep(self, state: State) -> int:
        """Keeps the state of a new stream, and returns its handle."""
        handle = next(self._handles)
        self._streams[handle] = state
        return handle

    def state(self, handle: int) -> State:
        """Returns the state of a stream; raises StreamClosedError if it has ended."""
        try:
            return self._streams[handle]
        except KeyError:
            raise StreamClosedError(f"stream {handle}: it has ended") from None

    def close(self, handle: int) -> None:
        self._streams.pop(handle, None)

    @property
    def open_streams(self) -> int:
        return len(self._streams)

"""Stages of a model: the interface between the pipeline and the stages, and the interface of the
encoder that a family implements.

A model has a flow stage (tokens to mel) and a vocoder stage (mel to audio), or a single decoder
stage (tokens to audio). A stage computes a whole chunk in one call, so that it can run all ODE
steps as one CUDA graph. A stage owns its weights and the states of its streams. The pipeline refers
to the state of a stream by the handle that `open` returns. Only `close` releases the state.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, Literal, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from token2wav.config.block_grid import BlockGrid
from token2wav.config.model_config import StageName
from token2wav.errors import StreamClosedError
from token2wav.execution.cuda_graphs import GraphSummary
from token2wav.layers.streaming import KeyValueSpec, StateSpec, StreamStep
from token2wav.networks.conformer import WHOLE, ConformerAttention, ConformerContext
from token2wav.voice import Voice

BackendName = Literal["torch", "onnx", "tensorrt", "pause"]
State = TypeVar("State")


@dataclass(frozen=True)
class StreamOptions:
    """Options of one stream, for its stages."""

    steps: int = 0  # ODE steps, one of the numbers that the flow was made for; 0 for the default
    decoder_noise: bool = True  # whether the decoder adds its noise, for models with noise (SNAC)


DEFAULT_OPTIONS = StreamOptions()


@dataclass(frozen=True, eq=False)
class TokenChunk:
    """Chunk of tokens: the next tokens of an utterance, for the first stage.

    Positions count tokens from the first token of the prompt.

    Attributes:
        tokens: (stop - start + right, *token_shape) int32, or float32 if the model takes latents:
            the tokens of the chunk, and then `right` tokens of look-ahead. There is no look-ahead
            if `last`. Up to `ModelConfig.optional_lookahead_tokens` tokens may follow. In a
            provisional chunk `NO_TOKEN` stands for look-ahead that has not arrived.
        start: position of the first token of the chunk. It is the `stop` of the previous chunk that
            was not provisional. The first chunk starts after the shared prefix of the voice.
        stop: position after the last token of the chunk. A block ends there, unless the chunk is
            `last` or `provisional`.
        skip: tokens at the start of the chunk that belong to the prompt, or whose audio was sent
            already.
        provisional: whether the last block of the chunk is incomplete. No state of such a chunk is
            stored, and the next chunk starts at the same position.
    """

    tokens: NDArray[Any]
    start: int
    stop: int
    last: bool
    skip: int = 0
    provisional: bool = False

    @cached_property
    def frames(self) -> torch.Tensor:
        """Tokens of the chunk as frames of a codec: the codes or the latent of a token are a
        frame.
        """
        return as_frames(self.tokens[: self.stop - self.start])

    @cached_property
    def next_frames(self) -> torch.Tensor:
        """Look-ahead of the chunk as frames of a codec."""
        return as_frames(self.tokens[self.stop - self.start :])


def as_frames(tokens: NDArray[Any]) -> torch.Tensor:
    """Converts tokens (n,) or (n, channels) to frames (channels, n) of the same dtype."""
    if tokens.ndim == 1:
        tokens = tokens[:, None]
    return torch.from_numpy(tokens).T


@dataclass(frozen=True, eq=False)
class FrameChunk:
    """Chunk of frames: the next frames of an utterance, for any stage after the first.

    Attributes:
        frames: (channels, frames) mel or latents in float32, or codes in int32; without frames of
            the prompt.
        next_frames: (channels, n) frames of the next chunk that are already known. A stage may
            compute early audio with them. None if there are none.
    """

    frames: torch.Tensor
    last: bool
    next_frames: torch.Tensor | None = None


VocoderInput = FrameChunk | TokenChunk  # a codec reads `frames` of its chunks of tokens


@dataclass(frozen=True)
class CacheUsage:
    """Use of a stage's cache: pages, and prompts that were found in it or had to be computed."""

    capacity: int = 0
    used: int = 0
    shared: int = 0
    idle: int = 0  # prompt pages that no stream references, and that can be evicted
    page_bytes: int = 0
    prompt_hits: int = 0
    prompt_misses: int = 0


class Stage(ABC, Generic[State]):
    """Stage of a model, which stores the state of each stream under its handle. Thread-safe.

    The input of the first stage is a `TokenChunk`. The input of every later stage is a `FrameChunk`
    with the output of the stage before.
    """

    def __init__(self) -> None:
        self._streams: dict[int, State] = {}
        self._handles = itertools.count(1)

    @abstractmethod
    def open(self, voice: Voice, options: StreamOptions = DEFAULT_OPTIONS) -> int:
        """Starts an utterance, computes everything that depends on its voice alone, and returns its
        handle. Only flows use the voice.
        """

    @abstractmethod
    def advance(self, batch: Sequence[tuple[int, Any]]) -> list[torch.Tensor]:
        """Computes the next chunk of each utterance. The result of a chunk does not depend on the
        rest of the batch.

        Returns:
            (bands, frames) float32 of each chunk, or (samples,) from the last stage. A stage with
            look-ahead holds back the end of the result until the next chunk arrives.
        """

    def register(self, state: State) -> int:
        handle = next(self._handles)
        self._streams[handle] = state
        return handle

    def state(self, handle: int) -> State:
        """Returns the state of a stream, or raises StreamClosedError if it has ended."""
        try:
            return self._streams[handle]
        except KeyError:
            raise StreamClosedError(f"stream {handle}: it has ended") from None

    def close(self, handle: int) -> None:
        """Releases an utterance; a handle that is not open is ignored. No thread may be computing a
        chunk of the utterance (`Utterance.owner`), because it would write to memory of others.
        """
        self._streams.pop(handle, None)

    def prompt_batches(self, voice: Voice, options: StreamOptions = DEFAULT_OPTIONS) -> int:
        """Returns how many batches `open` would compute now: none if it computes nothing, or if the
        prompt of the voice is in the cache.
        """
        return 0

    def limit_chunks(self, most: int) -> None:
        """Sets how many chunks the caller computes at the same time, in all calls of `advance`
        together. A cache may keep less memory for so many chunks; without a cache it has no effect.
        """

    def usage(self) -> CacheUsage:
        """Returns the present use of the cache; all zero for a stage without cache."""
        return CacheUsage()

    @property
    def open_streams(self) -> int:
        """Utterances that hold memory."""
        return len(self._streams)

    @property
    def withheld_samples(self) -> int:
        """Samples withheld at the end of a chunk (last stage only)."""
        return 0


class FlowStage(Stage[State]):
    """Stage from tokens to mel. It returns mel (bands, ratio * (stop - start)) for each chunk,
    where `ratio` is the number of mel frames per token.
    """

    @abstractmethod
    def whole(
        self, tokens: NDArray[np.int32], voice: Voice, *, streaming: bool, steps: int = 0
    ) -> torch.Tensor:
        """Computes the mel (bands, ratio * tokens) of a whole utterance.

        Args:
            tokens: tokens of the utterance, without the prompt.
            streaming: whether attention is limited to whole blocks, as in a stream.
        """


class VocoderStage(Stage[State]):
    """Stage from frames to audio: of a vocoder, or of a codec, whose frames are its tokens."""

    @abstractmethod
    def whole(self, frames: torch.Tensor) -> torch.Tensor:
        """Computes the audio (samples,) of all frames (channels, n) of an utterance."""


@dataclass(frozen=True, eq=False)
class EncoderInput:
    """Chunk of a stream, for the encoder. Under full attention the whole utterance is one chunk."""

    chunk: TokenChunk
    grid: BlockGrid | None  # of the stream, in tokens; None for full attention
    context: ConformerContext = WHOLE


class Encoder(Protocol):
    """Part of a flow that turns tokens into mu, a condition of each frame.

    An encoder holds no memory of its streams. Its layers declare their states, and their keys and
    values. The stage stores both. It encodes chunk by chunk (`encode`), or batches of blocks of any
    streams, in code that a CUDA graph can capture (`encode_blocks`).
    """

    @property
    def device(self) -> torch.device: ...

    @property
    def key_value_specs(self) -> Sequence[KeyValueSpec]:
        """Key and value sizes of its attention layers, in layer order."""

    def state_specs(self) -> Mapping[nn.Module, StateSpec]:
        """Returns the state specs of its streaming layers."""

    def encode(
        self, batch: Sequence[EncoderInput], states: Mapping[nn.Module, torch.Tensor] | None = None
    ) -> list[torch.Tensor]:
        """Computes mu (bands, frames) of chunks.

        Args:
            states: (B, *shape) state of each layer before the chunks. The encoder overwrites it
                with the state after the chunks. None for whole utterances.
        """

    def speaker(self, embedding: torch.Tensor) -> torch.Tensor:
        """Projects a speaker embedding to a vector (bands,)."""

    @property
    def lookahead(self) -> int:
        """Tokens after a block that its mu depends on."""

    @property
    def lookbehind(self) -> int:
        """Tokens before a block that its convolutions reach back to."""

    @property
    def token_shape(self) -> tuple[int, ...]:
        """Shape of a token: empty, or its number of codes."""

    @property
    def mel_bands(self) -> int: ...

    @property
    def token_mel_ratio(self) -> int: ...

    @property
    def attention_heads(self) -> tuple[int, int]:
        """Number of attention heads and size of a head; zeros without attention."""

    def with_lookahead(self, chunk: TokenChunk, grid: BlockGrid) -> NDArray[np.int32]:
        """Returns the tokens of a chunk and its look-ahead, which the end of a stream lacks."""

    def encode_blocks(
        self, tokens: torch.Tensor, step: StreamStep, attention: ConformerAttention
    ) -> torch.Tensor:
        """Computes mu (rows, bands, frames) of blocks.

        Args:
            tokens: (rows, block + lookahead, *token_shape) int32 tokens of each block and after it;
                -1 where there is no token, which counts as an embedding of zeros.
        """


@dataclass(frozen=True)
class StageSummary:
    """Backend, precision and device of a model's stages, for reports and logs.

    Attributes:
        precision: dtype of the estimator's layers, or `decoder_precision` of a codec; float32 for a
            flow in windows.
        most_streams: most chunks that the backend computes together. A larger batch runs in parts.
            0 if the number is large or unlimited.
    """

    name: BackendName
    precision: str
    device: str
    most_streams: int = 0
    graphs: GraphSummary = field(default_factory=GraphSummary)


@dataclass(frozen=True, eq=False)
class Stages:
    """Stages of a model, in the order in which a chunk passes them."""

    by_name: Mapping[StageName, Stage[Any]]
    summary: StageSummary

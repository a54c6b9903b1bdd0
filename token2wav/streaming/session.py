"""Session of an utterance: it holds the tokens, knows how far they are computed, and decides what runs next."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from token2wav.errors import InputError, StreamClosedError
from token2wav.execution.stages import FlowChunk
from token2wav.model_config import ModelConfig
from token2wav.streaming.accumulator import TokenAccumulator
from token2wav.streaming.hops import HopSchedule
from token2wav.voice import Voice, check_vocabulary, token_array


@dataclass(frozen=True, eq=False)
class AudioChunk:
    """Chunk of audio, as it is sent.

    Attributes:
        audio: (samples,) float32, mono.
        index: 0, 1, 2 ... within the utterance.
        final: whether the utterance ends with it.
        sample_rate: samples per second.
        samples_per_token: samples that an utterance has for each of its tokens, once it is over.
    """

    audio: NDArray[np.float32]
    index: int
    final: bool
    sample_rate: int
    samples_per_token: int


class Session:
    """Session of one utterance, which decides what runs next for it and computes nothing.

    Args:
        voice: prompt and speaker, checked against the model.
        config: sizes and rates of the model.
        schedule: decides the length of chunks.
        flow_handle: number of this utterance in the flow engine.
        vocoder_handle: number of this utterance in the vocoder engine.
        clock: returns monotonic seconds.
    """

    def __init__(
        self,
        voice: Voice,
        config: ModelConfig,
        schedule: HopSchedule,
        flow_handle: int,
        vocoder_handle: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.flow_handle = flow_handle
        self.vocoder_handle = vocoder_handle
        self.prompt_tokens = len(voice.prompt_tokens)
        self.ended = False
        self.done = False
        self.chunks_sent = 0
        self._vocab_size, self._token_shape = config.flow.vocab_size, config.flow.token_shape
        self._token_rate = config.token_frame_rate
        self._sample_rate, self._samples_per_token = config.sample_rate, config.samples_per_token
        self._schedule = schedule
        self._clock = clock
        self._first_sent_at = 0.0
        self._tokens = TokenAccumulator(voice.prompt_tokens, config.flow)
        self._start = config.flow.prefix_tokens(self.prompt_tokens)

    @property
    def tokens_received(self) -> int:
        """Number of new tokens so far, without the prompt."""
        return self._tokens.count - self.prompt_tokens

    def check(self, tokens: ArrayLike) -> NDArray[np.int32]:
        """Converts tokens as `push` would take them; nothing is kept.

        Raises:
            InputError: another shape, not integers or out of the vocabulary.
        """
        array = token_array("tokens", tokens, self._token_shape)
        check_vocabulary("tokens", array, self._vocab_size)
        return array

    def push(self, tokens: ArrayLike) -> None:
        """Takes more tokens. What `check` refuses leaves the utterance as it was.

        Raises:
            InputError: another shape, not integers or out of the vocabulary.
            StreamClosedError: the utterance has ended.
        """
        if self.ended:
            raise StreamClosedError("stream: it has ended; tokens after the end are not taken")
        self._tokens.append(self.check(tokens))

    def end(self) -> None:
        """Says that no more tokens come.

        Raises:
            InputError: there were none at all.
            StreamClosedError: the utterance has ended before.
        """
        if self.ended:
            raise StreamClosedError("stream: it has ended before")
        if not self.tokens_received:
            raise InputError("tokens", "the utterance ended without any; at least 1 is needed")
        self.ended = True

    def next_chunk(self) -> FlowChunk | None:
        """Returns the chunk that can run now, or None. Asking changes nothing."""
        if self.done:
            return None
        stop = self._next_stop()
        if self._tokens.covers(stop):
            return self._tokens.window(self._start, stop, last=False)
        if self.ended:
            return self._tokens.window(self._start, self._tokens.count, last=True)
        return None

    def sent(self, chunk: FlowChunk, audio: NDArray[np.float32]) -> AudioChunk:
        """Notes that a chunk has been computed, and returns its audio as it is sent."""
        result = AudioChunk(audio, self.chunks_sent, chunk.last, self._sample_rate, self._samples_per_token)
        if not self.chunks_sent:
            self._first_sent_at = self._clock()
        self.chunks_sent += 1
        self._start = chunk.stop
        self.done = chunk.last
        return result

    def _next_stop(self) -> int:
        if not self.chunks_sent:
            return self._schedule.first_stop(self.prompt_tokens)
        played = (self._clock() - self._first_sent_at) * self._token_rate
        lead = self._start - self.prompt_tokens - played
        return self._start + self._schedule.hop(self.chunks_sent, lead)

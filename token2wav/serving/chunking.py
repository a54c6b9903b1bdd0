"""Chunking of a stream of tokens: it collects them, and decides once for every chunk where it ends and when it runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from token2wav.config import StreamConfig
from token2wav.errors import ConfigError, InputError
from token2wav.execution.stages import FlowChunk
from token2wav.model_config import ModelConfig
from token2wav.voice import check_vocabulary, token_array


class Playback:
    """Playback clock of a listener: it knows how much audio was sent, and when that will have been heard.

    Args:
        clock: returns monotonic seconds.
        buffer_seconds: audio that the player holds before it starts.

    Attributes:
        started: time at which the first audio was sent; None before.
        sound_since: time at which a listener who plays at once hears the first sound; None before that is sent.
        plays_until: time at which the listener runs out of audio; None before the first.
        seconds_sent: audio sent so far.
        seconds_trimmed: audio left out before the first that was sent.
        underruns: number of chunks that came after the audio before them had ended.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, buffer_seconds: float = 0.0) -> None:
        self._clock = clock
        self._buffer_seconds = buffer_seconds
        self.started: float | None = None
        self.plays_until: float | None = None
        self.sound_since: float | None = None
        self.seconds_sent = self.seconds_trimmed = 0.0
        self.underruns = 0

    def sent(self, seconds: float, sound_s: float | None = None, trimmed_s: float = 0.0) -> float:
        """Notes that audio is sent now; returns the seconds for which the listener heard nothing before it.

        Args:
            seconds: duration of the audio.
            sound_s: seconds into it at which the first sound is heard; None where that is not in it.
            trimmed_s: seconds of audio that were left out before all that was sent.
        """
        now, late = self._clock(), 0.0
        if self.plays_until is None:
            self.started, self.plays_until = now, now + self._buffer_seconds
        elif now > self.plays_until:
            late, self.plays_until = now - self.plays_until, now
            self.underruns += 1
        if sound_s is not None:
            self.sound_since = max(now, self.plays_until - self._buffer_seconds) + sound_s
        self.plays_until += seconds
        self.seconds_sent += seconds
        self.seconds_trimmed = trimmed_s
        return late

    @property
    def seconds_since_start(self) -> float:
        return 0.0 if self.started is None else self._clock() - self.started


@dataclass(frozen=True)
class HopSchedule:
    """Schedule of hops, which decides the length of chunks. It has no state: one schedule serves all streams.

    Attributes:
        policy: growth of hops, as `StreamConfig.hop`.
        first: tokens of the first hop.
        longest: most tokens of a hop.
        block: tokens of an attention block; every chunk but the last ends on a multiple of it.
        joined_prompt: whether multiples are counted from the prompt's end.
    """

    policy: Literal["growing", "fixed", "lead"]
    first: int
    longest: int
    block: int
    joined_prompt: bool = False

    def __post_init__(self) -> None:
        if self.longest % self.block:
            raise ConfigError(
                f"stream.max_hop_tokens: {self.longest} is not a multiple of the attention block, {self.block} tokens"
            )
        if self.longest < self.first:
            raise ConfigError(f"stream.max_hop_tokens: {self.longest} is below the first hop, {self.first} tokens")

    @classmethod
    def of(cls, stream: StreamConfig, config: ModelConfig) -> HopSchedule:
        return cls(stream.hop, *config.hops(stream), config.block_tokens, config.joined_prompt)

    def first_stop(self, prompt_tokens: int) -> int:
        """Returns the end of the first chunk, from the first prompt token on: a hop past the prompt's last block."""
        if self.joined_prompt:
            return prompt_tokens + self.first
        return -(-prompt_tokens // self.block) * self.block + self.first

    def hop(self, index: int, lead_tokens: float) -> int:
        """Returns the tokens of a chunk after the first.

        Args:
            index: number of the chunk, >= 1.
            lead_tokens: tokens by which the audio sent so far is ahead of playback.
        """
        if self.policy == "growing":
            return min(self.longest, self.first << index)
        if self.policy == "fixed":
            return self.first
        whole_blocks = int(lead_tokens) // self.block * self.block
        return max(self.first, min(self.longest, whole_blocks))


class Chunker:
    """Chunker of one stream: it collects tokens, the prompt's first, and decides which of them run next.

    Positions count from the first prompt token. A decision is made when tokens come or the chunk before was computed,
    and then stands. Tokens before the context of the next chunk are forgotten when room is needed.

    Args:
        prompt_tokens: (P,) int32, or (P, codebooks), as all tokens.
        config: shapes and look-ahead of the model.
        schedule: decides the length of chunks.
        playback: clock of the listener; without one, nothing is heard while the stream lasts.
        token_rate: tokens that a second of audio has.

    Attributes:
        next_chunk: chunk that can run now; None while its tokens are missing, and after the last.
        chunks: number of chunks that were computed.
        received: position after the last token.
        ended: whether no more tokens come.
        done: whether the last chunk was computed.
    """

    def __init__(
        self,
        prompt_tokens: NDArray[np.int32],
        config: ModelConfig,
        schedule: HopSchedule,
        playback: Playback | None = None,
        token_rate: float = 25.0,
    ) -> None:
        self.prompt_tokens = len(prompt_tokens)
        self.next_chunk: FlowChunk | None = None
        self.chunks = 0
        self.received = 0
        self.ended = False
        self.done = False
        self._config = config
        self._schedule = schedule
        self._playback = playback or Playback()
        self._token_rate = token_rate
        self._start = config.prefix_tokens(self.prompt_tokens)
        self._tokens = np.empty((2 * len(prompt_tokens) + 4 * config.block_tokens, *config.token_shape), np.int32)
        self._first = 0  # position of `_tokens[0]`
        self._append(prompt_tokens)

    @property
    def new_tokens(self) -> int:
        """Number of tokens so far, without the prompt's."""
        return self.received - self.prompt_tokens

    @property
    def next_tokens(self) -> int:
        """Number of tokens of the next chunk, its context apart."""
        return self.next_chunk.stop - self.next_chunk.start if self.next_chunk else 0

    def push(self, tokens: NDArray[np.int32], *, end: bool = False) -> None:
        """Takes more tokens, which have been checked; `end` says that no others follow.

        Raises:
            InputError: the stream would end without any.
        """
        if end and not self.new_tokens + len(tokens):
            raise InputError("tokens", "the utterance ended without any; at least 1 is needed")
        self._append(tokens)
        self.ended = end
        if self.next_chunk is None:
            self.next_chunk = self._decided()

    def computed(self) -> None:
        """Notes that the next chunk has been computed, and decides about the one after it."""
        assert self.next_chunk is not None
        self.chunks += 1
        self._start, self.done = self.next_chunk.stop, self.next_chunk.last
        self.next_chunk = None if self.done else self._decided()

    def needs(self, received: int) -> bool:
        """Says whether the next chunk needs more tokens than those before position `received`."""
        chunk = self.next_chunk
        return chunk is None or chunk.last or received < chunk.stop + self._config.lookahead_tokens

    def _decided(self) -> FlowChunk | None:
        stop = self._next_stop()
        if self.received >= stop + self._config.lookahead_tokens:
            return self._window(stop, last=False)
        return self._window(self.received, last=True) if self.ended else None

    def _next_stop(self) -> int:
        if not self.chunks:
            return self._schedule.first_stop(self.prompt_tokens)
        gone = self._playback.seconds_since_start + self._playback.seconds_trimmed
        lead = self._start - self.prompt_tokens - gone * self._token_rate
        return self._start + self._schedule.hop(self.chunks, lead)

    def _window(self, stop: int, *, last: bool) -> FlowChunk:
        """Cuts out the tokens up to `stop` with their context on both sides."""
        left = min(self._config.lookbehind_tokens, self._start)
        right = 0 if last else self._config.lookahead_tokens
        window = self._tokens[self._start - left - self._first : stop + right - self._first].copy()
        return FlowChunk(window, left, self._start, stop, last)

    def _append(self, tokens: NDArray[np.int32]) -> None:
        count = self.received + len(tokens)
        if count - self._first > len(self._tokens):
            self._make_room(count)
        self._tokens[self.received - self._first : count - self._first] = tokens
        self.received = count

    def _make_room(self, count: int) -> None:
        """Forgets what is not needed; grows only if the rest would fill more than half."""
        needed = max(0, self._start - self._config.lookbehind_tokens)
        kept = self._tokens[needed - self._first : self.received - self._first]
        self._tokens = np.empty((max(len(self._tokens), 2 * (count - needed)), *kept.shape[1:]), np.int32)
        self._tokens[: len(kept)] = kept
        self._first = needed


def checked_tokens(tokens: ArrayLike, config: ModelConfig) -> NDArray[np.int32]:
    """Converts tokens of a model to an array: the one check that they pass on their way.

    Args:
        tokens: (n,) integers, or (n, codebooks).
        config: of the model.

    Raises:
        InputError: another shape, not integers or out of the vocabulary.
    """
    array = token_array("tokens", tokens, config.token_shape)
    check_vocabulary("tokens", array, config.vocab_size)
    return array

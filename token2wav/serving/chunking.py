"""Chunking of a stream: collects its tokens, and decides where each chunk ends and when it runs."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from token2wav.config.model_config import ModelConfig
from token2wav.config.token_format import NO_CODE, NO_TOKEN
from token2wav.errors import InputError
from token2wav.serving.clocks import Arrivals, PipelineLoad, Playback
from token2wav.serving.hops import ChunkTime, Estimates, HopSchedule, StreamFacts, next_stop
from token2wav.stages.stage import TokenChunk


class Chunker:
    """Chunker of one stream. Positions are tokens counted from the first prompt token.

    Args:
        prompt_tokens: (P,) int32, or (P, codebooks).
        speed: as in `UtteranceOptions`.

    Attributes:
        next_chunk: chunk that can run now; None while its tokens are missing, and after the last
            chunk.
        spoken: position after the last token with computed frames, in a chunk of any kind.
        done: whether the last chunk was computed, or `stop` was called.
    """

    def __init__(
        self,
        prompt_tokens: NDArray[np.int32],
        config: ModelConfig,
        schedule: HopSchedule,
        playback: Playback | None = None,
        load: PipelineLoad | None = None,
        speed: float = 1.0,
    ) -> None:
        self.prompt_tokens = self.spoken = len(prompt_tokens)
        self.next_chunk: TokenChunk | None = None
        self.chunks = 0
        self.ended = False
        self.done = False
        self._config = config
        self._schedule = schedule
        self._token_seconds = 1 / (config.token_frame_rate * speed)  # of audio
        self._playback = playback or Playback()
        self._hops = 0  # computed chunks that were not provisional
        self._heard = False
        self._was_provisional = False  # whether the latest chunk was provisional
        self._decided_at = 0.0
        self._waits_until = 0.0  # until then the stream waits, unless tokens arrive
        # the latest chunk of each kind, by whether it was provisional
        self._latest = {False: ChunkTime(), True: ChunkTime()}
        self._grid = config.grid(self.prompt_tokens)
        self._start = self._grid.prefix
        self._tokens = TokenBuffer(prompt_tokens, config)
        self._arrivals = Arrivals()
        self._load = load or PipelineLoad()

    @property
    def received(self) -> int:
        return self._tokens.received

    @property
    def new_tokens(self) -> int:
        return self.received - self.prompt_tokens

    @property
    def next_tokens(self) -> int:
        """Tokens of the next chunk, without its look-ahead; 0 if no chunk can run."""
        return self.next_chunk.stop - self.next_chunk.start if self.next_chunk else 0

    @property
    def next_provisional(self) -> bool:
        return self.next_chunk is not None and self.next_chunk.provisional

    @property
    def next_divisible(self) -> bool:
        """Whether the next chunk may be shortened: it lies between the first and the last chunk."""
        return self.next_chunk is not None and self.chunks > 0 and not self.next_chunk.last

    def push(self, tokens: NDArray[Any], *, end: bool = False) -> None:
        """Adds tokens (n, *token_shape), checked by `TokenFormat.checked`, to the stream. Raises
        InputError as `check`, and if the utterance would end without any token.
        """
        self.check(tokens)
        if end and not self.new_tokens + len(tokens):
            raise InputError(self._config.tokens.field, "0 sent; an utterance needs at least 1")
        self._tokens.add(tokens, self._start)
        if len(tokens):
            self._arrivals.add(len(tokens), self._playback.now())
        self.ended = end
        if self.next_chunk is None:
            self.decide()

    def check(self, tokens: NDArray[Any]) -> None:
        """Raises InputError if tokens have another number of codebooks than the first tokens, or
        there are more than the model allows.
        """
        most = self._config.most_tokens
        if most is not None and self.new_tokens + len(tokens) > most:
            raise InputError(
                self._config.tokens.field,
                f"the utterance would exceed {most}, whose attention this model keeps; end it "
                "earlier, or set stream.left_blocks, which bounds the past",
            )
        self._tokens.check_codebooks(tokens)

    def finish_chunk(self, *, heard: bool = True) -> None:
        """Records that the next chunk was computed. `heard` says whether its audio was sent."""
        chunk, self.next_chunk = self.next_chunk, None
        assert chunk is not None
        seconds, tokens = self._playback.now() - self._decided_at, chunk.stop - chunk.start
        self._latest[chunk.provisional] = ChunkTime(seconds, max(1, tokens))
        one_block = not chunk.provisional and tokens == self._schedule.block
        self._load.delayed(seconds, one_block=one_block)
        self.chunks += 1
        self._heard = self._heard or heard
        self.spoken, self.done = max(self.spoken, chunk.stop), chunk.last
        if not chunk.provisional:
            self._start = chunk.stop
            self._hops += 1
        if not (chunk.provisional or self._was_provisional) or chunk.last:
            self._load.remove(self)
        self._was_provisional = chunk.provisional
        if not self.done:
            self.decide()

    def stop(self) -> None:
        """Ends the stream after the latest chunk. The tokens after it are dropped."""
        self.next_chunk, self.ended, self.done = None, True, True

    def needs(self, received: int) -> bool:
        """Returns whether the next chunk needs more than the tokens before position `received`. The
        last chunk needs the end of the utterance.
        """
        chunk = self.next_chunk
        if chunk is None or chunk.last:
            return True
        provisional, whole = self._schedule.provisional_lookahead, self._config.lookahead_tokens
        return received < chunk.stop + (provisional if chunk.provisional else whole)

    def decide(self) -> None:
        """Decides whether there is a next chunk, and where it ends. If there is one already, only a
        provisional chunk can become longer, or any chunk of a growing schedule. No worker may have
        begun to compute it.
        """
        chunk = self.next_chunk
        final = chunk is not None and not chunk.provisional and not self._schedule.growing
        if self.done or final:
            return
        now = self._playback.now()
        stop = next_stop(self._facts(now))
        if isinstance(stop, float):
            self._waits_until = now + stop
            return
        self._waits_until = now
        if stop.needs_admission and not self._load.try_admit_provisional(self):
            return
        if chunk is None:
            self._decided_at = now
        self.next_chunk = self._cut(stop.position)

    def recheck(self) -> bool:
        """Decides again, if the stream waits for tokens and time alone may have changed this.
        Returns whether there is a next chunk.
        """
        if self._playback.now() >= self._waits_until:
            self.decide()
        return self.next_chunk is not None

    def shorten(self, tokens: int) -> None:
        """Shortens the next chunk, neither a provisional nor the last one, to whole blocks."""
        chunk = self.next_chunk
        assert chunk is not None
        if tokens < self.next_tokens:
            self.next_chunk = self._cut(chunk.start + tokens)

    def _facts(self, now: float) -> StreamFacts:
        whole = self._latest[False]
        if not whole.seconds:  # until a whole chunk of this stream is known, that of any stream
            whole = ChunkTime(self._load.block_seconds, self._schedule.block)
        estimates = Estimates(
            self._arrivals.token_seconds(now),
            self._arrivals.seconds_until_next(now),
            whole,
            self._latest[True],
            self._load.delay_seconds,
        )
        return StreamFacts(
            self._schedule,
            self._grid,
            self._config.lookahead_tokens,
            self._config.optional_lookahead_tokens,
            self._token_seconds,
            start=self._start,
            spoken=self.spoken,
            received=self.received,
            ended=self.ended,
            hops=self._hops,
            heard=self._heard,
            lead=self._playback.lead_seconds(now),
            estimates=estimates,
        )

    def _cut(self, stop: int) -> TokenChunk:
        last = self.ended and stop == self.received
        right = (
            0 if last else self._config.lookahead_tokens + self._config.optional_lookahead_tokens
        )
        end = min(stop + right, self.received)
        tokens = self._tokens.copy(self._start, end)
        skip = min(max(0, self.spoken - self._start), stop - self._start)
        missing = 0 if last else stop + self._config.lookahead_tokens - end
        provisional = missing > 0 or (not last and stop != self._grid.complete_stop(stop))
        if missing > 0:
            absent = np.full((missing, *tokens.shape[1:]), NO_TOKEN, tokens.dtype)
            tokens = np.concatenate((tokens, absent))
        return TokenChunk(tokens, self._start, stop, last, skip, provisional)


class TokenBuffer:
    """Buffer of a stream's tokens, with the prompt tokens first. Positions are as in `Chunker`.

    Args:
        prompt_tokens: (P,) int32, or (P, codebooks).
    """

    def __init__(self, prompt_tokens: NDArray[np.int32], config: ModelConfig) -> None:
        self.received = 0  # position after the last token that was added
        self._fewer_codebooks = config.tokens.fewer_codebooks
        self._codebooks = 0  # codebooks of the first tokens; 0 before them
        self._first = 0  # position of `_tokens[0]`
        room = 2 * len(prompt_tokens) + 4 * config.block_tokens
        self._tokens = config.tokens.zeros(room)
        self._append(prompt_tokens, needed=0)

    def add(self, tokens: NDArray[Any], needed: int) -> None:
        """Adds tokens (n, *token_shape), checked by `TokenFormat.checked`. If the buffer is full,
        the tokens before the position `needed` are removed, which no later chunk needs.
        """
        if self._fewer_codebooks and len(tokens):
            self._codebooks = _codebooks(tokens)
        self._append(tokens, needed)

    def check_codebooks(self, tokens: NDArray[Any]) -> None:
        """Raises InputError if tokens have another number of codebooks than the first tokens."""
        if self._codebooks and len(tokens) and _codebooks(tokens) != self._codebooks:
            raise InputError(
                "tokens",
                f"{_codebooks(tokens)} codebooks, but the stream began with {self._codebooks}",
            )

    def copy(self, start: int, stop: int) -> NDArray[Any]:
        return self._tokens[start - self._first : stop - self._first].copy()

    def _append(self, tokens: NDArray[Any], needed: int) -> None:
        count = self.received + len(tokens)
        if count - self._first > len(self._tokens):
            self._make_room(count, needed)
        self._tokens[self.received - self._first : count - self._first] = tokens
        self.received = count

    def _make_room(self, count: int, needed: int) -> None:
        # The buffer becomes larger only if the needed tokens would fill more than half of it.
        moved = self._tokens[needed - self._first : self.received - self._first]
        room = max(len(self._tokens), 2 * (count - needed))
        self._tokens = np.empty((room, *moved.shape[1:]), moved.dtype)
        self._tokens[: len(moved)] = moved
        self._first = needed


def _codebooks(tokens: NDArray[Any]) -> int:
    """Returns the number of codebooks of the first token, which is that of all tokens."""
    return int((tokens[0] != NO_CODE).sum())

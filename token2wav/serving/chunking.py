"""Chunking of a stream: collects its tokens, and decides where each chunk ends and when it runs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from token2wav.config import StreamConfig
from token2wav.errors import ConfigError, InputError
from token2wav.execution.stages import TokenChunk
from token2wav.model_config import ModelConfig
from token2wav.networks.lookahead import NO_TOKEN
from token2wav.serving.clocks import Arrivals, Load, Playback
from token2wav.serving.provisional import Pace, next_end
from token2wav.voice import check_vocabulary, latent_array, token_array

# Margin for the delay of the connection to the client, and for the interval of 0.05 s at which the
# workers check waiting streams.
_MARGIN_SECONDS = 0.06

NO_CODE = -1  # code of a codebook that a stream does not send


@dataclass(frozen=True)
class HopSchedule:
    """Schedule of hops, which all streams share. A hop is the number of new tokens of a chunk.

    The schedule gives the hop of each chunk for the case that tokens arrive in time. For example,
    with `first=25` and `longest=100` the hops are 25, 50, 100, 100 ...

    Attributes:
        first: tokens of the first hop.
        longest: largest number of tokens of a hop.
        block: tokens of an attention block. Every chunk ends where a block of the stream ends,
            except the last chunk and provisional chunks.
        first_tokens: number of new tokens, look-ahead not counted, after which a stream may send
            audio of an incomplete block; 0 to wait for whole blocks. So many tokens have audio that
            the last stage does not hold back.
        early_lookahead: number of tokens of look-ahead that a provisional chunk needs; at least 1.
            All other chunks need the look-ahead of the model.
        adaptive: whether a hop may be shortened when the listener runs out of audio. False if the
            audio of the model depends on where chunks end.
        least_tokens: least number of new tokens of a provisional chunk after the first chunk, if
            no plan gives its end (`next_end`).
        growing: whether a chunk that waits for a worker takes tokens that arrive meanwhile, up to
            its hop.
    """

    first: int
    longest: int
    block: int
    first_tokens: int = 0
    early_lookahead: int = 1
    adaptive: bool = True
    least_tokens: int = 0
    growing: bool = False

    def __post_init__(self) -> None:
        if self.longest % self.block:
            raise ConfigError(
                f"stream.max_hop_tokens: {self.longest} is not a multiple of the attention block, "
                f"{self.block} tokens"
            )
        if self.longest < self.first:
            raise ConfigError(
                f"stream.max_hop_tokens: {self.longest} is below the first hop, {self.first} tokens"
            )

    @classmethod
    def of(cls, stream: StreamConfig, config: ModelConfig, held_samples: int = 0) -> HopSchedule:
        """Makes the schedule of a model under settings of streams.

        Args:
            stream: settings.
            config: configuration of the model.
            held_samples: number of samples that the last stage holds back (`Stage.held_samples`).

        Raises:
            ConfigError: the settings do not fit the model.
        """
        adaptive = not config.fixed_hops and not stream.reference
        early = adaptive and config.speaks_early and stream.first_tokens > 0
        return cls(
            *config.hops(stream),
            config.block_tokens,
            _first_tokens(stream.first_tokens, held_samples / config.samples_per_token)
            if early
            else 0,
            max(1, min(stream.early_lookahead_tokens, config.lookahead_tokens)),
            adaptive,
            least_tokens=stream.first_tokens // 2 if early else 0,
            growing=adaptive and config.equal_chunks,
        )

    def hop(self, index: int) -> int:
        """Returns the hop of a chunk after the first chunk.

        Args:
            index: number of chunks before it, at least 1; provisional chunks do not count.
        """
        return min(self.longest, self.first << index)


class Chunker:
    """Chunker of one stream: collects the tokens of prompt and utterance, and cuts the next chunk.

    Positions are tokens counted from the first prompt token. The chunker decides about the next
    chunk when tokens arrive, when a chunk was computed, and when the listener's audio runs short. A
    decision about a chunk of whole blocks is final, unless the schedule lets chunks grow. A
    decision about a provisional chunk may be revised until the chunk runs.

    Hops grow from chunk to chunk. If the listener's audio would end before the tokens of a hop
    arrive, the hop is cut to the blocks that are complete. If no block will be complete in time,
    the next chunk may be provisional: it ends inside a block, and the block is computed again when
    it is complete. The first chunk may be provisional too, so that the first audio comes early.
    `Load` may refuse a provisional chunk.

    When the token buffer is full, the tokens of computed chunks are removed from it.

    Args:
        prompt_tokens: (P,) int32, or (P, codebooks).
        config: rates and look-ahead of the model.
        schedule: schedule of hops.
        playback: playback clock of the listener; None creates one.
        load: load of the workers that compute the chunks of all streams. It limits the provisional
            chunks. None creates one.
        decoder_noise: whether the decoder adds its noise.

    Attributes:
        prompt_tokens: number of prompt tokens.
        next_chunk: chunk that can run now; None while its tokens are missing, and after the last
            chunk.
        chunks: number of chunks that were computed.
        received: position after the last token that has arrived.
        spoken: position after the last token whose frames were computed, in a provisional chunk or
            in another chunk.
        ended: whether no more tokens will arrive.
        done: whether the last chunk was computed.
    """

    def __init__(
        self,
        prompt_tokens: NDArray[np.int32],
        config: ModelConfig,
        schedule: HopSchedule,
        playback: Playback | None = None,
        load: Load | None = None,
        *,
        decoder_noise: bool = True,
    ) -> None:
        self.prompt_tokens = self.spoken = len(prompt_tokens)
        self.next_chunk: TokenChunk | None = None
        self.chunks = 0
        self.received = 0
        self.ended = False
        self.done = False
        self._config = config
        self._schedule = schedule
        self._playback = playback or Playback()
        self._arrivals = Arrivals()
        self._codebooks = 0  # number of codebooks of the first tokens; 0 before them
        self._hops = 0  # number of computed chunks that were not provisional
        self._heard = False  # whether audio was sent
        self._was_provisional = False  # whether the latest chunk was provisional
        self._decided_at = 0.0
        # Time from the decision about the latest chunk to its end, and tokens of the chunk; for
        # whole chunks and for provisional ones, which have fewer ODE steps.
        self._latest = {False: (0.0, 1), True: (0.0, 1)}
        self._load = load or Load()
        self._decoder_noise = decoder_noise
        self._grid = config.grid(self.prompt_tokens)
        self._start = self._grid.prefix
        self._tokens = np.empty(
            (2 * len(prompt_tokens) + 4 * config.block_tokens, *config.token_shape),
            config.token_dtype,
        )
        self._first = 0  # position of `_tokens[0]`
        self._append(prompt_tokens)

    @property
    def new_tokens(self) -> int:
        """Number of tokens of the utterance so far, without the prompt."""
        return self.received - self.prompt_tokens

    @property
    def next_tokens(self) -> int:
        """Number of tokens of the next chunk, without its look-ahead; 0 if no chunk can run."""
        return self.next_chunk.stop - self.next_chunk.start if self.next_chunk else 0

    def push(self, tokens: NDArray[Any], *, end: bool = False) -> None:
        """Adds tokens to the stream.

        Args:
            tokens: (n, *token_shape), checked by `checked_tokens`.
            end: whether the utterance ends with these tokens.

        Raises:
            InputError: the utterance would end without any token, or the tokens have another number
                of codebooks than the first tokens.
        """
        if end and not self.new_tokens + len(tokens):
            raise InputError(self._config.token_field, "0 sent; an utterance needs at least 1")
        if self._config.fewer_codebooks and len(tokens):
            self.check_codebooks(tokens)
            self._codebooks = _codebooks(tokens)
        self._append(tokens)
        if len(tokens):
            self._arrivals.add(len(tokens), self._playback.now())
        self.ended = end
        if self.next_chunk is None:
            self.decide()

    def check_codebooks(self, tokens: NDArray[Any]) -> None:
        """Raises InputError if tokens have another number of codebooks than the first tokens."""
        if self._codebooks and len(tokens) and _codebooks(tokens) != self._codebooks:
            raise InputError(
                "tokens",
                f"{_codebooks(tokens)} codebooks, but the stream began with {self._codebooks}",
            )

    def computed(self, *, heard: bool = True) -> None:
        """Records that the next chunk was computed, and decides about the chunk after it.

        Args:
            heard: whether audio of the chunk was sent.
        """
        chunk, self.next_chunk = self.next_chunk, None
        assert chunk is not None
        seconds, tokens = self._playback.now() - self._decided_at, chunk.stop - chunk.start
        self._latest[chunk.provisional] = seconds, max(1, tokens)
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

    def needs(self, received: int) -> bool:
        """Returns whether the next chunk needs more than the tokens before position `received`.

        This is also true without a next chunk, and for the last chunk, which needs the end of the
        utterance.
        """
        chunk = self.next_chunk
        if chunk is None or chunk.last:
            return True
        return received < chunk.stop + self._lookahead(provisional=chunk.provisional)

    def decide(self) -> None:
        """Decides about the next chunk, if there is none yet, or if it may be revised.

        A longer chunk may replace a provisional chunk, and every chunk of a growing schedule. The
        caller makes sure that no worker computes the chunk yet.
        """
        chunk = self.next_chunk
        final = chunk is not None and not chunk.provisional and not self._schedule.growing
        if self.done or final or (stop := self._next_stop()) is None:
            return
        if chunk is None:
            self._decided_at = self._playback.now()
        self.next_chunk = self._cut(stop)

    def shorten(self, tokens: int) -> None:
        """Shortens the next chunk, so that it runs together with shorter chunks of other streams.

        Args:
            tokens: number of whole blocks in tokens, at most `next_tokens`. The chunk is neither
                provisional nor the last one.
        """
        chunk = self.next_chunk
        assert chunk is not None
        if tokens < self.next_tokens:
            self.next_chunk = self._cut(chunk.start + tokens)

    def _next_stop(self) -> int | None:
        """Returns the position at which the next chunk ends; None to wait for tokens."""
        schedule, available = self._schedule, self.received - self._config.lookahead_tokens
        hop_stop = (
            self._start + schedule.hop(self._hops)
            if self._hops
            else self._grid.first_boundary + schedule.first
        )
        if available >= hop_stop:
            # A last chunk of few tokens would leave the chunk before it with early audio.
            few = self.ended and self.received - hop_stop < self._config.ahead_tokens
            return self.received if few else hop_stop
        if self.ended:
            return self.received
        blocks = self._grid.complete_stop(available)
        # At least one token is left for the last chunk of the utterance.
        partial_stop = self.received - schedule.early_lookahead
        if not self._heard:
            first = self.spoken + schedule.first_tokens
            if (
                not schedule.first_tokens
                or max(blocks, partial_stop) < first
                or not self._load.try_admit_early(self)
            ):
                return None
            if blocks >= first:
                return blocks
            # The chunk enters another block only if it would be too short without it.
            return min(partial_stop, max(first, blocks + schedule.block - 1))
        if not schedule.adaptive:
            return None
        lead = self._playback.lead_seconds
        if blocks > self.spoken:
            spare = lead - self._seconds_to_compute(hop_stop - self._start) - _MARGIN_SECONDS
            return blocks if spare < self._seconds_until(hop_stop) else None
        # A stream whose listener has run out of audio waits for a whole block. Its tokens arrive
        # too slowly for playback, so every provisional chunk would be followed by another gap.
        if not schedule.first_tokens or lead <= 0:
            return None
        complete = self._grid.complete_stop(self.spoken) + schedule.block
        stop = min(partial_stop, complete - 1)
        planned = self._planned_stop(complete, partial_stop, lead)
        if self._start < blocks and planned > self.spoken:
            # Provisional chunks have sent the audio of the block. The next ones would compute it
            # again, because its state is not stored yet.
            return blocks
        if self.spoken < planned <= stop:
            stop = planned
        else:
            spare = lead - self._seconds_to_compute(1, provisional=True) - _MARGIN_SECONDS
            soon = min(
                self._seconds_until(complete),
                self._arrivals.seconds_until_next(self._playback.now()),
            )
            if spare >= soon or stop - self.spoken < schedule.least_tokens:
                return None
        return stop if self._load.try_admit_early(self) else None

    def _planned_stop(self, complete: int, partial_stop: int, lead: float) -> int:
        """Returns the position at which the cheapest next provisional chunk ends; at most the
        position `spoken` for none.

        Args:
            complete: end of the block that is spoken next.
            partial_stop: position up to which a provisional chunk could end now.
            lead: seconds of audio that the listener has left.
        """
        token_seconds = self._arrivals.seconds_for(1, self._playback.now())
        if not token_seconds:  # the pace is not known yet
            return self.spoken
        compute = self._seconds_to_compute(1, provisional=True) + _MARGIN_SECONDS
        pace = Pace(token_seconds, 1 / self._config.token_frame_rate, compute)
        whole = self._seconds_until(complete) + _MARGIN_SECONDS
        whole += self._seconds_to_compute(complete - self._start)
        return next_end(pace, self.spoken, partial_stop, lead, whole)

    def _lookahead(self, *, provisional: bool) -> int:
        """Returns the number of look-ahead tokens that a chunk needs."""
        return self._schedule.early_lookahead if provisional else self._config.lookahead_tokens

    def _seconds_to_compute(self, tokens: int, *, provisional: bool = False) -> float:
        """Estimates the seconds from the decision about a chunk of `tokens` tokens to its end.

        The estimate is the time of the latest chunk of the same kind, and is larger for a longer
        chunk in proportion to the tokens. Before the first whole chunk of the stream, it is the
        mean time in which a block of any stream is computed.

        Args:
            tokens: tokens of the chunk.
            provisional: whether the chunk is provisional, so that it may have fewer ODE steps.
        """
        seconds, of = self._latest[provisional]
        if not (seconds or provisional):
            seconds, of = self._load.block_seconds, self._schedule.block
        return max(self._load.delay_seconds, seconds * max(1.0, tokens / of))

    def _seconds_until(self, stop: int) -> float:
        """Returns the seconds until a chunk up to `stop` can run, at the mean pace of tokens."""
        missing = stop + self._config.lookahead_tokens - self.received
        return self._arrivals.seconds_for(missing, self._playback.now())

    def _cut(self, stop: int) -> TokenChunk:
        """Cuts the chunk that ends at `stop`, with its look-ahead, and with tokens for early audio
        that have arrived.
        """
        last = self.ended and stop == self.received
        right = 0 if last else self._config.lookahead_tokens + self._config.ahead_tokens
        end = min(stop + right, self.received)
        tokens = self._tokens[self._start - self._first : end - self._first].copy()
        skip = min(max(0, self.spoken - self._start), stop - self._start)
        missing = 0 if last else stop + self._config.lookahead_tokens - end
        provisional = missing > 0 or (not last and stop != self._grid.complete_stop(stop))
        if missing > 0:
            absent = np.full((missing, *tokens.shape[1:]), NO_TOKEN, tokens.dtype)
            tokens = np.concatenate((tokens, absent))
        return TokenChunk(tokens, self._start, stop, last, skip, provisional, self._decoder_noise)

    def _append(self, tokens: NDArray[Any]) -> None:
        count = self.received + len(tokens)
        if count - self._first > len(self._tokens):
            self._make_room(count)
        self._tokens[self.received - self._first : count - self._first] = tokens
        self.received = count

    def _make_room(self, count: int) -> None:
        """Moves the tokens that later chunks need to a buffer with room up to position `count`.

        The new buffer is larger only if these tokens would fill more than half of the old size.
        """
        needed = self._start
        kept = self._tokens[needed - self._first : self.received - self._first]
        self._tokens = np.empty(
            (max(len(self._tokens), 2 * (count - needed)), *kept.shape[1:]), kept.dtype
        )
        self._tokens[: len(kept)] = kept
        self._first = needed


def _codebooks(tokens: NDArray[Any]) -> int:
    """Returns the number of codebooks of the first token, which is that of all tokens."""
    return int((tokens[0] != NO_CODE).sum())


def _first_tokens(wanted: int, held: float) -> int:
    """Returns the number of tokens of the first chunk of a stream.

    If the audio of less than half of the wanted tokens could be sent, the chunk gets more tokens. A
    shorter chunk would be computed for nothing, or it would be followed by a gap.

    Args:
        wanted: `StreamConfig.first_tokens`.
        held: tokens whose audio the last stage holds back.
    """
    return max(wanted, math.ceil(held + wanted / 2))


def checked_tokens(tokens: ArrayLike, config: ModelConfig) -> NDArray[Any]:
    """Converts tokens to the type of the model, and checks them. No later step checks them again.

    Args:
        tokens: (n,) integers, or (n, codebooks); or (n, size) numbers if the model takes latents.
        config: configuration of the model.

    Returns:
        (n, *token_shape) int32, with `NO_CODE` in the codebooks that a stream does not send; or
        float32 latents.

    Raises:
        InputError: the tokens have another shape, are not integers, or are outside the vocabulary;
            or the latents have another shape, or contain NaN or infinity.
    """
    if config.takes_latents:
        return latent_array(tokens, *config.token_shape)
    if not config.fewer_codebooks:
        array = token_array("tokens", tokens, config.token_shape)
        check_vocabulary("tokens", array, config.vocab_size)
        return array
    [codebooks] = config.token_shape
    array = token_array("tokens", tokens, None)
    if not array.size and array.ndim == 1:
        array = array.reshape(0, codebooks)
    if array.ndim != 2 or not 1 <= array.shape[1] <= codebooks:
        raise InputError(
            "tokens",
            f"shape {array.shape}, expected (tokens, codebooks) with 1 to {codebooks} codebooks",
        )
    check_vocabulary("tokens", array, config.vocab_size)
    if array.shape[1] == codebooks:
        return array
    absent = codebooks - array.shape[1]
    return np.pad(array, ((0, 0), (0, absent)), constant_values=NO_CODE)

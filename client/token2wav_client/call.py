"""Call of an utterance: builds the requests, and checks and times the responses of all attempts.

This module has no connection, no clock and no lock. Its caller passes the present time as an
argument.
"""

from __future__ import annotations

import math
import secrets
from bisect import bisect_left
from dataclasses import replace
from fractions import Fraction
from typing import Any
from uuid import uuid4

import numpy as np
import numpy.typing as npt

from token2wav_client.audio import AudioChunk, EndReason, channels_of
from token2wav_client.errors import InputError, ProtocolError, TokenError, UtteranceClosedError
from token2wav_client.tokens import TokenArray, as_tokens
from token2wav_client.voice import ClientVoice
from token2wav_client.wire import Opening, build_request, read_response


class Call:
    """Call of one utterance: builds the requests, checks and times the chunks, supports retries.

    `add` takes tokens, and `next_request` returns the next request. Tokens that are added while
    earlier tokens wait to be sent share one request with them. So a program that adds single tokens
    faster than the connection takes them does not send one request for each token.

    A further attempt sends the same tokens under a new id, because the server may still have the
    utterance of the earlier attempt. The server then computes the audio again from the start. The
    call drops the part that was already delivered. Times are seconds of the caller's monotonic
    clock.

    Args:
        opening: voice and options, which only the first request carries.
        repeatable: whether to store the tokens for further attempts.

    Attributes:
        id: sequence id of the utterance on the server; every attempt has a new one.
        tokens: tokens that were added.
        ended: True after the last tokens were added.
        complete: True after the final chunk arrived with all samples.
        end_reason: limit of the server that ended the utterance before its last tokens; None if
            none did. No more tokens are sent then.
        owed_since: time since which the server owes a response and has sent none; None if the
            server owes no response or no attempt runs. The server lets a stream with audio to spare
            wait, so this time is not before the end of the delivered audio.
    """

    def __init__(self, model: str, opening: Opening, *, repeatable: bool) -> None:
        self._model = model
        self._opening = opening
        # The exact number of the decimals of the speed: 11/10 for 1.1.
        self._speed = Fraction(str(float(opening.speed)))
        self._repeatable = repeatable
        # Shape of one token, from the prompt of the voice, or else from the first tokens. A request
        # without tokens needs it too, for the shape of its empty array.
        voice = opening.voice
        self._token_shape = voice.prompt_tokens.shape[1:] if isinstance(voice, ClientVoice) else ()
        self._token_dtype: np.dtype[Any] = np.dtype(np.int32)
        # Tokens of every `add` for further attempts, and whether they end the utterance.
        self._batches: list[tuple[TokenArray, bool]] = []
        # Time at which the first tokens were sent, in the first attempt.
        self._started_at: float | None = None
        # Samples per second, samples per token, and channels: the same in all chunks.
        self._rates: tuple[int, int, int] | None = None
        self._delivered_samples = self._delivered_chunks = 0
        self._delivered_at: float | None = None
        # Time at which a listener who plays the delivered audio at once runs out of it.
        self._plays_until = -math.inf
        self._begin()

    def _begin(self) -> None:
        """Initializes the state of one attempt."""
        self.id = str(uuid4())
        # The server accepts further requests of this attempt only with this key. So no other client
        # can continue the utterance.
        self._stream_key = secrets.token_urlsafe(16)
        self.tokens = 0
        self.ended = self.complete = False
        self.end_reason: EndReason | None = None
        self.owed_since: float | None = None
        self._interrupted = False
        self._samples = self._trimmed = self._chunks = 0
        # Chunks that arrived before an earlier one, by index, with the request that they answer.
        self._early: dict[int, tuple[AudioChunk, str]] = {}
        # For every call of `add`: its time, and the number of tokens up to and including it.
        self._added_at: list[float] = []
        self._tokens_after: list[int] = []
        self._unsent: list[TokenArray] = []
        self._first_of_request: list[int] = []  # number of the first `add` in every request
        self._unanswered: set[str] = set()

    def add(self, values: npt.ArrayLike, now: float, *, end: bool) -> None:
        """Adds tokens to the next request.

        Args:
            values: tokens, in a form that `as_tokens` accepts; none for a request without tokens.
            now: present time.
            end: whether the utterance ends with these tokens.

        Raises:
            TokenError: the tokens are invalid or have another shape than earlier tokens.
            UtteranceClosedError: the last tokens were already added.
            InputError: the utterance ends without any tokens.
        """
        tokens = as_tokens(values)
        if self.tokens and len(tokens) and tokens.dtype != self._token_dtype:
            if tokens.dtype == np.float32:
                raise TokenError("tokens: latents, but this utterance began with integers")
            tokens = tokens.astype(np.float32)  # latents that happen to be whole numbers
        if not len(tokens) and tokens.ndim == 1:
            tokens = np.zeros((0, *self._token_shape), self._token_dtype)
        elif self.tokens and len(tokens) and tokens.shape[1:] != self._token_shape:
            raise TokenError(
                f"tokens: shape {tokens.shape}, but earlier tokens of this utterance have "
                f"shape {self._token_shape} each"
            )
        self._token_shape, self._token_dtype = tokens.shape[1:], tokens.dtype
        if self.end_reason is not None:
            raise UtteranceClosedError(
                f"the server has ended the utterance because of {self.end_reason}, so it accepts "
                "no more tokens"
            )
        if self.ended:
            raise UtteranceClosedError(
                "the utterance is finished or cancelled, so it accepts no more tokens"
            )
        if end and not self.tokens + len(tokens):
            raise InputError("tokens: 0 sent; an utterance needs at least 1")
        if self._repeatable:
            self._batches.append((tokens, end))
        self._add(tokens, now, end)

    def interrupt(self) -> None:
        """Marks the attempt as failed. The server owes no response until `again` is called."""
        self._interrupted, self.owed_since = True, None

    def again(self, now: float) -> None:
        """Begins another attempt. All earlier tokens wait to be sent again."""
        self._begin()
        for tokens, end in self._batches:
            self._add(tokens, now, end)

    def _add(self, tokens: TokenArray, now: float, end: bool) -> None:
        self._added_at.append(now)
        self.tokens += len(tokens)
        self._tokens_after.append(self.tokens)
        self._unsent.append(tokens)
        self.ended = end
        if self._started_at is None and len(tokens):
            self._started_at = now
        if self.owed_since is None and self._owes():
            self.owed_since = max(now, self._plays_until)

    def next_request(self) -> Any:
        """Builds a request of all tokens that wait to be sent; None if there are none, or if the
        server has ended the utterance.
        """
        if not self._unsent or self.end_reason is not None:
            return None
        number = len(self._first_of_request)
        opening = self._opening if number == 0 else None
        self._first_of_request.append(len(self._added_at) - len(self._unsent))
        self._unanswered.add(str(number))
        # The shape of an empty array may be that of an integer, if it was added before any tokens.
        batches = [tokens for tokens in self._unsent if len(tokens)] or self._unsent[-1:]
        self._unsent = []
        return build_request(
            self._model,
            self.id,
            str(number),
            np.concatenate(batches),
            stream_key=self._stream_key,
            opening=opening,
            end=self.ended,
        )

    def _owes(self) -> bool:
        request_ids = set(self._unanswered)
        if self._unsent:
            request_ids.add(str(len(self._first_of_request)))
        # The server keeps the response stream of a `keep_open` first request open until the
        # utterance ends.
        open_ids = {"0"} if self._opening.keep_open and not self.ended else set()
        return bool(request_ids - open_ids) and not self._interrupted

    def accept(self, message: Any, now: float) -> list[AudioChunk]:
        """Reads a response and checks it. Raises ServerError if the response is an error, or it
        breaks the protocol (ProtocolError).

        Returns:
            The parts of chunks that follow the last one and were not delivered yet, with arrival
            times. Triton may swap responses to different requests, so a chunk waits here until all
            earlier ones have arrived.
        """
        response = read_response(message, self._opening.audio_format)
        if (arrived := response.chunk) is not None:
            if arrived.index < self._chunks or arrived.index in self._early:
                raise ProtocolError(f"chunk_index: the server sent chunk {arrived.index} twice")
            self._early[arrived.index] = arrived, response.request_id
        chunks = []
        while self._chunks in self._early:
            chunk, request_id = self._early.pop(self._chunks)
            self._check(chunk)
            if timed := self._timed(chunk, request_id, now):
                chunks.append(timed)
        if response.last_of_request:
            self._unanswered.discard(response.request_id)
        self.owed_since = max(now, self._plays_until) if self._owes() else None
        if self.ended and not self._unanswered and not self._unsent and not self.complete:
            if self._early:
                raise ProtocolError(
                    f"chunk_index: the server sent {min(self._early)}, expected {self._chunks}"
                )
            raise ProtocolError(
                f"final: the server ended the utterance after {self._chunks} chunks and "
                "marked no chunk as final"
            )
        return chunks

    def _check(self, chunk: AudioChunk) -> None:
        if self.complete:
            raise ProtocolError(
                f"chunk_index: the server sent chunk {chunk.index} after the final chunk"
            )
        self._chunks += 1
        self._samples += len(chunk.audio)
        self._trimmed = chunk.samples_trimmed
        rates = (chunk.sample_rate, chunk.samples_per_token, channels_of(chunk.audio))
        if self._rates not in (None, rates):
            raise ProtocolError(
                f"sample_rate, samples_per_token, channels: the server sent {rates}, but "
                f"{self._rates} in earlier chunks"
            )
        self._rates = rates
        sent_tokens = self.tokens - sum(map(len, self._unsent))
        expected = math.floor(self._spoken_samples(chunk) * sent_tokens) - self._trimmed
        # At another speed than 1, the last mel frame may be incomplete, and is then left out.
        least = expected if self._speed == 1 else expected - chunk.samples_per_token
        whole = chunk.final and chunk.end_reason is None
        if self._samples > expected or (whole and self._samples < least):
            raise ProtocolError(
                f"audio: the server sent {self._samples} samples for {sent_tokens} tokens, "
                f"expected {expected}"
            )
        if whole and (self._unsent or not self.ended):
            raise ProtocolError(
                "final: the server ended the utterance before its last request was sent"
            )
        self.complete, self.end_reason = chunk.final, chunk.end_reason

    def _timed(self, chunk: AudioChunk, request_id: str, now: float) -> AudioChunk | None:
        repeated = max(self._delivered_samples - (self._samples - len(chunk.audio)), 0)
        if repeated and repeated >= len(chunk.audio) and not chunk.final:
            return None
        # Counted here, and not read from the response, because a part may be repeated audio.
        audio = chunk.audio[repeated:]
        end = self._samples + self._trimmed
        spoken_samples = self._spoken_samples(chunk)
        first_token = (end - len(audio)) // spoken_samples
        timed = replace(
            chunk,
            audio=audio,
            first_token=first_token,
            token_count=-(-end // spoken_samples) - first_token if len(audio) else 0,
            index=self._delivered_chunks,
            arrival_s=0.0 if self._started_at is None else now - self._started_at,
            latency_s=now - self._added_at[self._made_possible_by(request_id, spoken_samples)],
            gap_s=None if self._delivered_at is None else now - self._delivered_at,
        )
        self._delivered_samples += len(timed.audio)
        self._delivered_chunks += 1
        self._delivered_at = now
        self._plays_until = max(self._plays_until, now) + timed.duration_s
        return timed

    def _spoken_samples(self, chunk: AudioChunk) -> Fraction:
        """Returns the number of samples that speak a token at the speed of the utterance."""
        return chunk.samples_per_token / self._speed

    def _made_possible_by(self, request_id: str, spoken_samples: Fraction) -> int:
        """Returns the number of the `add` that made the current chunk possible.

        This is the later of two: the `add` with the last token heard so far, and the first `add` of
        the request that the chunk answers.
        """
        tokens_heard = -(-(self._samples + self._trimmed) // spoken_samples)
        carrier = bisect_left(self._tokens_after, tokens_heard)
        answered = self._first_of_request[int(request_id)] if request_id in self._unanswered else 0
        return max(carrier, answered)

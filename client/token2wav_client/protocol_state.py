"""Protocol state of one utterance: notes requests and responses, times chunks; no clock and no connection."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from token2wav_client.audio import AudioChunk
from token2wav_client.errors import ProtocolError
from token2wav_client.wire import ReceivedChunk, Response


@dataclass(slots=True)
class Delivered:
    """Delivered audio of an utterance, counted over all attempts at it; times are on the clock of the caller.

    Attributes:
        samples: of audio.
        chunks: that held them.
        started_at: when the first tokens were sent for the first time.
        last_arrival: when the latest chunk came.
        rates: samples per second and per token; all chunks have the same.
    """

    samples: int = 0
    chunks: int = 0
    started_at: float | None = None
    last_arrival: float | None = None
    rates: tuple[int, int] | None = None


class ProtocolState:
    """Protocol state of one attempt at an utterance: numbers requests, times chunks, checks the server's answers.

    Args:
        keep_open: the first request is answered to the end only when the utterance ends, so that it is not
            owed before the last request was sent.
        delivered: by earlier attempts. A server repeats that audio; it is not delivered twice.

    Attributes:
        tokens: tokens sent.
        samples: samples received, those included that were delivered before.
        trimmed: samples that the server left out before the first one.
        ended: the last request was sent.
        complete: the final chunk came, with all samples.
        owed_since: since when the server owes an answer and was silent; None while it owes none.
    """

    def __init__(self, keep_open: bool, delivered: Delivered | None = None) -> None:
        self.tokens = 0
        self.samples = 0
        self.trimmed = 0
        self.ended = False
        self.complete = False
        self.owed_since: float | None = None
        self._keep_open = keep_open
        self._sent_at: list[float] = []
        self._tokens_after: list[int] = []  # tokens sent up to and with request i: sorted
        self._unanswered: set[str] = set()
        self._delivered = delivered or Delivered()
        self._chunks = 0

    @property
    def requests(self) -> int:
        """Number of requests sent so far; also the number of the next one."""
        return len(self._sent_at)

    def sent(self, tokens: int, now: float, *, end: bool) -> None:
        """Note that the next request goes out, with this many tokens."""
        self._unanswered.add(str(self.requests))
        self.tokens += tokens
        self.ended = end
        self._sent_at.append(now)
        self._tokens_after.append(self.tokens)
        if self._delivered.started_at is None and tokens:
            self._delivered.started_at = now
        if self.owed_since is None and self._owes():
            self.owed_since = now

    def received(self, response: Response, now: float) -> AudioChunk | None:
        """Note a response; return its chunk, timed, or what is new of it.

        Raises:
            ProtocolError: a chunk out of order, after the final one, with more or fewer samples than the
                tokens make, or an utterance that ends without a final chunk.
        """
        chunk = self._timed(response.chunk, response.request_id, now) if response.chunk else None
        if response.last_of_request:
            self._unanswered.discard(response.request_id)
        self.owed_since = now if self._owes() else None
        if self.ended and not self._unanswered and not self.complete:
            raise ProtocolError(
                f"final: the server ended the utterance after {self._chunks} chunks, none of them final"
            )
        return chunk

    def _owes(self) -> bool:
        kept_open = {"0"} if self._keep_open and not self.ended else set()
        return bool(self._unanswered - kept_open)

    def _timed(self, chunk: ReceivedChunk, request_id: str, now: float) -> AudioChunk | None:
        if self.complete:
            raise ProtocolError(f"chunk_index: the server sent chunk {chunk.index} after the final one")
        if chunk.index != self._chunks:
            raise ProtocolError(f"chunk_index: the server sent {chunk.index}, expected {self._chunks}")
        self._chunks += 1
        self.samples += len(chunk.audio)
        self.trimmed = chunk.samples_trimmed
        rates = (chunk.sample_rate, chunk.samples_per_token)
        if self._delivered.rates not in (None, rates):
            raise ProtocolError(
                f"sample_rate, samples_per_token: the server sent {rates} after {self._delivered.rates}"
            )
        self._delivered.rates = rates
        expected = chunk.samples_per_token * self.tokens - self.trimmed
        if self.samples > expected or (chunk.final and self.samples != expected):
            raise ProtocolError(
                f"audio: the server sent {self.samples} samples for {self.tokens} tokens, expected {expected}"
            )
        if chunk.final and not self.ended:
            raise ProtocolError("final: the server ended the utterance before its last request was sent")
        self.complete = chunk.final
        return self._deliver(chunk, request_id, now)

    def _deliver(self, chunk: ReceivedChunk, request_id: str, now: float) -> AudioChunk | None:
        delivered = self._delivered
        repeated = max(delivered.samples - (self.samples - len(chunk.audio)), 0)
        if repeated and repeated >= len(chunk.audio) and not chunk.final:
            return None
        started_at = now if delivered.started_at is None else delivered.started_at
        timed = AudioChunk(
            audio=chunk.audio[repeated:],
            index=delivered.chunks,
            final=chunk.final,
            arrival_s=now - started_at,
            latency_s=now - self._sent_at[self._made_possible_by(request_id, chunk.samples_per_token)],
            gap_s=None if delivered.last_arrival is None else now - delivered.last_arrival,
            sample_rate=chunk.sample_rate,
            samples_per_token=chunk.samples_per_token,
            samples_trimmed=chunk.samples_trimmed,
            audio_format=chunk.audio_format,
        )
        delivered.samples += len(timed.audio)
        delivered.chunks += 1
        delivered.last_arrival = now
        return timed

    def _made_possible_by(self, request_id: str, samples_per_token: int) -> int:
        """The later of two requests: the one with the last token heard so far, the one being answered."""
        tokens_heard = -(-(self.samples + self.trimmed) // samples_per_token)
        carrier = bisect_left(self._tokens_after, tokens_heard)
        answered = int(request_id) if request_id in self._unanswered else 0
        return max(carrier, answered)

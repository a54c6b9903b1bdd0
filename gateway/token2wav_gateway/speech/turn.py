"""Turn: a text in, and the events of its speech out.

Every door of the gateway speaks by turns. A turn counts the request of the key, admits the text
within the limits, asks the language model for speech tokens, pushes them into the speech server as
the client takes the audio, encodes the audio, and finds the times of its words. A door translates
a request into a turn, and the events of the turn into messages of its protocol.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import Any, TypeAlias

import anyio
import numpy as np
from numpy.typing import NDArray

from token2wav_client import AudioChunk, ClientError, TokenError
from token2wav_client.audio import EndReason
from token2wav_client.listening import Recording
from token2wav_client.tokens import as_tokens
from token2wav_gateway.access import Holder
from token2wav_gateway.encoding import Encoder
from token2wav_gateway.errors import (
    BusyError,
    ModelBusyError,
    ModelError,
    ModelTimeoutError,
    RequestError,
)
from token2wav_gateway.forms import check_length
from token2wav_gateway.settings import LimitSettings
from token2wav_gateway.speech.backpressure import Backpressure
from token2wav_gateway.speech.content import Audio, Codes, Ended, Event, Started, Text, Words
from token2wav_gateway.speech.language_model import Answer
from token2wav_gateway.speech.servers import Servers, codes_error, speech_error
from token2wav_gateway.tracing import Span, span
from token2wav_gateway.words.sentences import has_words
from token2wav_gateway.words.word_times import SpokenText, WordTimes

log = logging.getLogger(__name__)

Tokens: TypeAlias = AsyncGenerator[NDArray[np.int32], None]
_BATCH = 100  # codes that are sent to the speech server at once
# Samples that are encoded at once. As MP3 they take up to 10 ms of the event loop.
_SLICE = 12_000


class Turn:
    """Turn of a client. Iterate over its events once.

        turn = Turn(servers, Text("It rains.", voice), Encoder("pcm"))
        async with aclosing(turn.events()) as events:
            async for event in events:
                ...

    Args:
        trace: trace context of the request, as `trace_headers` returns it; None for a new trace.
        holder: holder of the key, of which the turn is a request; None for a turn that has been
            counted with its request.
        word_times: finds the times of the words; None for a turn without `Words`.
        words_within: returns the seconds that the times may take after the audio.

    Attributes:
        samples: samples of a channel that have left the turn.
        rate_hz: sample rate.
    """

    def __init__(
        self,
        servers: Servers,
        content: Text | Codes,
        encoder: Encoder,
        *,
        trace: Mapping[str, str] | None = None,
        holder: Holder | None = None,
        word_times: WordTimes | None = None,
        words_within: Callable[[], float] = lambda: math.inf,
    ) -> None:
        self.samples, self.rate_hz = 0, encoder.rate_hz
        self._servers = servers
        self._metrics = servers.metrics
        self._content = content
        self._encoder = encoder
        self._trace = trace or {}
        self._holder = holder
        self._words_within = words_within
        self._text: str | None = None  # as it is spoken
        self._word_times = word_times
        ahead_s, held_back = servers.limits.ahead_s, self._metrics.held_back
        self._pressure = Backpressure(ahead_s, held_back, content.speed)
        self._tokens = self._spoken_tokens = 0
        self._end_reason: EndReason | str | None = None
        self._complete = False  # all tokens have arrived
        self._shortened = False  # `max_new_tokens` of the client has ended the answer

    @property
    def media_type(self) -> str:
        return self._encoder.media_type

    @property
    def whole_s(self) -> float:
        """Seconds of the whole audio; 0 before the language model has sent all of its tokens."""
        return self._pressure.sent_s if self._complete else 0.0

    @property
    def ended(self) -> Ended:
        """End of the turn, also of one that was cancelled or has failed."""
        characters = self._content.characters if isinstance(self._content, Text) else 0
        usage = {
            "input_tokens": characters,
            "output_tokens": self._tokens,
            "total_tokens": characters + self._tokens,
        }
        return Ended(self._end_reason, usage)

    def admit(self) -> None:
        """Counts the turn as a request of the key, once. `events` does so too.

        Raises:
            BusyError: the key has too many requests within a minute.
        """
        if self._holder is not None:
            self._holder.count_request()
            self._holder = None

    async def spoken_text(self) -> str:
        """Returns the text as it is spoken, with the changes of the settings and of the client.

        All events of the turn are about this text. It is empty for codes. A text that grows stays
        as it is, and so does a text that `events` would refuse at the time of the first call.
        """
        content = self._content
        if self._text is None:
            text = content.text if isinstance(content, Text) else ""
            refused = self._is_refused(text)
            if isinstance(content, Text) and content.growing is None and not refused:
                normaliser = self._servers.normaliser
                text = await normaliser(text, content.language, content.pronunciations)
            self._text = text
        return self._text

    def _is_refused(self, text: str) -> bool:
        """Admits the turn, and returns whether it is too long, or one too many."""
        try:
            self.admit()
        except BusyError:
            return True
        return self._servers.full or len(text) > self._servers.limits.text_characters

    async def events(self) -> AsyncGenerator[Event, None]:
        """Yields the events: `Started`, `Audio` any number of times, and `Ended`. If words are
        wanted, `Words` follow between and after the audio.

        If the caller stops iterating, the requests to both servers are cancelled.

        Raises:
            RequestError: the text is empty or too long, there are too many codes, or the speech
                server refuses the speed, a code or the voice.
            BusyError: a limit of the key or of the gateway is reached.
            ModelError: one of the servers fails.
        """
        self.admit()
        text = await self.spoken_text()
        encoder, begun, spoken = self._encoder, False, None
        if self._word_times is not None and isinstance(self._content, Text):
            spoken = SpokenText(self._word_times, text, encoder.rate_hz)
        try:
            async with aclosing(self._speak()) as speech:
                chunks = speech if spoken is None else _with_words(speech, spoken)
                async with aclosing(chunks):
                    async for chunk in chunks:
                        if isinstance(chunk, Words):
                            yield chunk
                            continue
                        if not begun:
                            begun = True
                            yield Started()
                        self.samples += len(chunk.audio)
                        self._spoken_tokens = chunk.first_token + chunk.token_count
                        if spoken is not None:
                            spoken.add(chunk.audio)
                        if content := await self._encoded(chunk.audio):  # it may keep all samples
                            yield Audio(content, self.samples, self._spoken_tokens)
            if not begun:
                yield Started()
            if content := encoder.finish():
                yield Audio(content, self.samples, self._spoken_tokens)
            if spoken is not None:
                words, segments = await spoken.rest(self._words_within())
                if words is None and (found := spoken.take()):
                    yield Words(found)
                yield Words(words, segments)
        finally:
            if spoken is not None:
                spoken.close()
        yield self.ended

    async def _encoded(self, samples: NDArray[Any]) -> bytes:
        """Encodes samples, and lets other clients have their turns meanwhile."""
        pieces = []
        for start in range(0, len(samples), _SLICE):
            if start:
                await asyncio.sleep(0)
            pieces.append(self._encoder.encode(samples[start : start + _SLICE]))
        return b"".join(pieces)

    async def _speak(self) -> AsyncGenerator[AudioChunk, None]:
        content, servers = self._content, self._servers
        codes = None if isinstance(content, Text) else _checked_codes(content.codes, servers.limits)
        if isinstance(content, Text):
            text = await self.spoken_text()
            check_text(text, content.instructions, servers.limits)
            if not has_words(text):  # a normaliser may have words for signs
                raise RequestError("input: no letter or digit; a text is needed", param="input")
        with (
            span("speech", self._trace, server=True) as request,
            servers.busy(),
            self._counted(),
        ):
            if isinstance(content, Text):
                tokens = self._tokens_of(content, request)
            else:
                assert codes is not None
                self._tokens = len(codes)
                tokens = _in_batches(codes)
            async with aclosing(self._synthesize(tokens, request)) as chunks:
                async for chunk in chunks:
                    yield chunk

    @contextmanager
    def _counted(self) -> Iterator[None]:
        outcome = "cancelled"
        try:
            yield
            outcome = "done"
        except RequestError:
            outcome = "refused"
            raise
        except ModelError as error:
            outcome = "failed"
            log.warning("a text failed: %s", error.summary)
            raise
        finally:
            self._metrics.texts.labels(outcome).inc()

    async def _synthesize(self, tokens: Tokens, request: Span) -> AsyncGenerator[AudioChunk, None]:
        content, servers, metrics = self._content, self._servers, self._metrics
        started, first_tokens_s, complete = time.monotonic(), 0.0, False
        pressure, arrivals_s, samples = self._pressure, list[float](), list[int]()
        deadline = started + servers.limits.seconds
        with span("speech server", request.headers) as call:
            # The client's task that sends tokens closes their generator.
            chunks = servers.client.synthesize(
                pressure.hold_back(tokens),
                content.voice.tensors if isinstance(content, Text) else content.voice,
                audio_format=self._encoder.format.samples,
                sample_rate=self._encoder.rate_hz,
                speed=content.speed,
                headers=call.headers,
            )
            try:
                async with aclosing(chunks):  # type: ignore[type-var]
                    while True:
                        # asyncio.wait_for would run anext in a task of its own. Starlette cancels
                        # more than once, and the second time would leave that task running.
                        try:
                            with pressure.waiting(), anyio.fail_after(deadline - time.monotonic()):
                                chunk = await anext(chunks)
                        except StopAsyncIteration:
                            if not complete:  # the client of the speech server was closed
                                raise ModelBusyError("gateway: shutting down") from None
                            self._count_end(arrivals_s, samples, first_tokens_s)
                            return
                        pressure.take(chunk)
                        complete = chunk.final
                        if chunk.end_reason is not None:
                            self._end_reason = chunk.end_reason
                        if not samples and len(chunk.audio):
                            call.event("first audio")
                            first_audio_s = time.monotonic() - started
                            first_tokens_s = max(0.0, first_audio_s - chunk.arrival_s)
                            metrics.first_audio.observe(first_audio_s)
                            metrics.ttfp.observe(first_audio_s)
                        if len(chunk.audio):
                            arrivals_s.append(chunk.arrival_s)
                            samples.append(len(chunk.audio))
                        metrics.audio_seconds.inc(chunk.duration_s)
                        yield chunk
            except TimeoutError:
                raise ModelTimeoutError(
                    f"gateway: the text took longer than {servers.limits.seconds:g} s"
                ) from None
            except ClientError as error:
                convert = speech_error if isinstance(content, Text) else codes_error
                raise convert(error) from None

    def _count_end(
        self, arrivals_s: list[float], samples: list[int], first_tokens_s: float
    ) -> None:
        """Counts a text whose audio is complete.

        Args:
            arrivals_s: arrivals of the chunks with audio, since the first tokens.
            samples: their samples of a channel.
            first_tokens_s: time from the text to the first tokens.
        """
        if samples:
            times, ended_s = np.array(arrivals_s), first_tokens_s + arrivals_s[-1]
            played = Recording(times, np.array(samples), self._encoder.rate_hz, ended_s)
            self._metrics.count_playback(played)
        reason = self._end_reason
        if reason is None or (reason == "length" and self._shortened):
            return
        self._metrics.cut_off.labels(reason).inc()
        log.warning("a text was cut off: end_reason %s", reason)

    def _count_skipped(self, skipped: Mapping[str, int]) -> None:
        for reason, numbers in skipped.items():
            self._metrics.skipped.labels(reason).inc(numbers)
        if outside := skipped.get("outside"):
            log.warning("a text: %d numbers outside the vocabulary were skipped", outside)

    async def _tokens_of(self, content: Text, request: Span) -> Tokens:
        """Yields the speech tokens of the language model."""
        servers, started = self._servers, time.monotonic()
        spoken = replace(content, text=await self.spoken_text())
        with span("language model", request.headers) as call:
            answer, vocabulary = Answer(), await servers.vocabulary.get()
            further = None
            if content.growing is not None:
                # The time-out of the server also runs while the client owes words.
                pause_s = servers.language_model.token_timeout_s / 2
                longest_s = servers.limits.seconds / 2
                further = content.growing.rest(content.text, pause_s, longest_s)
            batches = servers.language_model.tokens(
                answer, spoken, vocabulary, call.headers, further
            )
            try:
                async with aclosing(batches):
                    async for batch in batches:
                        if not self._tokens:
                            self._metrics.first_token.observe(time.monotonic() - started)
                            call.event("first token")
                        self._tokens += len(batch)
                        self._metrics.tokens.inc(len(batch))
                        yield batch
                self._complete = True
            finally:
                self._count_skipped(answer.skipped)
            if answer.cut_off:
                self._end_reason = "length"
                self._shortened = servers.language_model.template.is_shortened(content.sampling)
            call.set("tokens", self._tokens)


async def _with_words(
    chunks: AsyncGenerator[AudioChunk, None], spoken: SpokenText
) -> AsyncGenerator[AudioChunk | Words, None]:
    """Yields chunks as they arrive, and words that become known meanwhile."""

    async def next_chunk() -> AudioChunk | None:
        return await anext(chunks, None)

    chunk, words = asyncio.create_task(next_chunk()), asyncio.create_task(spoken.arrival())
    try:
        while True:
            await asyncio.wait({chunk, words}, return_when=asyncio.FIRST_COMPLETED)
            if words.done():
                if times := spoken.take():
                    yield Words(times)
                words = asyncio.create_task(spoken.arrival())
            if chunk.done():
                if (arrived := chunk.result()) is None:
                    return
                yield arrived
                chunk = asyncio.create_task(next_chunk())
    finally:
        await _cancel(chunk, words)


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    """Cancels tasks and waits for their ends, also if the caller is cancelled again meanwhile.

    Starlette's scopes cancel more than once, and so may a session: its client cancels, and leaves.
    """
    for task in tasks:
        task.cancel()
    cancelled = None
    with anyio.CancelScope(shield=True):  # from scopes; not from `Task.cancel`
        while pending := [task for task in tasks if not task.done()]:
            try:
                await asyncio.wait(pending)
            except asyncio.CancelledError as error:
                cancelled = error
    if cancelled is not None:
        raise cancelled


def check_text(text: str, instructions: str | None, limits: LimitSettings) -> None:
    """Checks a text and its instructions.

    Raises:
        RequestError: the text is empty, or it or the instructions are too long.
    """
    if not text.strip():
        raise RequestError("input: empty; a text is needed", param="input")
    check_length("input", text, limits.text_characters)
    check_length("instructions", instructions or "", limits.text_characters)


def _checked_codes(codes: list[int] | list[list[int]], limits: LimitSettings) -> NDArray[Any]:
    if len(codes) > limits.speech_tokens:
        raise RequestError(
            f"codes: {len(codes)} sent; at most {limits.speech_tokens} are allowed", param="codes"
        )
    try:
        return as_tokens(codes)
    except TokenError as error:
        raise RequestError(f"codes: {error.problem}", param="codes") from None


async def _in_batches(tokens: NDArray[Any]) -> Tokens:
    for start in range(0, len(tokens), _BATCH):
        yield tokens[start : start + _BATCH]

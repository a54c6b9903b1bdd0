"""Speech: one text becomes audio, through the language model and the speech server."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import anyio
import numpy as np
from numpy.typing import NDArray

from token2wav_client import (
    AsyncClient,
    AudioChunk,
    ClientError,
    ClientVoice,
    ResponseTimeoutError,
    TokenError,
    TransientServerError,
)
from token2wav_client.audio import AudioFormat
from token2wav_client.tokens import as_tokens
from token2wav_gateway.backpressure import Backpressure
from token2wav_gateway.encoding import RATE_HZ
from token2wav_gateway.errors import (
    BusyError,
    GatewayError,
    ModelBusyError,
    ModelError,
    ModelTimeoutError,
    RequestError,
)
from token2wav_gateway.language_model import Answer, LanguageModel
from token2wav_gateway.metrics import Metrics
from token2wav_gateway.playback import Playback
from token2wav_gateway.progress import Progress
from token2wav_gateway.settings import Settings
from token2wav_gateway.template import load_template
from token2wav_gateway.tracing import Span, Tracer
from token2wav_gateway.vocabulary import Vocabulary
from token2wav_gateway.voices import Voice

log = logging.getLogger(__name__)

# Converts an error of the speech server into an error of the gateway.
ErrorOf = Callable[[ClientError], GatewayError]
Tokens: TypeAlias = AsyncGenerator[NDArray[np.int32], None]
_NO_PROMPT = np.zeros(0, np.int32)
_BATCH = 100  # codes that are sent to the speech server at once


@dataclass(frozen=True)
class Text:
    """Text to say.

    Attributes:
        instructions: how to say the text; None for the default of the template.
        sampling: fields of the request to the language model that replace those of the template.
        rate_hz: sample rate of the audio: 8000, 16000, 22050, 24000, 44100 or 48000.
        trace: trace context of the request, as `trace_headers` returns it.
        speed: tempo of the speech, 0.5 to 2.
    """

    text: str
    voice: Voice
    instructions: str | None = None
    sampling: Mapping[str, int] = field(default_factory=dict)
    rate_hz: int = RATE_HZ
    trace: Mapping[str, str] = field(default_factory=dict)
    speed: float = 1.0


@dataclass
class _Utterance:
    """Utterance between both servers.

    Attributes:
        error_of: conversion of errors of the speech server.
        span: span of the request.
        pressure: back-pressure of the client.
        speed: tempo of the speech.
        rate_hz: sample rate of the audio.
        shortened: whether `max_new_tokens` of the client has ended the answer.
    """

    voice: ClientVoice | None
    progress: Progress
    error_of: ErrorOf
    span: Span
    pressure: Backpressure
    speed: float
    rate_hz: int = RATE_HZ
    shortened: bool = False


class Speech:
    """Speaker of texts: it connects the language model to the speech server.

    Create it in the event loop that uses it.
    """

    def __init__(
        self, settings: Settings, metrics: Metrics, audio_format: AudioFormat = "int16"
    ) -> None:
        server = settings.speech_server
        self._limits = settings.limits
        self._metrics = metrics
        self._audio_format = audio_format
        self.language_model = LanguageModel(
            settings.language_model,
            load_template(settings.language_model.template, settings.language_model.folder),
            settings.limits.speech_tokens,
        )
        self._client = AsyncClient(
            server.url,
            token=server.access_token(),
            tls=None if server.tls is None else server.tls.loaded(),
            response_timeout_s=server.response_timeout_s,
        )
        self._vocabulary = Vocabulary(self._client.vocabulary)
        self._tracer = Tracer()
        self._speaking = 0

    async def close(self) -> None:
        await self._client.close()
        await self.language_model.close()

    async def check(self) -> None:
        """Checks that both servers work.

        Raises:
            ModelError: a server does not answer, or not correctly.
        """
        await self.language_model.check()
        try:
            await self._client.health()
        except ClientError as error:
            raise _speech_error(error) from None

    def check_words(self, text: str, instructions: str | None) -> None:
        """Checks a text and its instructions.

        Raises:
            RequestError: the text is empty, or it or the instructions are too long.
        """
        if not text.strip():
            raise RequestError("input: empty; a text is needed", param="input")
        longest = self._limits.text_characters
        for name, words in (("input", text), ("instructions", instructions or "")):
            if len(words) > longest:
                raise RequestError(
                    f"{name}: {len(words)} characters; at most {longest} are allowed", param=name
                )

    async def speak(
        self, text: Text, progress: Progress | None = None
    ) -> AsyncGenerator[AudioChunk, None]:
        """Says a text: yields chunks of samples at its rate as they arrive.

        If the caller stops iterating, the requests to both servers are cancelled.

        Raises:
            RequestError: the text is empty, it or the instructions are too long, or the speech
                server refuses the speed.
            BusyError: too many texts are being spoken.
            ModelError: one of the servers fails.
        """
        self.check_words(text.text, text.instructions)
        with self._tracer.span("speech", text.trace, server=True) as span, self._admitted():
            utterance = self._utterance(
                text.voice.tensors, progress, _speech_error, span, text.speed
            )
            utterance.rate_hz = text.rate_hz
            tokens = self._tokens(text, utterance)
            async with aclosing(self._synthesize(tokens, utterance)) as chunks:
                async for chunk in chunks:
                    yield chunk

    async def speak_codes(
        self,
        codes: list[int] | list[list[int]],
        voice: ClientVoice | None,
        progress: Progress | None = None,
        trace: Mapping[str, str] | None = None,
        speed: float = 1.0,
    ) -> AsyncGenerator[AudioChunk, None]:
        """Turns tokens or codes into chunks of samples at 24 kHz, without a language model.

        Raises:
            RequestError: there are too many tokens, the speech server refuses a token or the speed,
                or needs a voice, or frames have different lengths.
            BusyError: too many texts are being spoken.
            ModelError: the speech server fails.
        """
        limit = self._limits.speech_tokens
        if len(codes) > limit:
            raise RequestError(
                f"codes: {len(codes)} sent; at most {limit} are allowed", param="codes"
            )
        try:
            tokens = as_tokens(codes)
        except TokenError as error:
            raise RequestError(f"codes: {error.problem}", param="codes") from None
        with self._tracer.span("speech", trace or {}, server=True) as span, self._admitted():
            utterance = self._utterance(voice, progress, _error_of_codes, span, speed)
            utterance.progress.tokens = len(tokens)
            async with aclosing(self._synthesize(_in_batches(tokens), utterance)) as chunks:
                async for chunk in chunks:
                    yield chunk

    def _utterance(
        self,
        voice: ClientVoice | None,
        progress: Progress | None,
        error_of: ErrorOf,
        span: Span,
        speed: float,
    ) -> _Utterance:
        pressure = Backpressure(self._limits.ahead_s, self._metrics.held_back, speed)
        return _Utterance(voice, progress or Progress(), error_of, span, pressure, speed)

    @contextmanager
    def _admitted(self) -> Iterator[None]:
        """Admits a text within the limit of texts at the same time, and counts its outcome."""
        if self._speaking >= self._limits.streams:
            raise BusyError(
                f"gateway: {self._limits.streams} texts are being spoken; try again later"
            )
        self._speaking += 1
        self._metrics.speaking.set(self._speaking)
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
            self._speaking -= 1
            self._metrics.speaking.set(self._speaking)
            self._metrics.texts.labels(outcome).inc()

    async def _synthesize(
        self, tokens: Tokens, utterance: _Utterance
    ) -> AsyncGenerator[AudioChunk, None]:
        started, first_tokens_s = time.monotonic(), 0.0
        pressure, playback = utterance.pressure, Playback()
        deadline = started + self._limits.seconds
        with self._tracer.span("speech server", utterance.span.headers) as span:
            # The client's task that sends tokens closes their generator.
            chunks = self._client.synthesize(
                pressure.hold_back(tokens),
                utterance.voice,
                audio_format=self._audio_format,
                sample_rate=utterance.rate_hz,
                speed=utterance.speed,
                headers=span.headers,
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
                            self._metrics.count_playback(playback, first_tokens_s + playback.last_s)
                            self._count_end(utterance)
                            return
                        pressure.take(chunk)
                        if chunk.end_reason is not None:
                            utterance.progress.end_reason = chunk.end_reason
                        if not playback.chunks and len(chunk.audio):
                            span.event("first audio")
                            first_audio_s = time.monotonic() - started
                            first_tokens_s = max(0.0, first_audio_s - chunk.arrival_s)
                            self._metrics.first_audio.observe(first_audio_s)
                            self._metrics.ttfp.observe(first_audio_s)
                        playback.add(chunk)
                        self._metrics.audio_seconds.inc(chunk.duration_s)
                        yield chunk
            except TimeoutError:
                raise ModelTimeoutError(
                    f"gateway: the text took longer than {self._limits.seconds:g} s"
                ) from None
            except ClientError as error:
                raise utterance.error_of(error) from None

    def _count_end(self, utterance: _Utterance) -> None:
        """Counts a text that a limit of the operator has ended, and logs it."""
        reason = utterance.progress.end_reason
        if reason is None or (reason == "length" and utterance.shortened):
            return
        self._metrics.cut_off.labels(reason).inc()
        log.warning("a text was cut off: end_reason %s", reason)

    def _count_skipped(self, skipped: Mapping[str, int]) -> None:
        for reason, numbers in skipped.items():
            self._metrics.skipped.labels(reason).inc(numbers)
        if outside := skipped.get("outside"):
            log.warning("a text: %d numbers outside the vocabulary were skipped", outside)

    async def _tokens(self, text: Text, utterance: _Utterance) -> Tokens:
        started, voice, progress = time.monotonic(), text.voice, utterance.progress
        prompt: dict[str, Any] = {
            "text": text.text,
            "instructions": text.instructions,
            "voice": voice.name,
            "sampling": text.sampling,
            "prompt_text": voice.text,
            "prompt_tokens": voice.tensors.prompt_tokens if voice.tensors else _NO_PROMPT,
        }
        with self._tracer.span("language model", utterance.span.headers) as span:
            answer, vocabulary = Answer(), await self._vocabulary.sizes()
            batches = self.language_model.tokens(answer, vocabulary, span.headers, **prompt)
            try:
                async with aclosing(batches):
                    async for batch in batches:
                        if not progress.tokens:
                            self._metrics.first_token.observe(time.monotonic() - started)
                            span.event("first token")
                        progress.tokens += len(batch)
                        self._metrics.tokens.inc(len(batch))
                        yield batch
            finally:
                self._count_skipped(answer.skipped)
            if answer.cut_off:
                progress.end_reason = "length"
                utterance.shortened = self.language_model.template.is_shortened(text.sampling)
            span.set("tokens", progress.tokens)


async def _in_batches(tokens: NDArray[Any]) -> Tokens:
    for start in range(0, len(tokens), _BATCH):
        yield tokens[start : start + _BATCH]


def _speech_error(error: ClientError) -> GatewayError:
    if error.field == "speed":  # of a codec
        return RequestError(str(error), param="speed")
    kind = ModelError
    if isinstance(error, ResponseTimeoutError):
        kind = ModelTimeoutError
    elif isinstance(error, TransientServerError):
        kind = ModelBusyError
    return kind(f"speech server: {error}")


def _error_of_codes(error: ClientError) -> GatewayError:
    """Returns the error for a client that has sent codes: the speech server may refuse them."""
    if error.field == "tokens":
        return RequestError(f"codes: {error.problem}", param="codes")
    if error.field == "prompt_tokens" and error.problem.startswith("missing"):
        return RequestError("voice: missing; this model needs the name of a voice", param="voice")
    return _speech_error(error)

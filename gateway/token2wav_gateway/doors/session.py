"""Session of a WebSocket: text arrives in pieces, and its sentences are spoken one after the other.

The messages are JSON objects with a `type`, as in vLLM-Omni's WebSocket. The client sends
`session.config`, then `input.text` any number of times, and `input.done` at the end of an
utterance. Other utterances may follow on the same connection, until `session.close`.

The server sends `audio.start` before the audio of a sentence, then its audio, and `audio.done`.
`session.done` answers `input.done`, and `error` reports a problem. `utterance_index` counts the
utterances of the connection, and `sentence_index` the sentences of an utterance.

Beyond vLLM-Omni, `cancel` stops the speech, and drops the text that was not spoken and
`input.done`; `audio.cancelled` answers it, with the text that the listener has heard. While audio
is streamed, `audio.progress` reports the samples and the speech tokens that were sent.
"""

from __future__ import annotations

import asyncio
import base64
import math
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar

import anyio
from fastapi import WebSocket
from pydantic import BaseModel, ValidationError

from token2wav_gateway.doors.requests import SessionConfig, SocketMessage, problem
from token2wav_gateway.doors.socket_session import FatalError, SocketSession
from token2wav_gateway.errors import GatewayError, RequestError
from token2wav_gateway.gateway import Caller
from token2wav_gateway.speech.content import Audio, Text, Words
from token2wav_gateway.speech.growing_text import GrowingText, WordFeeder
from token2wav_gateway.speech.playout import Playout
from token2wav_gateway.words.sentences import SentenceSplitter

_BodyT = TypeVar("_BodyT", bound=BaseModel)
_MOST_WAITING = 256  # sentences that wait to be spoken
_NEXT_S = 0.5  # in which the next sentence can be heard
_SLICE = 256  # characters of a message that are split into sentences at once
_NOWHERE = {"utterance_index": None, "sentence_index": None}


@dataclass(frozen=True)
class _Sentence:
    """Sentence, or text that grows, that waits to be spoken, with its position."""

    content: Text
    config: SessionConfig
    utterance_index: int
    sentence_index: int

    @property
    def position(self) -> dict[str, int]:
        return {"utterance_index": self.utterance_index, "sentence_index": self.sentence_index}


@dataclass(frozen=True)
class _End:
    """End of an utterance."""

    utterance_index: int
    sentences: int


class _Close:
    """End of the connection."""


_Waiting: TypeAlias = "_Sentence | _End | _Close"


class _Chunks:
    """Audio of a sentence as events `audio.chunk` of vLLM-Omni."""

    def __init__(self, sentence: _Sentence, rate_hz: int) -> None:
        self._rate_hz = rate_hz
        self._sentence = sentence
        self._count = self._samples = 0
        self._began_s = 0.0

    @property
    def due_s(self) -> float:
        """Seconds until a player that started with the first chunk has played all chunks."""
        return self._began_s + self._samples / self._rate_hz - anyio.current_time()

    def fields(self, piece: bytes, samples: int, times: Any = None) -> dict[str, Any]:
        """Returns the fields of the next chunk.

        Args:
            samples: number of samples of the sentence up to the end of the chunk.
            times: times of words, in a chunk without audio.
        """
        if not self._count:
            self._began_s = anyio.current_time()
        fields = {
            **self._sentence.position,
            "chunk_id": self._count,
            "chunk_start_ms": round(1000 * self._samples / self._rate_hz) if piece else 0,
            "chunk_end_ms": round(1000 * samples / self._rate_hz),
            "sample_rate": self._rate_hz,
            "audio_b64": base64.b64encode(piece).decode(),
            "timestamps": times,
        }
        self._count, self._samples = self._count + 1, samples
        return fields


class Session(SocketSession[_Waiting]):
    """Session of vLLM-Omni's protocol, which speaks sentences.

    Args:
        caller: client of the socket. Each sentence and each further configuration counts as a
            request of its key.
    """

    message_noun = "socket"

    def __init__(self, caller: Caller, socket: WebSocket, ending: asyncio.Event) -> None:
        super().__init__(caller, socket, ending)
        self._unspoken = 0  # sentences that wait
        self._speaking: asyncio.Task[None] | None = None
        self._begun = False  # the client has the `audio.start` of this sentence
        self._playout = Playout()
        self._heard: dict[str, Any] | None = None  # by a cancel whose sentence has not stopped
        # The utterance whose text arrives.
        self._utterance_index = 0
        self._sentences = 0
        self._has_text = False
        self._closing = False  # session.close has arrived
        self._listening = anyio.CancelScope()  # of the wait for the next text, in silence

    async def run(self) -> None:
        try:
            await super().run()
        finally:
            if self._speaking is not None:
                self._speaking.cancel()
                await asyncio.gather(self._speaking, return_exceptions=True)

    async def _begin(self) -> None:
        text = await self._receive()
        await self._connection.in_turn(self._open(text))

    async def _open(self, text: str) -> None:
        await self._configure(self._parsed(text))

    async def _configure(self, message: Any) -> None:
        """Configures the utterances that follow."""
        if self._has_text:
            raise RequestError(
                "session.config: an utterance has begun; send input.done or cancel before it",
                param="type",
            )
        config = self._checked(SessionConfig, message)
        self._gateway.check_model(config.model)
        voice = await self._gateway.voice_of(config.voice_name, config.ref_audio, config.ref_text)
        self._content = config.text("", voice)
        # A session may be long, and needs its recording no more.
        self._config = config.model_copy(update={"ref_audio": None})
        limit = self._limits.text_characters
        template = self._gateway.servers.language_model.template
        self._splitter: SentenceSplitter | WordFeeder = SentenceSplitter(
            limit, config.split_granularity, config.language_code
        )
        # An aligner needs whole texts, and so do pronunciations.
        if template.text == "stream" and not (config.word_timestamps or config.pronunciations):
            self._splitter = WordFeeder(limit)

    async def _report(self, error: GatewayError, message: Any) -> None:
        await self._send_json(error_event(error))

    async def _take(self, message: Any) -> None:
        if isinstance(message, dict) and message.get("type") == "session.config":
            self._caller.holder.count_request()
            await self._configure(message)
            return
        message = self._checked(SocketMessage, message)
        if message.text is not None:
            self._has_text = self._has_text or bool(message.text)
            for start in range(0, len(message.text), _SLICE):
                self._append(self._splitter.feed(message.text[start : start + _SLICE]))
                await asyncio.sleep(0)  # until the next turn
        elif message.type == "input.done":
            self._append(self._splitter.close())
            self._waiting.put_nowait(_End(self._utterance_index, self._sentences))
            self._begin_utterance()
        elif message.type == "session.close":
            if not self._closing:
                self._closing = True
                self._waiting.put_nowait(_Close())
        else:
            await self._cancel(message.played_ms)
        self._watch_text()

    def _watch_text(self) -> None:
        """Bounds the time in which words wait for the end of their sentence in silence."""
        if not isinstance(self._splitter, SentenceSplitter) or self._splitter.empty:
            self._listening.deadline = math.inf
        elif self._listening.deadline == math.inf:
            self._listening.deadline = anyio.current_time() + self._limits.text_wait_s

    async def _next(self) -> _Waiting:
        """Returns the next text to be spoken. It may be words that have waited too long."""
        while True:
            with anyio.CancelScope() as self._listening:
                self._watch_text()
                return await self._waiting.get()
            if isinstance(self._splitter, SentenceSplitter):
                self._append(self._splitter.release())

    def _append(self, sentences: Sequence[str | GrowingText]) -> None:
        # One place is left for the end of the utterance.
        if self._waiting.qsize() + len(sentences) >= _MOST_WAITING:
            raise FatalError(
                f"input.text: more than {_MOST_WAITING} sentences wait to be spoken", param="text"
            )
        for begun in sentences:
            growing = begun if isinstance(begun, GrowingText) else None
            text = begun.text if isinstance(begun, GrowingText) else begun
            content = replace(self._content, text=text, growing=growing)
            sentence = _Sentence(content, self._config, self._utterance_index, self._sentences)
            self._waiting.put_nowait(sentence)
            self._sentences += 1
            self._unspoken += 1

    def _begin_utterance(self) -> None:
        self._utterance_index += 1
        self._sentences, self._has_text = 0, False

    async def _cancel(self, played_ms: int | None) -> None:
        """Drops all text that was not spoken, and keeps the end of the connection.

        While a sentence is being stopped, its `audio.cancelled` answers further cancels too.
        """
        self._splitter.close()
        if self._has_text:
            self._begin_utterance()
        self._unspoken = 0
        while not self._waiting.empty():
            self._waiting.get_nowait()
            self._waiting.task_done()
        if self._heard is None:
            heard, self._playout = _heard(self._playout, played_ms), Playout()
            # A sentence that has just ended cannot be cancelled.
            if self._speaking is not None and self._speaking.cancel():
                self._heard = heard
            else:
                await self._send("audio.cancelled", **_NOWHERE, **heard)
        if self._closing:
            self._waiting.put_nowait(_Close())

    async def _speak_all(self) -> None:
        while not isinstance(part := await self._next(), _Close):
            if isinstance(part, _End):
                await self._send(
                    "session.done",
                    utterance_index=part.utterance_index,
                    total_sentences=part.sentences,
                )
            else:
                self._unspoken -= 1
                self._begun = False
                self._speaking = asyncio.create_task(self._say(part))
                self._restart_idle_clock()  # stops it; it runs while words wait for their end
                await asyncio.wait({self._speaking})
                task, self._speaking = self._speaking, None
                heard, self._heard = self._heard, None
                if heard is None:
                    task.result()
                else:
                    position = part.position if self._begun else _NOWHERE
                    await self._send("audio.cancelled", **position, **heard)
            self._waiting.task_done()
            self._restart_idle_clock()

    async def _say(self, sentence: _Sentence) -> None:
        config, content = sentence.config, sentence.content
        turn = self._caller.turn(
            content,
            config.audio_format,
            config.sample_rate,
            whole=not config.stream_audio,
            mono=True,
            further=True,
            words=config.word_timestamps,
            # If another sentence follows, the times must be there before its audio is due.
            words_within=lambda: chunks.due_s - _NEXT_S if self._unspoken else math.inf,
        )
        chunks = _Chunks(sentence, turn.rate_hz)
        text = await turn.spoken_text()
        start: dict[str, Any] = {"sentence_text": text, "format": config.audio_format}
        start |= {"sample_rate": turn.rate_hz, "channels": 1}
        self._begun = True
        await self._send("audio.start", **sentence.position, **start)
        sent, samples, error, playout = 0, 0, False, self._playout
        playout.begin(f"{text} ", sentence.utterance_index)
        try:
            async with aclosing(turn.events()) as events:
                async for event in events:
                    if isinstance(event, Audio):
                        seconds = (event.samples - samples) / turn.rate_hz
                        samples = event.samples
                        if content.growing is not None:
                            playout.extend(f"{content.growing.text} ")
                        playout.add(seconds, turn.whole_s)
                        await self._send_audio(event, chunks, sentence)
                        sent += len(event.content)
                    elif isinstance(event, Words):
                        playout.align(event.times or ())
                        fields = chunks.fields(b"", turn.samples, event.times)
                        await self._send("audio.chunk", **fields)
        except GatewayError as failure:
            error = True
            await self._send_json(error_event(failure, sentence.position))
        finally:
            if content.growing is not None:
                content.growing.end()  # further words begin another text
        await self._send(
            "audio.done",
            **sentence.position,
            total_bytes=sent,
            samples=turn.samples if sent else 0,
            usage=turn.ended.usage,
            error=error,
            **turn.ended.fields,
        )

    async def _send_audio(self, audio: Audio, chunks: _Chunks, sentence: _Sentence) -> None:
        config = sentence.config
        if config.word_timestamps:
            await self._send("audio.chunk", **chunks.fields(audio.content, audio.samples))
        elif config.events == "json":
            content = base64.b64encode(audio.content).decode()
            await self._send("audio.delta", **sentence.position, audio=content)
        else:
            await self._send_bytes(audio.content)
        if config.stream_audio:
            counts = {"samples": audio.samples, "tokens": audio.tokens}
            await self._send("audio.progress", **sentence.position, **counts)

    async def _send(self, kind: str, **content: Any) -> None:
        await self._send_json({"type": kind, **content})

    def _speaks(self) -> bool:
        return self._speaking is not None or not self._waiting.empty()

    @staticmethod
    def _checked(kind: type[_BodyT], message: Any) -> _BodyT:
        try:
            return kind.model_validate(message)
        except ValidationError as error:
            field, sentence = problem(list(error.errors()))
            raise RequestError(sentence, param=field) from None


def _heard(playout: Playout, played_ms: int | None = None) -> dict[str, Any]:
    """Fields of an event: the utterance that was played last, and its text that was heard."""
    played_s = None if played_ms is None else played_ms / 1000
    utterance_index, text = playout.heard(played_s)
    return {"heard_utterance_index": utterance_index, "heard_text": text.rstrip()}


def error_event(error: GatewayError, position: Mapping[str, int] | None = None) -> dict[str, Any]:
    """Event of an error: the sentence as vLLM-Omni sends it, and OpenAI's object."""
    body = error.body
    return {"type": "error", "message": body["error"]["message"], **(position or {}), **body}

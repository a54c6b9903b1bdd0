"""WebSockets: text arrives in pieces, and its sentences are spoken one after the other.

Messages are JSON objects with a `type`. The client sends `session.config` once, then `input.text`
any number of times, and `input.done`. `cancel` stops the speech and drops the text that was not
spoken; the socket stays open for other text.

The server sends `audio.start` before the audio of a sentence, then its audio, and after each piece
of audio `audio.progress`, with the number of samples and of speech tokens that the client has been
sent. `audio.done` ends a sentence, `audio.cancelled` answers a cancellation, `session.done` answers
`input.done`, and `error` reports a problem. A cancellation also revokes `input.done`.
"""

from __future__ import annotations

import asyncio
import base64
import json
import math
from collections.abc import Awaitable, Sequence
from contextlib import aclosing, suppress
from typing import Any, TypeVar

import anyio
from fastapi import WebSocket, WebSocketDisconnect
from pydantic import BaseModel, ValidationError

from token2wav_gateway.access import Holder
from token2wav_gateway.encoding import Encoder
from token2wav_gateway.errors import BusyError, GatewayError, RequestError
from token2wav_gateway.gateway import Gateway
from token2wav_gateway.requests import SessionConfig, SocketMessage, problem
from token2wav_gateway.sentences import SentenceSplitter
from token2wav_gateway.speech import Progress, Text

_BodyT = TypeVar("_BodyT", bound=BaseModel)
_MOST_WAITING = 256  # sentences that wait to be spoken
_SLICE = 256  # characters of a message that are split into sentences at once
_CLOSE_S = 1.0  # for the last messages to a client, which may have stopped reading
# Codes of RFC 6455 and its registry.
_POLICY, _INTERNAL, _TRY_LATER, _GOING_AWAY = 1008, 1011, 1013, 1001
_FIRST_SERVER_ERROR = 500  # HTTP status


class Sockets:
    """Open WebSockets of a gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._open: set[WebSocket] = set()
        self._ending = asyncio.Event()

    @property
    def count(self) -> int:
        """Number of open sockets."""
        return len(self._open)

    def drain(self) -> None:
        """Ends each session after the sentences that it has received, and refuses new ones."""
        self._ending.set()

    async def serve(self, socket: WebSocket) -> None:
        """Serves a socket until it is closed."""
        gateway = self._gateway
        await socket.accept()
        try:
            if self._ending.is_set():
                raise BusyError("gateway: shutting down; try again later")
            if len(self._open) >= gateway.settings.limits.sockets:
                raise BusyError(f"gateway: {len(self._open)} sockets are open; try again later")
            with gateway.access.admitted(socket.headers.get("authorization")) as holder:
                self._open.add(socket)
                gateway.metrics.sockets.set(len(self._open))
                await _Session(gateway, socket, holder, self._ending).run()
        except WebSocketDisconnect:
            pass
        except GatewayError as error:
            gateway.metrics.refused.labels(error.status).inc()
            with suppress(RuntimeError, WebSocketDisconnect), anyio.move_on_after(_CLOSE_S):
                await socket.send_json({"type": "error", **error.body})
                await socket.close(_close_code(error))
        finally:
            self._open.discard(socket)
            gateway.metrics.sockets.set(len(self._open))
            with suppress(RuntimeError, WebSocketDisconnect), anyio.move_on_after(_CLOSE_S):
                await socket.close()

    async def close(self) -> None:
        """Closes all sockets, because the gateway ends."""
        for socket in list(self._open):
            with suppress(RuntimeError, WebSocketDisconnect), anyio.move_on_after(_CLOSE_S):
                await socket.close(_GOING_AWAY)


class _Session:
    """Session of one socket: one task reads messages, another one speaks sentences.

    Args:
        holder: holder of the client's key, for which each sentence counts as a request.
        ending: event after which the session ends as soon as all sentences were spoken.
    """

    def __init__(
        self, gateway: Gateway, socket: WebSocket, holder: Holder, ending: asyncio.Event
    ) -> None:
        self._gateway = gateway
        self._socket = socket
        self._holder = holder
        self._ending = ending
        self._sentences: asyncio.Queue[str | None] = asyncio.Queue()
        self._splitter = SentenceSplitter(gateway.settings.limits.text_characters)
        self._sentence_task: asyncio.Task[None] | None = None
        self._waiting = anyio.CancelScope()  # for a message
        self._count = 0

    async def run(self) -> None:
        self._config = config = self._checked(SessionConfig, await self._receive())
        if config.model is not None:
            self._gateway.check_model(config.model)
        self._voice = self._gateway.voices.get(config.voice)
        parts = (self._read(), self._speak_all(), self._drain())
        tasks = {asyncio.create_task(part) for part in parts}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            if self._sentence_task is not None:
                tasks.add(self._sentence_task)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self) -> None:
        """Reads messages until the client disconnects."""
        while True:
            message = self._checked(SocketMessage, await self._receive())
            if message.text is not None:
                for start in range(0, len(message.text), _SLICE):
                    self._append(self._splitter.feed(message.text[start : start + _SLICE]))
                    await asyncio.sleep(0)  # lets other clients get their audio
            elif message.type == "input.done":
                self._append([*self._splitter.close(), None])
            else:
                self._splitter.close()
                while not self._sentences.empty():
                    self._sentences.get_nowait()
                    self._sentences.task_done()
                # A sentence that has just ended cannot be cancelled.
                if self._sentence_task is None or not self._sentence_task.cancel():
                    await self._send("audio.cancelled", sentence_index=None)

    def _append(self, sentences: Sequence[str | None]) -> None:
        if self._sentences.qsize() + len(sentences) > _MOST_WAITING:
            raise RequestError(
                f"input.text: more than {_MOST_WAITING} sentences wait to be spoken", param="text"
            )
        for sentence in sentences:
            self._sentences.put_nowait(sentence)

    async def _speak_all(self) -> None:
        """Speaks sentences until `input.done`."""
        while (sentence := await self._sentences.get()) is not None:
            self._sentence_task = asyncio.create_task(self._say(sentence))
            await asyncio.wait({self._sentence_task})
            task, self._sentence_task = self._sentence_task, None
            if task.cancelled():
                await self._send("audio.cancelled", sentence_index=self._count)
            else:
                task.result()
            self._count += 1
            self._sentences.task_done()
            self._set_idle_clock()
        await self._send("session.done", total_sentences=self._count)

    async def _drain(self) -> None:
        """Closes the socket after the last sentence, if the gateway ends."""
        await self._ending.wait()
        await self._sentences.join()
        with anyio.move_on_after(_CLOSE_S):
            await self._socket.close(_GOING_AWAY)

    async def _say(self, sentence: str) -> None:
        config, position = self._config, {"sentence_index": self._count}
        encoder, progress = Encoder(config.response_format), Progress()
        text = Text(sentence, self._voice, config.instructions)
        start = {"sentence_text": sentence, "format": config.response_format}
        await self._send("audio.start", **position, **start, sample_rate=24_000)
        try:
            self._holder.count_request()
            async with aclosing(self._gateway.speech.speak(text, progress)) as chunks:
                async for chunk in chunks:
                    progress.advance(chunk)
                    await self._send_audio(encoder.encode(chunk.audio), progress)
                await self._send_audio(encoder.finish(), progress)
        except GatewayError as error:
            await self._send("error", **position, **error.body)
            return
        await self._send("audio.done", **position, samples=progress.samples)

    async def _send(self, kind: str, **content: Any) -> None:
        await self._in_time(self._socket.send_json({"type": kind, **content}))

    async def _send_audio(self, piece: bytes, progress: Progress) -> None:
        """Sends a piece of audio and the progress with it, unless the encoder keeps all samples."""
        if not piece:
            return
        if self._config.events == "json":
            await self._send("audio.delta", audio=base64.b64encode(piece).decode())
        else:
            await self._in_time(self._socket.send_bytes(piece))
        await self._send(
            "audio.progress",
            sentence_index=self._count,
            samples=progress.samples,
            tokens=progress.spoken_tokens,
        )

    async def _in_time(self, message: Awaitable[None]) -> None:
        """Awaits a message to the client.

        Raises:
            WebSocketDisconnect: the client takes no more bytes.
        """
        try:
            with anyio.fail_after(self._gateway.settings.limits.idle_s):
                await message
        except TimeoutError:
            raise WebSocketDisconnect(_POLICY, "the client has stopped reading") from None

    async def _receive(self) -> Any:
        """Receives a message.

        Raises:
            RequestError: the message is no JSON, or the client sent nothing for too long while
                nothing is spoken.
        """
        try:
            # asyncio.wait_for before Python 3.12 ignores a cancellation that meets a message.
            with anyio.fail_after(None) as self._waiting:
                self._set_idle_clock()
                text = await self._socket.receive_text()
            return json.loads(text)
        except TimeoutError:
            idle_s = self._gateway.settings.limits.idle_s
            raise RequestError(f"socket: no message for {idle_s:g} s") from None
        except (ValueError, KeyError, RecursionError):  # the last one for too many brackets
            raise RequestError("socket: expected a JSON object as text") from None

    def _set_idle_clock(self) -> None:
        """Starts the idle clock of the client anew, or stops it while sentences are spoken."""
        speaks = self._sentence_task is not None or not self._sentences.empty()
        idle_s = self._gateway.settings.limits.idle_s
        self._waiting.deadline = math.inf if speaks else anyio.current_time() + idle_s

    @staticmethod
    def _checked(kind: type[_BodyT], message: Any) -> _BodyT:
        try:
            return kind.model_validate(message)
        except ValidationError as error:
            field, sentence = problem(list(error.errors()))
            raise RequestError(sentence, param=field) from None


def _close_code(error: GatewayError) -> int:
    if isinstance(error, BusyError):
        return _TRY_LATER
    return _POLICY if error.status < _FIRST_SERVER_ERROR else _INTERNAL

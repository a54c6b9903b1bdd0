"""Language model: an OpenAI-style server, which answers a prompt with speech tokens as server-sent
events.
"""

from __future__ import annotations

import asyncio
import json
import operator
import socket
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import anyio
import numpy as np
from aiohttp import AddrInfoType
from numpy.typing import NDArray

from token2wav_gateway.errors import ModelError, ModelTimeoutError
from token2wav_gateway.settings import LanguageModelSettings
from token2wav_gateway.speech.content import Text
from token2wav_gateway.speech.events import EventReader
from token2wav_gateway.speech.template import Template, TokenReader

_EVENTS = "text/event-stream"
_LINES = "application/jsonl"
_UTF_8 = ("utf-8", "utf8")
_END = "[DONE]"
_CUT_OFF = "length"  # reason of an answer that has its largest number of tokens
_BUFFERED = 32 << 10  # bytes of an answer that wait, in the socket and after it
_QUOTED = 1024  # bytes of an answer that is an error
# Errors of reading a piece of an answer that has another form, huge numbers or too many brackets.
_NO_PIECE = (ValueError, TypeError, AttributeError, LookupError, OverflowError, RecursionError)
_REFUSED = (401, 403)  # statuses of a server that does not accept the key
# Python before 3.11 has two classes for a time-out.
_TIMEOUTS = (TimeoutError, asyncio.TimeoutError)
_BROKEN = (aiohttp.ClientError, OSError, *_TIMEOUTS)


@dataclass
class Answer:
    """Answer of a language model, as far as it has arrived, besides its speech tokens.

    Attributes:
        cut_off: whether it has ended at its largest number of tokens (`finish_reason: length`).
        skipped: numbers that are no speech, by reason, as `TokenReader.skipped`.
    """

    cut_off: bool = False
    skipped: Mapping[str, int] = field(default_factory=dict)


class LanguageModel:
    """Client of a language model server.

    Create it in the event loop that uses it.

    Args:
        most_tokens: largest number of tokens in an answer.

    Attributes:
        token_timeout_s: seconds without a byte of an answer after which it has failed.
    """

    def __init__(
        self, settings: LanguageModelSettings, template: Template, most_tokens: int
    ) -> None:
        self.template = template
        self.token_timeout_s = settings.token_timeout_s
        self._settings = settings
        self._most_tokens = most_tokens
        self._longest_head_s = settings.connect_timeout_s + settings.token_timeout_s
        key = settings.key()
        # A few compressed bytes can hold gigabytes, so compressed answers are refused.
        headers = {"accept": _EVENTS, "accept-encoding": "identity"}
        if key:
            headers["authorization"] = f"Bearer {key}"
        # Each request has a connection of its own. If connections were kept, a request could meet
        # the moment in which the server closes one, and its text would fail.
        self._http = aiohttp.ClientSession(
            headers=headers,
            timeout=aiohttp.ClientTimeout(
                connect=settings.connect_timeout_s, sock_read=settings.token_timeout_s
            ),
            connector=aiohttp.TCPConnector(limit=0, force_close=True, socket_factory=_small_socket),
            read_bufsize=_BUFFERED,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
        )

    async def close(self) -> None:
        await self._http.close()

    async def check(self) -> None:
        """Checks that the server answers and accepts the key. It reads the status alone.

        Raises:
            ModelError: it does not.
        """
        timeout = aiohttp.ClientTimeout(total=self._settings.connect_timeout_s)
        request = self._http.get(self._url("models"), timeout=timeout, allow_redirects=False)
        try:
            async with request as answer:
                status = answer.status
        except _BROKEN as error:
            raise _model_error(error) from None
        if status >= 500 or status in _REFUSED:
            raise ModelError(f"language model: status {status}")

    async def tokens(
        self,
        answer: Answer,
        text: Text,
        vocabulary: Sequence[int] = (),
        headers: Mapping[str, str] | None = None,
        further: AsyncGenerator[str, None] | None = None,
    ) -> AsyncGenerator[NDArray[np.int32], None]:
        """Asks for an answer, and yields its speech tokens as they arrive, (n,) or (n, codebooks).

        If the caller stops iterating, the connection is closed, which cancels the request.

        Args:
            answer: changes while the answer arrives.
            vocabulary: as for `TokenReader`. Numbers outside it are left out.
            headers: further headers of the request.
            further: text after `text`, for a template with `text: stream`.

        Raises:
            ModelError: the server cannot be reached, refuses the request, sends no tokens, sends
                too many, ends before its answer is complete, or sends something that is no answer.
            ModelTimeoutError: the server sends nothing for too long.
        """
        reader, count, complete = TokenReader(self.template, vocabulary), 0, False
        answer.skipped = reader.skipped
        body = self.template.body(self._settings.model, text)
        async with aclosing(self._events(body, headers, further)) as events:
            async for event in events:
                if event.strip() == _END:
                    complete = True
                    break
                tokens, reason = self._read(event, reader)
                complete = bool(reason) or reader.ended
                answer.cut_off = reason == _CUT_OFF and not reader.ended
                count += len(tokens)
                if count > self._most_tokens:
                    raise ModelError(
                        f"language model: more than {self._most_tokens} speech tokens for one text"
                    )
                if len(tokens):
                    yield tokens
                if complete:
                    break
        rest = reader.close()
        if len(rest):
            yield rest
        if not count + len(rest):
            skipped = sum(reader.skipped.values())
            hint = f"; numbers that are no speech: {skipped}" if skipped else ""
            raise ModelError(f"language model: the answer contains no speech token{hint}")
        if not complete:
            raise ModelError("language model: the answer broke off")

    async def _events(
        self,
        body: dict[str, Any],
        headers: Mapping[str, str] | None,
        further: AsyncGenerator[str, None] | None,
    ) -> AsyncGenerator[str, None]:
        """Sends a request, and yields the data of the events of the answer."""
        url, reader = self._url(self.template.path), EventReader()
        content: dict[str, Any] = {"json": body}
        if self.template.text == "stream":
            content = {"data": _lines(body, further)}
            headers = {**(headers or {}), "content-type": _LINES}
        try:
            # The time-out of aiohttp starts again after each 1xx response.
            with anyio.fail_after(self._longest_head_s):
                answer = await self._http.post(
                    url, **content, headers=headers, allow_redirects=False
                )
            async with answer:
                await _check_head(answer)
                async for piece in answer.content.iter_any():
                    for event in reader.feed(piece):
                        yield event
        except _BROKEN as error:
            raise _model_error(error) from None

    def _url(self, path: str) -> str:
        return f"{self._settings.url.rstrip('/')}/{path}"

    def _read(self, event: str, reader: TokenReader) -> tuple[NDArray[np.int32], Any]:
        """Reads the tokens of an event, and the reason why the answer ends; none if it does not.

        An event is a piece of a chat, or of a completion. Of several answers to a prompt, the one
        with index 0 is read.
        """
        try:
            piece = json.loads(event)
            if error := piece.get("error"):
                raise ModelError("language model: error", quote=str(error)[:200])
            choices: list[dict[str, Any]] = piece.get("choices") or []
            choice = next((choice for choice in choices if not choice.get("index")), {})
            reason = choice.get("finish_reason")
            if self.template.read == "token_ids":
                ids = choice.get("token_ids") or []
                return reader.feed_ids([operator.index(number) for number in ids]), reason
            delta = choice.get("delta") or {}
            # StepFun's server sends speech tokens in a field of its own.
            speech = (delta.get("tts_content") or {}).get("tts_audio")
            text = speech or delta.get("content") or choice.get("text") or ""
            return reader.feed(str(text)), reason
        except _NO_PIECE:
            raise ModelError(
                "language model: an event is no piece of an answer", quote=repr(event[:100])
            ) from None


async def _lines(
    body: dict[str, Any], further: AsyncGenerator[str, None] | None
) -> AsyncGenerator[bytes, None]:
    """Yields the lines of a request whose text goes on."""
    yield f"{json.dumps(body)}\n".encode()
    if further is not None:
        async with aclosing(further):
            async for text in further:
                yield f"{json.dumps({'text': text})}\n".encode()


async def _check_head(answer: aiohttp.ClientResponse) -> None:
    """Checks the status and the headers of an answer that must be a stream of events."""
    if answer.status != 200:
        text = (await answer.content.read(_QUOTED)).decode(errors="replace")
        raise ModelError(f"language model: status {answer.status}", quote=_line(text))
    if coding := answer.headers.get("content-encoding"):
        raise ModelError("language model: the answer is compressed", quote=coding[:32])
    if answer.content_type != _EVENTS or (answer.charset or "utf-8").lower() not in _UTF_8:
        raise ModelError(
            f"language model: the answer is not {_EVENTS} in UTF-8",
            quote=answer.headers.get("content-type", "")[:100],
        )


def _small_socket(address: AddrInfoType) -> socket.socket:
    """Opens a socket with a small buffer: it holds what is not read while a client is slow."""
    family, kind, protocol, _, _ = address
    opened = socket.socket(family, kind, protocol)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFERED)
    return opened


def _model_error(error: Exception) -> ModelError:
    if isinstance(error, _TIMEOUTS):
        return ModelTimeoutError("language model: no answer in time")
    if isinstance(error, OSError):
        return ModelError(f"language model: {_line(error)}")
    if isinstance(error, aiohttp.ClientResponseError):
        return ModelError("language model: the answer is not HTTP", quote=_line(error.message))
    return ModelError("language model: the answer broke off", quote=_line(error))


def _line(text: object) -> str:
    return " ".join(str(text).split())[:200]

"""Language model: an OpenAI-style server, which answers a prompt with speech tokens as server-sent
events.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import httpx
import numpy as np
from httpx_sse import ServerSentEvent, SSEError, aconnect_sse
from numpy.typing import NDArray

from token2wav_gateway.errors import ModelError, ModelTimeoutError
from token2wav_gateway.settings import LanguageModelSettings
from token2wav_gateway.template import Template, TokenReader

_LONGEST_EVENT = 1 << 20  # bytes of one server-sent event
_END_OF_EVENT = re.compile(rb"\n\r?\n")
_END = "[DONE]"
# Errors of reading a piece of an answer that has another form, huge numbers or too many brackets.
_NO_PIECE = (ValueError, TypeError, AttributeError, LookupError, OverflowError, RecursionError)
_REFUSED = (401, 403)  # statuses of a server that does not accept the key


class LanguageModel:
    """Client of a language model server.

    Args:
        settings: address and time-outs of the server.
        template: prompt and tokens of the model.
        most_tokens: largest number of tokens of an answer.
    """

    def __init__(
        self, settings: LanguageModelSettings, template: Template, most_tokens: int
    ) -> None:
        self.template = template
        self._settings = settings
        self._most_tokens = most_tokens
        key = settings.key()
        # A few compressed bytes can hold gigabytes, so compressed answers are refused.
        headers = {"accept-encoding": "identity"}
        if key:
            headers["authorization"] = f"Bearer {key}"
        self._http = httpx.AsyncClient(
            base_url=settings.url.rstrip("/") + "/",
            headers=headers,
            timeout=httpx.Timeout(settings.token_timeout_s, connect=settings.connect_timeout_s),
            limits=httpx.Limits(max_connections=None),
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def check(self) -> None:
        """Checks that the server answers and accepts the key.

        Raises:
            ModelError: it does not.
        """
        try:
            answer = await self._http.get("models", timeout=self._settings.connect_timeout_s)
        except httpx.HTTPError as error:
            raise _model_error(error) from None
        if answer.is_server_error or answer.status_code in _REFUSED:
            raise ModelError(f"language model: status {answer.status_code}")

    async def tokens(self, **prompt: Any) -> AsyncGenerator[NDArray[np.int32], None]:
        """Asks for an answer, and yields its speech tokens as they arrive, (n,) or (n, codebooks).

        If the caller stops iterating, the connection is closed, which cancels the request.

        Args:
            prompt: arguments of `Template.body`, without the model.

        Raises:
            ModelError: the server cannot be reached, refuses the request, sends no tokens, sends
                too many, ends before its answer is complete, or sends something that is no answer.
            ModelTimeoutError: the server sends nothing for too long.
        """
        reader, count, complete = TokenReader(self.template), 0, False
        body = self.template.body(model=self._settings.model, **prompt)
        async with aclosing(self._events(body)) as events:
            async for event in events:
                if event.data.strip() == _END:
                    complete = True
                    break
                tokens, last = self._read(event, reader)
                complete = complete or last
                count += len(tokens)
                if count > self._most_tokens:
                    raise ModelError(
                        f"language model: more than {self._most_tokens} speech tokens for one text"
                    )
                if len(tokens):
                    yield tokens
        rest = reader.close()
        if len(rest):
            yield rest
        if not count + len(rest):
            raise ModelError("language model: the answer contains no speech token")
        if not complete:
            raise ModelError("language model: the answer broke off")

    async def _events(self, body: dict[str, Any]) -> AsyncGenerator[ServerSentEvent, None]:
        try:
            async with aconnect_sse(self._http, "POST", self.template.path, json=body) as source:
                response = source.response
                if response.is_error:
                    text = (await _start_of(response)).decode("utf-8", errors="replace")
                    raise ModelError(
                        f"language model: status {response.status_code}",
                        quote=" ".join(text.split())[:200],
                    )
                if coding := response.headers.get("content-encoding"):
                    raise ModelError(f"language model: the answer is compressed ({coding[:32]})")
                assert isinstance(response.stream, httpx.AsyncByteStream)
                response.stream = _BoundedEvents(response.stream)
                async for event in source.aiter_sse():
                    yield event
        except (httpx.HTTPError, SSEError) as error:
            raise _model_error(error) from None

    def _read(self, event: ServerSentEvent, reader: TokenReader) -> tuple[NDArray[np.int32], bool]:
        """Reads the tokens of an event, and whether the event ends the answer.

        An event is a piece of a chat, or of a completion.
        """
        try:
            answer = json.loads(event.data)
            if "error" in answer:
                raise ModelError("language model: error", quote=str(answer["error"])[:200])
            choices = answer.get("choices") or [{}]
            choice = choices[0]
            last = bool(choice.get("finish_reason"))
            if self.template.read == "token_ids":
                ids = choice.get("token_ids") or []
                return reader.feed_ids([int(number) for number in ids]), last
            piece = (choice.get("delta") or {}).get("content") or choice.get("text") or ""
            return reader.feed(str(piece)), last
        except _NO_PIECE:
            raise ModelError(
                "language model: an event is no piece of an answer", quote=repr(event.data[:100])
            ) from None


class _BoundedEvents(httpx.AsyncByteStream):
    """Body of a response with bounded events, because a parser keeps all lines of an event."""

    def __init__(self, stream: httpx.AsyncByteStream) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncGenerator[bytes, None]:
        length, end = 0, b""
        async for piece in self._stream:
            # The line breaks at the end of an event may arrive in two pieces.
            parts = _END_OF_EVENT.split(end + piece)
            length = len(parts[-1]) if len(parts) > 1 else length + len(piece)
            if length > _LONGEST_EVENT:
                raise ModelError(f"language model: an event is longer than {_LONGEST_EVENT} bytes")
            end = (end + piece)[-2:]
            yield piece

    async def aclose(self) -> None:
        await self._stream.aclose()


async def _start_of(response: httpx.Response) -> bytes:
    async for piece in response.aiter_bytes(1024):
        return piece
    return b""


def _model_error(error: Exception) -> ModelError:
    reason = " ".join(str(error).split())[:200] or type(error).__name__
    if isinstance(error, httpx.TimeoutException):
        return ModelTimeoutError(f"language model: no answer in time ({type(error).__name__})")
    return ModelError(f"language model: {reason}")

"""The same utterance as in `stream`, for asyncio: one task instead of threads, and no locks."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Any

import grpc
import numpy.typing as npt
from tenacity import AsyncRetrying

from token2wav_client.audio import AudioChunk
from token2wav_client.call import Call
from token2wav_client.errors import (
    ClientError,
    ProtocolError,
    ResponseTimeoutError,
    ServerUnavailable,
    UtteranceClosedError,
)
from token2wav_client.grpc_errors import error_of_rpc
from token2wav_client.retry import policy

_GRACE_S = 2.0  # for the server to end its side of a complete utterance before it is cancelled


class AsyncUtterance:
    """Tokens in, chunks out. Made by `AsyncClient.open`; use it in an `async with`, and iterate with `async for`.

    `push`, `finish`, `cancel` and `fail` never wait, and are plain functions for that reason. All belong to the
    event loop in which the utterance was opened; one task may iterate. Iterating ends after the final chunk, or after
    `cancel`, and raises what went wrong otherwise. Chunks that wait to be taken are kept in memory.
    """

    def __init__(
        self,
        start_rpc: Callable[[AsyncIterator[Any]], Any],
        call: Call,
        *,
        url: str,
        response_timeout_s: float,
        retries: int,
        on_close: Callable[[AsyncUtterance], None],
    ) -> None:
        self._start_rpc = start_rpc
        self._call = call
        self._url = url
        self._response_timeout_s = response_timeout_s
        self._on_close = on_close
        self._chunks: deque[AudioChunk] = deque()
        self._failure: BaseException | None = None
        self._cancelled = False
        self._changed = asyncio.Event()
        self._clock = asyncio.get_running_loop().time
        self._outbox: asyncio.Queue[Any] = asyncio.Queue()
        self._rpc: Any = None
        self._broken: ClientError | None = None  # why this side broke off the attempt that runs
        self._attempts = 0
        self._retrying = AsyncRetrying(**policy(retries))
        self._receiver = asyncio.create_task(self._receive(), name=f"utterance-{self.id}")

    @property
    def id(self) -> str:
        """Of the utterance on the server; another one for every attempt."""
        return self._call.id

    @property
    def complete(self) -> bool:
        """Whether the final chunk has arrived, with exactly the samples that the tokens make."""
        return self._call.complete

    @property
    def tokens(self) -> int:
        """Tokens sent so far."""
        return self._call.tokens

    def push(self, tokens: npt.ArrayLike) -> None:
        """Send tokens, integers of shape (tokens,); never waits for the server. Raises as `Utterance.push` does."""
        self._send(tokens, end=False)

    def finish(self, tokens: npt.ArrayLike = ()) -> None:
        """Send the last tokens, if any, and say that there are no more. Raises as `Utterance.finish` does."""
        self._send(tokens, end=True)

    def cancel(self) -> None:
        """Stop at once and drop chunks that nobody took; iterating ends. Harmless when called again."""
        self._cancelled = True
        self._chunks.clear()
        self._stop()

    def fail(self, error: BaseException) -> None:
        """Stop at once and let iterating raise `error`, unless the utterance is over or has failed before."""
        if not self._over:
            self._failure = error
            self._stop()

    async def close(self) -> None:
        """End the utterance: gracefully if it is complete, else by cancelling. The server is told before this waits."""
        try:
            if self.complete:
                await asyncio.wait([self._receiver], timeout=_GRACE_S)
        finally:
            self.cancel()
            self._on_close(self)
        await asyncio.wait([self._receiver])

    async def __aenter__(self) -> AsyncUtterance:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    def __aiter__(self) -> AsyncIterator[AudioChunk]:
        return self

    async def __anext__(self) -> AudioChunk:
        while not self._chunks:
            if self._failure:
                raise self._failure
            if self._cancelled or self._call.complete:
                raise StopAsyncIteration
            await self._wait()
        return self._chunks.popleft()

    @property
    def _over(self) -> bool:
        return bool(self._failure or self._cancelled or self._call.complete)

    async def _wait(self) -> None:
        """Wait for a change, or break off the attempt if the server is silent for too long."""
        self._changed.clear()
        owed_since = self._call.owed_since
        patience_s = None if owed_since is None else owed_since + self._response_timeout_s - self._clock()
        try:
            await asyncio.wait_for(self._changed.wait(), patience_s)
        except asyncio.TimeoutError:  # another class than TimeoutError before Python 3.11
            self._broken = ResponseTimeoutError(
                f"the server at {self._url} did not answer for {self._response_timeout_s:g} s"
            )
            self._call.interrupt()
            self._rpc.cancel()

    def _send(self, values: npt.ArrayLike, *, end: bool) -> None:
        if self._failure:
            raise self._failure
        if self._cancelled:
            raise UtteranceClosedError("the utterance is cancelled and takes no more tokens")
        self._outbox.put_nowait(self._call.request(values, self._clock(), end=end))
        if end:
            self._outbox.put_nowait(None)
        self._changed.set()

    def _stop(self) -> None:
        self._receiver.cancel()
        self._changed.set()

    async def _receive(self) -> None:
        try:
            await self._retrying(self._attempt)
        except ClientError as error:
            self.fail(error)
        except Exception as error:  # whoever iterates must learn of it, or it would wait for ever
            self.fail(ProtocolError(f"the server's response cannot be read ({error})"))

    async def _attempt(self) -> None:
        """Speak the utterance once; returns when it is over in any way but by an error of the server's."""
        if self._attempts:
            self._outbox = asyncio.Queue()
            for request in self._call.again(self._clock()):
                self._outbox.put_nowait(request)
            if self._call.ended:
                self._outbox.put_nowait(None)
        self._attempts += 1
        self._rpc = rpc = self._start_rpc(_until_none(self._outbox))
        self._changed.set()
        try:
            async for message in rpc:
                self._accept(message)
            error: ClientError = ServerUnavailable(
                f"the server at {self._url} closed the stream before the final chunk"
            )
        except ClientError as refused:
            error = refused
        except grpc.RpcError as failed:
            error = error_of_rpc(failed, self._url)
        except asyncio.CancelledError:
            if self._broken is None:
                raise
            error = self._broken
        finally:
            rpc.cancel()
        if self._over:
            return
        self._call.interrupt()
        error, self._broken = self._broken or error, None
        raise error

    def _accept(self, message: Any) -> None:
        chunk = self._call.accept(message, self._clock())
        if chunk and not self._cancelled:
            self._chunks.append(chunk)
        self._changed.set()


async def _until_none(outbox: asyncio.Queue[Any]) -> AsyncIterator[Any]:
    while (request := await outbox.get()) is not None:
        yield request

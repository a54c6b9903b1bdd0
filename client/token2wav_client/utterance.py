"""Base of both kinds of utterance: keeps its state, its attempts and its end; only waiting is left
to them.

The client for threads is not the asyncio one run in a thread of its own. That was tried: a chunk
takes longer through the loop, the more so with several streams.

The generated gRPC stub is used rather than tritonclient's InferenceServerClient, because that one
holds a single stream per connection, says nothing when a server ends the stream early, and leaves a
thread behind per cancelled stream.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import grpc
import numpy.typing as npt

from token2wav_client.audio import AudioChunk
from token2wav_client.call import Call
from token2wav_client.errors import (
    ClientError,
    ProtocolError,
    ResponseTimeoutError,
    ServerUnavailable,
    UtteranceClosedError,
    error_of_rpc,
)

CLOSE_GRACE_S = 2.0  # for the server to end its side of a complete utterance before it is cancelled


class BaseUtterance(ABC):
    """Utterance on a gRPC stream: sends tokens while chunks arrive, in one attempt or several.

    Args:
        start_rpc: starts the stream on an iterator of requests.
        call: makes the requests and reads the responses.
        url: of the server, for messages.
        response_timeout_s: as `BaseClient` takes it.
        retries: as `BaseClient` takes them.
        on_close: called with the utterance when it is closed.
    """

    _guard: AbstractContextManager[Any] = nullcontext()  # held while the state is read or changed
    _new_outbox: Any  # makes a queue for requests to an attempt; None in it ends them

    def __init__(
        self,
        start_rpc: Callable[[Any], Any],
        call: Call,
        *,
        url: str,
        response_timeout_s: float,
        retries: int,
        on_close: Callable[[Any], None],
    ) -> None:
        self._start_rpc = start_rpc
        self._url = url
        self._response_timeout_s = response_timeout_s
        self._on_close = on_close
        self._call = call
        self._chunks: deque[AudioChunk] = deque()
        self._failure: BaseException | None = None
        self._cancelled = False
        self._outbox = self._new_outbox()
        self._rpc: Any = None
        self._broken: ClientError | None = None  # why this side broke off the attempt that runs
        self._attempts = 0
        self._begin(retries)

    @property
    def id(self) -> str:
        """Name of the utterance on the server; every attempt has another one."""
        return self._call.id

    @property
    def complete(self) -> bool:
        """Whether the final chunk has arrived, with exactly the samples that the tokens make."""
        return self._call.complete

    @property
    def tokens(self) -> int:
        """Number of tokens sent so far."""
        return self._call.tokens

    def push(self, tokens: npt.ArrayLike) -> None:
        """Send tokens; never waits for the server.

        The first push carries the voice, so pushing no tokens ahead of the first ones lets the
        server prepare it in time.

        Args:
            tokens: integers, shape (tokens,).

        Raises:
            TokenError: these are no tokens.
            UtteranceClosedError: the utterance is finished or cancelled.
            ServerError, ServerUnavailable, ...: it has failed already.
        """
        self._send(tokens, end=False)

    def finish(self, tokens: npt.ArrayLike = ()) -> None:
        """Send the last tokens, if any, and say that there are no more. Raises as `push` does.

        Raises:
            InputError: the utterance has no tokens at all.
        """
        self._send(tokens, end=True)

    def cancel(self) -> None:
        """Stop at once and drop chunks that nobody took; iterating ends.

        Harmless when called again.
        """
        with self._guard:
            self._cancelled = True
            self._chunks.clear()
            self._stop()

    def fail(self, error: BaseException) -> None:
        """Stop at once and let iterating raise `error`, unless the utterance is over or has failed
        before.
        """
        with self._guard:
            if not self._over:
                self._failure = error
                self._stop()

    @abstractmethod
    def _begin(self, retries: int) -> None:
        """Start the thread or task that receives; called once, at the end of the constructor."""

    @abstractmethod
    def _requests(self, outbox: Any) -> Any:
        """Iterate over an outbox as gRPC wants it, up to the None."""

    @abstractmethod
    def _notify(self) -> None:
        """Wake the thread or task that waits for a change of the state."""

    @abstractmethod
    def _hang_up(self) -> None:
        """End the attempt that runs."""

    def _stop(self) -> None:
        self._hang_up()
        self._notify()

    @property
    def _over(self) -> bool:
        return bool(self._failure or self._cancelled or self._call.complete)

    def _send(self, values: npt.ArrayLike, *, end: bool) -> None:
        with self._guard:
            if self._failure:
                raise self._failure
            if self._cancelled:
                raise UtteranceClosedError("the utterance is cancelled and takes no more tokens")
            self._outbox.put_nowait(self._call.request(values, time.monotonic(), end=end))
            if end:
                self._outbox.put_nowait(None)
            self._notify()

    def _next_chunk(self, end: type[Exception]) -> AudioChunk | None:
        """Take the next chunk; None if it has to be waited for, `end` is raised if there is none."""
        if self._chunks:
            return self._chunks.popleft()
        if self._failure:
            raise self._failure
        if self._cancelled or self._call.complete:
            raise end
        return None

    def _patience_s(self) -> float | None:
        """Work out for how many seconds the server may still be silent; None while it owes nothing."""
        owed_since = self._call.owed_since
        return (
            None if owed_since is None else owed_since + self._response_timeout_s - time.monotonic()
        )

    def _break_off(self) -> None:
        """End an attempt whose server is silent for too long."""
        self._broken = ResponseTimeoutError(
            f"the server at {self._url} did not answer for {self._response_timeout_s:g} s"
        )
        self._call.interrupt()
        self._hang_up()

    def _accept(self, message: Any) -> None:
        with self._guard:
            chunk = self._call.accept(message, time.monotonic())
            if chunk and not self._cancelled:
                self._chunks.append(chunk)
            self._notify()

    @contextmanager
    def _attempting(self) -> Iterator[Any]:
        """Start a stream, which repeats all earlier requests, and end it with an error that says
        whether to try again.

        There is no error if the utterance is over by then.
        """
        with self._guard:
            if self._over:
                raise UtteranceClosedError("the utterance was over before an attempt at it")
            if self._attempts:
                self._outbox = self._new_outbox()
                for request in self._call.again(time.monotonic()):
                    self._outbox.put_nowait(request)
                if self._call.ended:
                    self._outbox.put_nowait(None)
            self._attempts += 1
            self._rpc = self._start_rpc(self._requests(self._outbox))
            self._notify()
        try:
            yield self._rpc
            error: ClientError = ServerUnavailable(
                f"the server at {self._url} closed the stream before the final chunk"
            )
        except ClientError as refused:
            error = refused
        except grpc.RpcError as failed:
            error = error_of_rpc(failed, self._url)
        # also what grpc.aio raises in a call that this side broke off
        except asyncio.CancelledError:
            if self._broken is None:
                raise
            error = self._broken
        finally:
            self._hang_up()
        with self._guard:
            if self._over:
                return
            self._call.interrupt()
            error, self._broken = self._broken or error, None
        raise error

    @contextmanager
    def _final_errors(self) -> Iterator[None]:
        """Fail the utterance with the error of its last attempt, or whoever iterates would wait for
        ever.
        """
        try:
            yield
        except ClientError as error:
            self.fail(error)
        except Exception as error:
            self.fail(ProtocolError(f"the server's response cannot be read ({error})"))

"""Base of the utterances for threads and for asyncio: holds the state and runs the attempts.

Subclasses implement only the waiting, with threads or with asyncio. The client for threads could
also run the asyncio client in a thread. This was tried: the event loop delays every chunk, and the
delay grows with the number of streams.

The package calls the generated gRPC stub directly. It does not use tritonclient's
InferenceServerClient, which allows only one stream for each connection, does not report that a
server ended the stream early, and leaves a thread behind for each cancelled stream.
"""

from __future__ import annotations

import asyncio
import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import grpc
import numpy.typing as npt

from token2wav_client.audio import AudioChunk, EndReason
from token2wav_client.call import Call
from token2wav_client.errors import (
    ClientError,
    ProtocolError,
    ResponseTimeoutError,
    ServerError,
    ServerUnavailable,
    UtteranceClosedError,
    error_of_rpc,
)

# Time for the server to close its side of a complete utterance. After this time the client cancels
# the utterance.
CLOSE_GRACE_S = 2.0
# The same time after an error of the server. Triton 24.10 keeps the connection of many clients that
# cancel at the moment of their last response.
_ERROR_GRACE_S = 0.5


class BaseUtterance(ABC):
    """Utterance on a gRPC stream: sends tokens while chunks arrive, in one or several attempts.

    Args:
        start_rpc: function that starts the stream with an iterator of requests.
        url: address of the server, for messages.
        response_timeout_s: allowed seconds without a response, as in `BaseClient`.
        retries: further attempts, as in `BaseClient`.
        on_close: function that is called with the utterance when it is closed.
    """

    # Held while the state is read or changed.
    _guard: AbstractContextManager[Any] = nullcontext()
    # Creates the outbox of an attempt, a queue. True in the queue announces tokens to send, and
    # False ends the requests.
    _new_outbox: Any

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
        # Error of the running attempt, which ends: an error of the server, or the reason for which
        # the client hung up.
        self._broken: ClientError | None = None
        # Time at which the client hangs up if the server has not ended the stream of its error.
        self._hangs_up_at = math.inf
        self._attempts = 0
        self._begin(retries)

    @property
    def id(self) -> str:
        """Id of the utterance on the server; every attempt has another one."""
        return self._call.id

    @property
    def complete(self) -> bool:
        """Whether the final chunk has arrived. Without `end_reason` the audio has exactly the
        samples that the tokens require.
        """
        return self._call.complete

    @property
    def end_reason(self) -> EndReason | None:
        """Limit of the server that ended the utterance before its last tokens; None if none did."""
        return self._call.end_reason

    @property
    def tokens(self) -> int:
        """Number of tokens sent so far."""
        return self._call.tokens

    def push(self, tokens: npt.ArrayLike) -> None:
        """Sends tokens, without waiting for the server.

        The first push also sends the voice. If you push an empty list before the first tokens
        exist, the server computes the prompt of the voice early.

        Args:
            tokens: integers, shape (tokens,), or (tokens, codebooks) for models with several codes
                per token.

        Raises:
            TokenError: the tokens are invalid.
            UtteranceClosedError: the utterance is finished or cancelled.
            ServerError, ServerUnavailable, ...: the utterance has already failed.
        """
        self._send(tokens, end=False)

    def finish(self, tokens: npt.ArrayLike = ()) -> None:
        """Sends the last tokens, if any, and ends the input of the utterance.

        Raises:
            InputError: the utterance has no tokens at all.
            TokenError, UtteranceClosedError, ...: the errors of `push`.
        """
        self._send(tokens, end=True)

    def cancel(self) -> None:
        """Cancels the utterance at once, drops the chunks that were not taken, and ends iteration.

        Further calls have no effect.
        """
        with self._guard:
            self._cancelled = True
            self._chunks.clear()
            self._stop()

    def fail(self, error: BaseException) -> None:
        """Cancels the utterance at once, and makes iteration raise `error`.

        The method has no effect if the utterance has already ended or failed.
        """
        with self._guard:
            if not self._over:
                self._failure = error
                self._stop()

    @abstractmethod
    def _begin(self, retries: int) -> None:
        """Starts the thread or task that receives; called once, at the end of the constructor."""

    @abstractmethod
    def _requests(self, outbox: Any) -> Any:
        """Returns an iterator for gRPC over the requests of an attempt, up to the False."""

    def _next_request(self, outbox: Any) -> Any:
        """Returns the next request of an attempt; None if an earlier request has all tokens.

        gRPC may still iterate over the requests of an attempt that has ended.
        """
        with self._guard:
            return self._call.next_request() if outbox is self._outbox else None

    @abstractmethod
    def _notify(self) -> None:
        """Wakes the thread or task that waits for a change of the state."""

    @abstractmethod
    def _hang_up(self) -> None:
        """Ends the running attempt."""

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
                raise UtteranceClosedError(
                    "the utterance is cancelled, so it accepts no more tokens"
                )
            self._call.add(values, time.monotonic(), end=end)
            self._announce()
            self._notify()

    def _announce(self) -> None:
        """Announces to gRPC that tokens wait to be sent."""
        self._outbox.put_nowait(True)
        if self._call.ended:
            self._outbox.put_nowait(False)

    def _next_chunk(self, end: type[Exception]) -> AudioChunk | None:
        """Returns the next chunk, or None if no chunk has arrived. Raises `end` after the last."""
        if self._chunks:
            return self._chunks.popleft()
        if self._failure:
            raise self._failure
        if self._cancelled or self._call.complete:
            raise end
        return None

    def _patience_s(self) -> float | None:
        """Returns the seconds left for the server's next response, or for the end of a failed
        stream; None if the server owes neither.
        """
        owed_since, until = self._call.owed_since, self._hangs_up_at
        if owed_since is not None:
            until = min(until, owed_since + self._response_timeout_s)
        return until - time.monotonic() if until < math.inf else None

    def _break_off(self) -> None:
        """Ends the attempt because the server has sent nothing for too long."""
        self._broken = self._broken or ResponseTimeoutError(
            f"the server at {self._url} did not respond for {self._response_timeout_s:g} s"
        )
        self._hangs_up_at = math.inf
        self._call.interrupt()
        self._hang_up()

    def _accept(self, message: Any) -> None:
        with self._guard:
            if self._broken is not None:
                return  # the attempt has failed, and only waits for the end of the stream
            try:
                chunks = self._call.accept(message, time.monotonic())
            except ServerError as error:
                if not message.error_message:
                    raise
                self._end_stream_of(error)
                return
            if self._call.end_reason is not None:
                self._outbox.put_nowait(False)  # ends the requests of the attempt
            if not self._cancelled:
                self._chunks.extend(chunks)
            self._notify()

    def _end_stream_of(self, error: ClientError) -> None:
        """Ends the requests of an attempt that the server has answered with an error. The server
        then ends the stream.
        """
        self._broken, self._hangs_up_at = error, time.monotonic() + _ERROR_GRACE_S
        self._call.interrupt()
        self._outbox.put_nowait(False)
        self._notify()

    @contextmanager
    def _attempting(self) -> Iterator[Any]:
        """Context manager of one attempt: starts a stream and repeats all earlier requests on it.

        If the utterance is over at the end of the context, nothing is raised. Otherwise the attempt
        has failed, and an error is raised. Its attribute `transient` decides whether to retry.
        """
        with self._guard:
            if self._over:
                raise UtteranceClosedError("the utterance ended before it was sent")
            if self._attempts:
                self._outbox = self._new_outbox()
                self._call.again(time.monotonic())
                self._announce()
            self._attempts += 1
            self._rpc = self._start_rpc(self._requests(self._outbox))
            self._notify()
        try:
            yield self._rpc
            error: ClientError = ServerUnavailable(
                f"the server at {self._url} closed the stream before the final chunk"
            )
        except ClientError as client_error:
            error = client_error
        except grpc.RpcError as rpc_error:
            # The error is the call itself, and its traceback refers to it (see `_final_errors`).
            error = error_of_rpc(rpc_error.with_traceback(None), self._url)
        # grpc.aio raises CancelledError also for a call that the client itself has ended.
        except asyncio.CancelledError:
            if self._broken is None:
                raise
            error = self._broken
        finally:
            with self._guard:
                self._hang_up()
                self._rpc, self._hangs_up_at = None, math.inf
                # If the server ended the stream, gRPC waits for further requests all the same.
                self._outbox.put_nowait(False)
        with self._guard:
            if self._over:
                return
            self._call.interrupt()
            error, self._broken = self._broken or error, None
        raise error

    @contextmanager
    def _final_errors(self) -> Iterator[None]:
        """Context manager that fails the utterance with the error of its last attempt.

        Without this context, the iteration would wait forever.

        The error keeps neither its context nor the frames of the attempt, because both refer to the
        call of gRPC. A call that lives until the interpreter exits can hang there: its destructor
        waits for a lock, and the thread of gRPC that holds the lock no longer runs.
        """
        try:
            yield
        except ClientError as error:
            error.__context__ = None
            self.fail(error.with_traceback(None))
        except Exception as error:
            self.fail(ProtocolError(f"the server's response cannot be read ({error})"))

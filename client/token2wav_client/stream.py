"""One utterance on one gRPC stream: tokens go out while audio comes in.

The generated gRPC stub is used rather than tritonclient's InferenceServerClient, because that one holds a
single stream per connection, says nothing when a server ends the stream early, and leaves a thread behind per
cancelled stream.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from types import TracebackType
from typing import Any

import grpc
import numpy.typing as npt
from tenacity import Retrying

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


class Utterance:
    """Tokens in, chunks out. Made by `Client.open`; a context manager and an iterator of AudioChunk.

    `push`, `finish`, `cancel` and `fail` may be called from any thread; one other thread may iterate.
    Iterating ends after the final chunk, or after `cancel`, and raises what went wrong otherwise. Chunks that
    wait to be taken are kept in memory.
    """

    def __init__(
        self,
        start_rpc: Callable[[Iterator[Any]], Any],
        call: Call,
        *,
        url: str,
        response_timeout_s: float,
        retries: int,
        on_close: Callable[[Utterance], None],
    ) -> None:
        self._start_rpc = start_rpc
        self._url = url
        self._response_timeout_s = response_timeout_s
        self._on_close = on_close
        # Everything below is guarded by this condition; it is notified on every change.
        self._changed = threading.Condition()
        self._call = call
        self._chunks: deque[AudioChunk] = deque()
        self._failure: BaseException | None = None
        self._cancelled = False
        self._outbox: SimpleQueue[Any] = SimpleQueue()
        self._rpc: Any = None
        self._broken: ClientError | None = None  # why this side broke off the attempt that runs
        self._attempts = 0
        self._retrying = Retrying(sleep=self._pause, **policy(retries))
        self._receiver = threading.Thread(target=self._receive, name=f"utterance-{self.id}", daemon=True)
        self._receiver.start()

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
        """Send tokens; never waits for the server.

        The first push carries the voice, so pushing no tokens ahead of the first ones lets the server prepare
        it in time.

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
        """Stop at once and drop chunks that nobody took; iterating ends. Harmless when called again."""
        with self._changed:
            self._cancelled = True
            self._chunks.clear()
            self._stop()

    def fail(self, error: BaseException) -> None:
        """Stop at once and let iterating raise `error`, unless the utterance is over or has failed before."""
        with self._changed:
            if not self._over:
                self._failure = error
                self._stop()

    def close(self) -> None:
        """End the utterance and wait for its threads: gracefully if it is complete, else by cancelling."""
        if self.complete:
            self._receiver.join(_GRACE_S)
        self.cancel()
        self._receiver.join()
        self._on_close(self)

    def __enter__(self) -> Utterance:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __iter__(self) -> Iterator[AudioChunk]:
        return self

    def __next__(self) -> AudioChunk:
        with self._changed:
            while True:
                if self._chunks:
                    return self._chunks.popleft()
                if self._failure:
                    raise self._failure
                if self._cancelled or self._call.complete:
                    raise StopIteration
                self._wait()

    @property
    def _over(self) -> bool:
        return bool(self._failure or self._cancelled or self._call.complete)

    def _wait(self) -> None:
        """Wait for a change, or break off the attempt if the server is silent for too long."""
        owed_since = self._call.owed_since
        if owed_since is None:
            self._changed.wait()
            return
        patience_s = owed_since + self._response_timeout_s - time.monotonic()
        if patience_s > 0:
            self._changed.wait(patience_s)
        else:
            self._broken = ResponseTimeoutError(
                f"the server at {self._url} did not answer for {self._response_timeout_s:g} s"
            )
            self._call.interrupt()
            self._hang_up()

    def _send(self, values: npt.ArrayLike, *, end: bool) -> None:
        with self._changed:
            if self._failure:
                raise self._failure
            if self._cancelled:
                raise UtteranceClosedError("the utterance is cancelled and takes no more tokens")
            self._outbox.put(self._call.request(values, time.monotonic(), end=end))
            if end:
                self._outbox.put(None)
            self._changed.notify_all()

    def _stop(self) -> None:
        self._hang_up()
        self._changed.notify_all()

    def _hang_up(self) -> None:
        self._outbox.put(None)  # releases gRPC's thread that waits for requests
        if self._rpc is not None:
            self._rpc.cancel()

    def _receive(self) -> None:
        try:
            self._retrying(self._attempt)
        except ClientError as error:
            self.fail(error)
        except Exception as error:  # whoever iterates must learn of it, or it would wait for ever
            self.fail(ProtocolError(f"the server's response cannot be read ({error})"))

    def _attempt(self) -> None:
        """Speak the utterance once; returns when it is over in any way but by an error of the server's."""
        rpc = self._dial()
        if rpc is None:
            return
        try:
            for message in rpc:
                self._accept(message, time.monotonic())
            error: ClientError = ServerUnavailable(
                f"the server at {self._url} closed the stream before the final chunk"
            )
        except ClientError as refused:
            error = refused
        except grpc.RpcError as failed:
            error = error_of_rpc(failed, self._url)
        with self._changed:
            self._hang_up()
            if self._over:
                return
            self._call.interrupt()
            error, self._broken = self._broken or error, None
        raise error

    def _dial(self) -> Any:
        with self._changed:
            if self._over:
                return None
            if self._attempts:
                self._outbox = SimpleQueue()
                for request in self._call.again(time.monotonic()):
                    self._outbox.put(request)
                if self._call.ended:
                    self._outbox.put(None)
            self._attempts += 1
            self._rpc = self._start_rpc(iter(self._outbox.get, None))
            self._changed.notify_all()
            return self._rpc

    def _pause(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._over, seconds)

    def _accept(self, message: Any, now: float) -> None:
        with self._changed:
            chunk = self._call.accept(message, now)
            if chunk and not self._cancelled:
                self._chunks.append(chunk)
            self._changed.notify_all()

"""Pool of requests: thread-safe interface to the scheduler.

The scheduler makes all decisions. The pool guards the scheduler with a lock, and frees the memory
of requests that are over. It calls replies and the observer without holding the lock, because these
calls may take long.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from token2wav.config import LimitConfig
from token2wav.config.model_config import StageName
from token2wav.errors import (
    DeviceLostError,
    InputError,
    StreamClosedError,
    Token2WavError,
    to_public_error,
)
from token2wav.serving.delivery import attempt, fail, finish, is_cancelled
from token2wav.serving.options import DEFAULTS, UtteranceOptions
from token2wav.serving.pipeline import Pipeline
from token2wav.serving.request import Reply, Request, Status
from token2wav.serving.scheduler import Scheduler
from token2wav.voice import Voice


class Observer:
    """Observer of the workers, for example for metrics. Its methods are called from any thread."""

    def admitted(self, open_requests: int) -> None:
        """Called after a request was admitted."""

    def changed(self, open_requests: int) -> None:
        """Called soon after requests were admitted, opened or ended, once for all of them. When it
        gets 0, `ended` was already called for every request.
        """

    def on_batch(self, waited: list[float], seconds: Mapping[StageName, float]) -> None:
        """Called after a batch.

        Args:
            waited: for each chunk, the seconds between its readiness and the start of the batch.
            seconds: compute time of each stage.
        """

    def refused(self, error: Token2WavError) -> None:
        """Called when the cache has no room to open an admitted request, or when a token is refused
        after others.
        """

    def sent(self, request: Request, seconds: float, late: float) -> None:
        """Called after audio was sent.

        Args:
            late: seconds of silence before the audio; 0 if it was in time.
        """

    def ended(self, request: Request, reason: str) -> None:
        """Called when a request is over.

        Args:
            reason: `finished`, the value of an `EndReason`, `cancelled`, or the name of an error
                class such as `IdleError`.
        """


class RequestPool:
    """Pool of open requests. A request belongs to at most one worker at a time.

    All methods may be called from any thread. Only `serve` waits for a computation.

    Args:
        on_device_lost: as in `WorkerPool`.
        check_working: raises BackendError if no worker can compute a request. It is called with the
            lock.

    Attributes:
        lock: guards the scheduler and the state of requests. It is notified when a worker may find
            work.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        limits: LimitConfig,
        observer: Observer | None,
        clock: Callable[[], float],
        on_device_lost: Callable[[], None],
        check_working: Callable[[], None],
    ) -> None:
        self._pipeline = pipeline
        self._limits = limits
        self.observer = observer or Observer()
        self._clock = clock
        self._on_device_lost = on_device_lost
        self._check_working = check_working
        self.scheduler = Scheduler(limits, pipeline.config, clock)
        self.lock = threading.Condition()
        self._ended = 0  # requests whose end the observer knows
        self._changed = False
        # It keeps the numbers of open requests that the observer gets in their order.
        self._observing = threading.Lock()

    @property
    def open_requests(self) -> int:
        return len(self.scheduler.requests)

    def open(
        self,
        voice: Voice,
        on_close: Callable[[Request], None] = lambda _: None,
        *,
        client: str = "",
        canary: bool = False,
        options: UtteranceOptions = DEFAULTS,
    ) -> Request:
        """Admits a request. Nothing is computed yet.

        Args:
            canary: as in `Request`.
            on_close: as in `Request`. It is called from any thread, perhaps before this method
                returns.

        Raises:
            InputError: an option does not fit the model or the settings.
            LimitError: too many requests are open, in total or of this client; or the server shuts
                down.
            BackendError: every worker is hung, so none can compute the request.
        """
        request = self._pipeline.request(
            voice, options, self._clock, self._limits.player_buffer_seconds
        )
        request.on_close, request.client, request.canary = on_close, client, canary
        with self.lock:
            # This check precedes the limits, because the health check and the canary (the
            # launcher's test synthesis) regard a server that raises LimitError as healthy.
            self._check_working()
            self.scheduler.admit(request)
        with self._observing:
            attempt(self.observer.admitted, self.scheduler.admitted - self._ended)
        self.changed()
        return request

    def push(
        self,
        request: Request,
        tokens: ArrayLike,
        reply: Reply,
        *,
        end: bool,
        keep_open: bool = False,
    ) -> None:
        """Adds a message of tokens to a request.

        If this method raises, `reply` was not used. After InputError the request is over.

        A token outside the vocabulary ends the utterance. If tokens precede it, in this message or
        an earlier one, their audio is sent, and then the unfinished replies get InputError.

        Args:
            tokens: (n,) integers, n >= 0, or (n, codebooks); or (n, size) latents.
            keep_open: whether `reply` stays unfinished until the request is over. An unfinished
                reply reports when its client has cancelled or disconnected.

        Raises:
            InputError: the first token of the utterance is outside the vocabulary, the utterance
                would have too many tokens, or would end without any token.
            StreamClosedError: the request is over, or an earlier message has ended the utterance.
                In the second case the audio of the earlier messages is still computed and sent.
        """
        request.check_open()
        try:
            array, refusal = self._accepted(request, tokens)
            with self.lock:
                end = end or refusal is not None
                finished = self.scheduler.push(request, array, reply, end=end, keep_open=keep_open)
                if refusal is not None and request.end_reason is None:
                    request.refuse(refusal)
                if request.status in (Status.UNOPENED, Status.READY):
                    self.lock.notify()
        except StreamClosedError:
            raise
        except Exception as error:
            self.cancel(request, to_public_error(error))
            raise
        if refusal is not None:
            attempt(self.observer.refused, refusal)
        finish(finished)

    def _accepted(
        self, request: Request, tokens: ArrayLike
    ) -> tuple[NDArray[Any], InputError | None]:
        """Returns the tokens of a message, or the tokens before the first one outside the
        vocabulary and the error about it.
        """
        config = self._pipeline.config
        try:
            return request.checked_tokens(tokens, config), None
        except InputError as error:
            count = error.sound_tokens
            if count is None or not request.chunker.new_tokens + count:
                raise
            return request.checked_tokens(np.asarray(tokens)[:count], config), error

    def cancel(self, request: Request, reason: Token2WavError | None = None) -> None:
        """Ends a request with an error, which its unfinished replies get. Without a reason, the
        client has cancelled or disconnected. The method does nothing if the request is over.
        """
        error = reason or StreamClosedError("stream: it was cancelled")
        with self.lock:
            if request.over:
                return
            replies = self.scheduler.fail(request, error)
            if request.owner in (None, threading.get_ident()):
                attempt(self._pipeline.close, request)
        self._over(request, type(reason).__name__ if reason else "cancelled")
        fail(replies, error)
        if isinstance(reason, DeviceLostError):
            attempt(self._on_device_lost)

    def cancel_all(self) -> None:
        """Ends all open requests as if their clients had cancelled them."""
        with self.lock:
            requests = list(self.scheduler.requests)
        for request in requests:
            self.cancel(request)

    def drop_abandoned(self) -> None:
        with self.lock:
            overdue: list[tuple[Request, Token2WavError | None]] = [*self.scheduler.overdue()]
            waiting = [
                (
                    request,
                    [message.reply for message in list(request.messages)[:1]] + request.kept_open,
                )
                for request in self.scheduler.requests
            ]
        vanished = [
            (request, None) for request, replies in waiting if any(map(is_cancelled, replies))
        ]
        for request, error in vanished + overdue:
            self.cancel(request, error)

    def serve(self, request: Request, work: Callable[[Request], None]) -> None:
        """Calls `work` for a request of this worker, and then releases the request.

        If `work` fails, only this request ends.
        """
        try:
            work(request)
            self._release(request)
        except Exception as error:
            self.cancel(request, to_public_error(error))
            self._release(request)

    def _finish(self, request: Request, replies: list[Reply]) -> None:
        if request.over and request.last_error is not None:
            fail(replies, request.last_error)
        else:
            finish(replies)

    def _release(self, request: Request) -> None:
        finished: list[Reply] | None = None
        while finished is None or finished:  # messages may arrive while replies are finished
            with self.lock:
                cancelled, had_memory = request.over, bool(request.handles)
                finished = self.scheduler.finish_consumed_messages(request)
                over = request.over
                if over:
                    attempt(self._pipeline.close, request)
                if over or not finished:
                    self.scheduler.release(request)
            if over and not cancelled:
                refusal, reason = request.last_error, request.end_reason
                ended = reason.value if reason else "finished"
                self._over(request, type(refusal).__name__ if refusal else ended)
            elif over and had_memory:  # another thread has cancelled it; its memory is freed now
                self.changed()
            self._finish(request, finished)
            if over:
                return

    def _over(self, request: Request, reason: str) -> None:
        attempt(request.on_close, request)
        attempt(self.observer.ended, request, reason)
        with self.lock:
            self._ended += 1
        self.changed()

    def changed(self) -> None:
        """Notes that the observer should hear of a change, by `report_changes`.

        An observer may take longer than the opening of a request, so it does not hear of each one.
        """
        self._changed = True

    def report_changes(self) -> None:
        """Tells the observer of the changes since the last call, if there were any."""
        with self._observing:
            if self._changed:
                self._changed = False
                attempt(self.observer.changed, self.scheduler.admitted - self._ended)

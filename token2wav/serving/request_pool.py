"""Pool of requests: thread-safe interface to the scheduler.

The scheduler makes all decisions. The pool guards the scheduler with a lock, and frees the memory
of requests that are over. It calls replies and the observer without holding the lock, because these
calls may take long.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from token2wav.config import LimitConfig
from token2wav.config.model_config import StageName
from token2wav.errors import (
    BackendError,
    DeviceLostError,
    InputError,
    LimitError,
    StreamClosedError,
    Token2WavError,
    to_public_error,
)
from token2wav.serving.audio_output import AudioChunk
from token2wav.serving.delivery import attempt, fail, finish, is_cancelled
from token2wav.serving.options import DEFAULTS, UtteranceOptions
from token2wav.serving.pipeline import Pipeline
from token2wav.serving.request import Reply, Request, Status
from token2wav.serving.scheduler import Scheduler
from token2wav.serving.turn import Answer, Computed, Delivery, Turn
from token2wav.voice import Voice

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.05  # interval at which idle workers look for a turn


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

    All methods may be called from any thread. Only `next_turn` waits.

    Args:
        workers: as in `Scheduler`.
        senders: as in `Scheduler`.
        on_device_lost: as in `WorkerPool`.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        limits: LimitConfig,
        observer: Observer | None,
        clock: Callable[[], float],
        on_device_lost: Callable[[], None],
        workers: int = 1,
        senders: int = 0,
    ) -> None:
        self._pipeline = pipeline
        self._limits = limits
        self._observer = observer or Observer()
        self._clock = clock
        self._on_device_lost = on_device_lost
        self.scheduler = Scheduler(limits, pipeline.config, workers, senders)
        # Guards the scheduler and the state of requests. It is notified when a worker may find a
        # turn.
        self._lock = threading.Condition()
        self._hung = set[Turn]()  # turns that were found to hang, so their requests have failed
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
        with self._lock:
            self.scheduler.admit(request, self._clock())
        with self._observing:
            attempt(self._observer.admitted, self.scheduler.admitted - self._ended)
        self._changed = True
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
            with self._lock:
                end, now = end or refusal is not None, self._clock()
                finished = self.scheduler.push(
                    request, array, reply, now, end=end, keep_open=keep_open
                )
                if refusal is not None and request.end_reason is None:
                    request.refuse(refusal)
                ready = request.status in (Status.UNOPENED, Status.READY)
                if ready and self.scheduler.can_compute:
                    self._lock.notify()
        except StreamClosedError:
            raise
        except Exception as error:
            self.cancel(request, to_public_error(error))
            raise
        if refusal is not None:
            attempt(self._observer.refused, refusal)
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
        with self._lock:
            answer = self.scheduler.fail(request, error, "" if reason else "cancelled")
            answers = self._freed([answer] if answer else [])
        self._end_replies(answers)

    def cancel_all(self) -> None:
        """Ends all open requests as if their clients had cancelled them."""
        self._cancel_all(None)

    def close(self) -> None:
        """Ends all open requests, and refuses new ones. `next_turn` then returns None."""
        with self._lock:
            self.scheduler.closing = True
        self._cancel_all(LimitError("server: it is shutting down; try another one"))

    def next_turn(self, worker: int) -> Turn | None:
        """Waits for the next turn of a worker.

        Returns:
            None if the pool was closed and no request is open.
        """
        with self._lock:
            while not (turn := self.scheduler.next_turn(worker, self._clock())):
                if self.scheduler.closing and not self.scheduler.requests:
                    return None
                self._lock.wait(_POLL_SECONDS)
            if self.scheduler.has_work:
                self._lock.notify()
            return turn

    def finish_turn(self, turn: Turn, computed: Computed) -> None:
        """Sends the results of a turn, and ends the replies whose tokens are consumed."""
        with self._lock:
            was_full = not self.scheduler.can_compute
            deliveries = self.scheduler.finish_turn(
                turn, computed.results, computed.seconds, self._clock()
            )
            if was_full and self.scheduler.has_work:
                self._lock.notify()
        self._observe(turn, computed)
        answers = self._settle(turn, [self._send(delivery) for delivery in deliveries])
        while answers:  # messages may arrive while replies are ended
            self._end_replies(answers)
            answers = self._settle(turn)
        self._log_end(turn)

    def give_up(self, turn: Turn, error: Token2WavError) -> None:
        """Ends a turn whose worker has failed. Only the requests of this turn are lost."""
        with self._lock:
            answers = self._freed(self.scheduler.give_up(turn, error, self._clock()))
        self._end_replies(answers)
        self._log_end(turn)

    def fail_hung(self) -> None:
        """Fails the requests of workers that hang.

        Their memory is freed when the worker returns, because the backend may still write to it.
        """
        with self._lock:
            now = self._clock()
            hung = self.scheduler.hung(now)
            found = [turn for turn in hung if turn not in self._hung]
            self._hung.update(found)
            lost = [
                [request for request in turn.requests if request.owner == turn.worker]
                for turn in found
            ]
            threads = self.scheduler.threads
        for turn, requests in zip(found, lost, strict=True):
            seconds = now - turn.started
            log.error(
                "worker %d hangs: its batch has run for %.0f s, and its %d streams have "
                "failed; %d of %d workers still run",
                *(turn.worker, seconds, len(requests), threads - len(hung), threads),
            )
            error = BackendError(
                f"backend: the worker of this stream hangs; its batch has run for {seconds:.0f} s"
            )
            for request in requests:
                self.cancel(request, error)

    def drop_abandoned(self) -> None:
        with self._lock:
            overdue: list[tuple[Request, Token2WavError | None]] = [
                *self.scheduler.overdue(self._clock())
            ]
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

    def report_changes(self) -> None:
        """Tells the observer of the changes since the last call, if there were any.

        An observer may take longer than the opening of a request, so it does not hear of each one.
        """
        with self._observing:
            if self._changed:
                self._changed = False
                attempt(self._observer.changed, self.scheduler.admitted - self._ended)

    def _cancel_all(self, reason: Token2WavError | None) -> None:
        with self._lock:
            requests = list(self.scheduler.requests)
        for request in requests:
            self.cancel(request, reason)

    def _observe(self, turn: Turn, computed: Computed) -> None:
        if computed.stages:
            attempt(self._observer.on_batch, turn.waited, computed.stages)
        if turn.opens:
            self._changed = True
            for error in computed.results:
                if isinstance(error, LimitError):
                    attempt(self._observer.refused, error)

    def _send(self, delivery: Delivery[AudioChunk]) -> AudioChunk | Token2WavError | None:
        """Returns the result that was sent, or the error of a request that cannot continue."""
        request, result, reply = delivery.request, delivery.result, delivery.reply
        if reply is None or not isinstance(result, AudioChunk):
            return result
        try:
            request.check_not_over()
            reply.send(replace(result, final=False) if request.last_error else result)
        except Exception as error:
            return to_public_error(error)
        attempt(self._observer.sent, request, result.duration_s, delivery.late)
        return result

    def _settle(
        self, turn: Turn, sent: Sequence[AudioChunk | Token2WavError | None] = ()
    ) -> list[Answer]:
        with self._lock:
            return self._freed(self.scheduler.settle(turn, self._clock(), sent))

    def _freed(self, answers: list[Answer]) -> list[Answer]:
        """Frees the memory of requests that are over and belong to no worker."""
        for answer in answers:
            if answer.request.over and answer.request.owner is None:
                attempt(self._pipeline.close, answer.request)
        return answers

    def _end_replies(self, answers: Sequence[Answer]) -> None:
        ended = [answer for answer in answers if answer.ended]
        for answer in ended:
            attempt(answer.request.on_close, answer.request)
            attempt(self._observer.ended, answer.request, answer.ended)
        if ended:
            with self._lock:
                self._ended += len(ended)
        # If another thread has ended a request, its memory may have been freed only now.
        if any(answer.request.over for answer in answers):
            self._changed = True
        for _, replies, error, _ in answers:
            if error is None:
                finish(replies)
            else:
                fail(replies, error)
        if any(isinstance(answer.error, DeviceLostError) for answer in ended):
            attempt(self._on_device_lost)

    def _log_end(self, turn: Turn) -> None:
        if turn in self._hung:
            with self._lock:
                self._hung.remove(turn)
            log.warning(
                "worker %d has finished its batch after %.0f s and accepts requests again",
                *(turn.worker, self._clock() - turn.started),
            )

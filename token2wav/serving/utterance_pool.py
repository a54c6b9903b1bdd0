"""Pool of utterances: thread-safe interface to the scheduler.

The scheduler makes all decisions. The pool guards the scheduler with a lock, and frees the memory
of utterances that are over. It calls replies and the observer without holding the lock, because
these calls may take long.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from token2wav.config import LimitConfig
from token2wav.errors import (
    BackendError,
    DeviceLostError,
    InputError,
    LimitError,
    StreamClosedError,
    Token2WavError,
    attempt,
    to_public_error,
)
from token2wav.serving.audio_output import AudioChunk
from token2wav.serving.observer import Observer
from token2wav.serving.options import DEFAULTS, UtteranceOptions
from token2wav.serving.pipeline import Pipeline, Result
from token2wav.serving.scheduler import Scheduler
from token2wav.serving.turn import Answer, Computed, Delivery, Turn
from token2wav.serving.utterance import Reply, Status, Utterance
from token2wav.voice import Voice

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.05  # interval at which idle workers look for a turn


class UtterancePool:
    """Pool of open utterances. An utterance belongs to at most one worker at a time.

    All methods may be called from any thread. Only `next_turn` waits.

    Args:
        workers, senders: as in `Scheduler`.
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
        self.scheduler = Scheduler(
            limits, pipeline.config, workers, senders, pipeline.prompt_batches
        )
        # Guards the scheduler and the state of utterances. It is notified when a worker may find a
        # turn.
        self._lock = threading.Condition()
        self._hung = set[Turn]()  # turns that were found to hang, so their utterances have failed
        self._ended = 0  # utterances whose end the observer knows
        self._changed = False
        # Keeps the reports to the observer in order.
        self._observing = threading.Lock()

    @property
    def open_utterances(self) -> int:
        return len(self.scheduler.utterances)

    def open(
        self,
        voice: Voice,
        on_close: Callable[[Utterance], None] = lambda _: None,
        *,
        client: str = "",
        canary: bool = False,
        options: UtteranceOptions = DEFAULTS,
    ) -> Utterance:
        """Admits an utterance. Nothing is computed yet.

        Args:
            on_close: called with the utterance, once, when it is over; from any thread, perhaps
                before this method returns.

        Raises:
            InputError: an option does not fit the model or the settings.
            LimitError: too many utterances are open, in total or of this client; or the server
                shuts down.
            BackendError: every worker is hung, so none can compute the utterance.
        """
        utterance = self._pipeline.utterance(
            voice, options, self._clock, self._limits.player_buffer_seconds
        )
        utterance.on_close, utterance.client, utterance.canary = on_close, client, canary
        with self._lock:
            self.scheduler.admit(utterance, self._clock())
        with self._observing:
            attempt(self._observer.admitted, self.scheduler.admitted - self._ended)
        self._changed = True
        return utterance

    def push(
        self,
        utterance: Utterance,
        tokens: ArrayLike,
        reply: Reply,
        *,
        end: bool,
        keep_open: bool = False,
    ) -> None:
        """Adds a message of tokens to an utterance.

        If this method raises, `reply` was not used. After InputError the utterance is over.

        A token outside the vocabulary ends the utterance. If tokens precede it, in this message or
        an earlier one, their audio is sent, and then the unfinished replies get InputError.

        Args:
            tokens: (n,) integers, n >= 0, or (n, codebooks); or (n, size) latents.
            keep_open: whether `reply` stays unfinished until the utterance is over. An unfinished
                reply reports when its client has cancelled or disconnected.

        Raises:
            InputError: the first token of the utterance is outside the vocabulary, the utterance
                would have too many tokens, or would end without any token.
            StreamClosedError: the utterance is over, or an earlier message has ended the utterance.
                In the second case the audio of the earlier messages is still computed and sent.
        """
        utterance.check_open()
        try:
            array, refusal = self._accepted(utterance, tokens)
            with self._lock:
                end, now = end or refusal is not None, self._clock()
                finished = self.scheduler.push(
                    utterance, array, reply, now, end=end, keep_open=keep_open
                )
                # Not of `array`: rows of a delay pattern may complete no frame yet.
                if np.size(tokens) or end:
                    utterance.last_progress = now
                if refusal is not None and utterance.end_reason is None:
                    utterance.refuse(refusal)
                ready = utterance.status in (Status.UNOPENED, Status.READY)
                if ready and self.scheduler.can_compute:
                    self._lock.notify()
        except StreamClosedError:
            raise
        except Exception as error:
            self.cancel(utterance, to_public_error(error))
            raise
        if refusal is not None:
            attempt(self._observer.refused, refusal)
        _finish(finished)

    def _accepted(
        self, utterance: Utterance, tokens: ArrayLike
    ) -> tuple[NDArray[Any], InputError | None]:
        """Returns the tokens of a message, or the tokens before the first one outside the
        vocabulary and the error about it.
        """
        config = self._pipeline.config
        try:
            return utterance.checked_tokens(tokens, config), None
        except InputError as error:
            count = error.sound_tokens
            if count is None or not utterance.chunker.new_tokens + count:
                raise
            return utterance.checked_tokens(np.asarray(tokens)[:count], config), error

    def cancel(self, utterance: Utterance, reason: Token2WavError | None = None) -> None:
        """Ends an utterance with an error, which its unfinished replies get. Without a reason, the
        client has cancelled or disconnected. The method does nothing if the utterance is over.
        """
        error = reason or StreamClosedError("stream: it was cancelled")
        with self._lock:
            answer = self.scheduler.fail(utterance, error, "" if reason else "cancelled")
            answers = self._freed([answer] if answer else [])
        self._end_replies(answers)

    def cancel_all(self, reason: Token2WavError | None = None) -> None:
        """Ends all open utterances, as `cancel`."""
        with self._lock:
            utterances = list(self.scheduler.utterances)
        for utterance in utterances:
            self.cancel(utterance, reason)

    def close(self) -> None:
        """Ends all open utterances, and refuses new ones. `next_turn` then returns None."""
        with self._lock:
            self.scheduler.closing = True
        self.cancel_all(LimitError("server: it is shutting down; try another one"))

    def next_turn(self, worker: int) -> Turn | None:
        """Waits for the next turn of a worker; None if the pool was closed and no utterance is
        open.
        """
        with self._lock:
            while not (turn := self.scheduler.next_turn(worker, self._clock())):
                if self.scheduler.closing and not self.scheduler.utterances:
                    return None
                self._lock.wait(_POLL_SECONDS)
            if self.scheduler.has_work:
                self._lock.notify()
            return turn

    def next_interruption(self, turn: Turn, spent: float) -> Turn | None:
        """Returns a turn that the worker of `turn` takes now, see `Scheduler.next_interruption`."""
        with self._lock:
            return self.scheduler.next_interruption(turn, spent, self._clock())

    def finish_turn(self, turn: Turn, computed: Computed) -> None:
        """Sends the results of a turn, and ends the replies whose tokens are consumed.

        The place and the memory of an utterance are free before its final chunk is sent, because
        its client may then start another utterance at once.
        """
        with self._lock:
            was_full = not self.scheduler.can_compute
            deliveries = self.scheduler.finish_turn(
                turn, computed.results, computed.seconds, self._clock()
            )
            for delivery in deliveries:
                if delivery.utterance.leaves:
                    attempt(self._pipeline.close, delivery.utterance)
            if was_full and self.scheduler.has_work:
                self._lock.notify()
        self._observe(turn, computed)
        answers = self._settle(turn, [self._send(delivery) for delivery in deliveries])
        while answers:  # messages may arrive while replies are ended
            self._end_replies(answers)
            answers = self._settle(turn)
        self._log_end(turn)

    def give_up(self, turn: Turn, error: Token2WavError) -> None:
        """Ends a turn whose worker has failed. Only the utterances of this turn are lost."""
        with self._lock:
            answers = self._freed(self.scheduler.give_up(turn, error, self._clock()))
        self._end_replies(answers)
        self._log_end(turn)

    def fail_hung(self) -> None:
        """Fails the utterances of workers that hang. Their memory is freed when the worker returns,
        because the backend may still write to it.
        """
        with self._lock:
            now = self._clock()
            hung = self.scheduler.hung(now)
            found = [turn for turn in hung if turn not in self._hung]
            self._hung.update(found)
            lost: dict[int, list[Utterance]] = {turn.worker: [] for turn in found}
            for turn in found:
                lost[turn.worker] += [
                    utterance for utterance in turn.utterances if utterance.owner == turn.worker
                ]
            threads = self.scheduler.threads
            running = threads - len({turn.worker for turn in hung})
        for worker, utterances in lost.items():
            seconds = now - min(turn.started for turn in hung if turn.worker == worker)
            log.error(
                "worker %d hangs: its batch has run for %.0f s, and its %d streams have "
                "failed; %d of %d workers still run",
                *(worker, seconds, len(utterances), running, threads),
            )
            error = BackendError(
                f"backend: the worker of this stream hangs; its batch has run for {seconds:.0f} s"
            )
            for utterance in utterances:
                self.cancel(utterance, error)

    def drop_abandoned(self) -> None:
        with self._lock:
            overdue: list[tuple[Utterance, Token2WavError | None]] = [
                *self.scheduler.overdue(self._clock())
            ]
            waiting = [
                (
                    utterance,
                    [message.reply for message in list(utterance.messages)[:1]]
                    + utterance.kept_open,
                )
                for utterance in self.scheduler.utterances
                if not utterance.leaves  # its client may leave with the final chunk
            ]
        vanished = [
            (utterance, None) for utterance, replies in waiting if any(map(_is_cancelled, replies))
        ]
        for utterance, error in vanished + overdue:
            self.cancel(utterance, error)

    def report_changes(self) -> None:
        """Reports the open utterances to the observer, if anything has changed since the last call.

        One report may cover many changes, because a call of the observer may take longer than an
        utterance takes to open.
        """
        with self._observing:
            if self._changed:
                self._changed = False
                attempt(self._observer.changed, self.scheduler.admitted - self._ended)

    def _observe(self, turn: Turn, computed: Computed) -> None:
        if computed.stages:
            attempt(self._observer.on_batch, turn.waited, computed.stages)
        if turn.opens:
            self._changed = True
            for error in computed.results:
                if isinstance(error, LimitError):
                    attempt(self._observer.refused, error)

    def _send(self, delivery: Delivery) -> Result:
        """Returns the result that was sent, or the error of an utterance that cannot continue."""
        utterance, result, reply = delivery.utterance, delivery.result, delivery.reply
        if reply is None or not isinstance(result, AudioChunk):
            return result
        try:
            utterance.check_not_over()
            reply.send(replace(result, final=False) if utterance.last_error else result)
        except Exception as error:
            return to_public_error(error)
        attempt(self._observer.sent, utterance, result.duration_s, delivery.late)
        return result

    def _settle(self, turn: Turn, sent: Sequence[Result] = ()) -> list[Answer]:
        with self._lock:
            return self._freed(self.scheduler.settle(turn, self._clock(), sent))

    def _freed(self, answers: list[Answer]) -> list[Answer]:
        """Frees the memory of utterances that are over and belong to no worker."""
        for answer in answers:
            if answer.utterance.over and answer.utterance.owner is None:
                attempt(self._pipeline.close, answer.utterance)
        return answers

    def _end_replies(self, answers: Sequence[Answer]) -> None:
        ended = [answer for answer in answers if answer.ended]
        for answer in ended:
            attempt(answer.utterance.on_close, answer.utterance)
            attempt(self._observer.ended, answer.utterance, answer.ended)
        if ended:
            with self._lock:
                self._ended += len(ended)
        # If another thread has ended an utterance, its memory may have been freed only now.
        if any(answer.utterance.over for answer in answers):
            self._changed = True
        for _, replies, error, _ in answers:
            if error is None:
                _finish(replies)
                continue
            for reply in replies:
                attempt(reply.fail, error)
        if any(isinstance(answer.error, DeviceLostError) for answer in ended):
            attempt(self._on_device_lost)

    def _log_end(self, turn: Turn) -> None:
        if turn not in self._hung:
            return
        with self._lock:
            self._hung.remove(turn)
        if not turn.interrupts:  # else the worker goes on with the interrupted batch
            log.warning(
                "worker %d has finished its batch after %.0f s and accepts requests again",
                *(turn.worker, self._clock() - turn.started),
            )


def _finish(replies: Iterable[Reply]) -> None:
    for reply in replies:
        attempt(reply.finish)


def _is_cancelled(reply: Reply) -> bool:
    try:
        return reply.is_cancelled()
    except Exception:
        log.warning(
            "reading whether a request was cancelled failed; the request counts as cancelled",
            exc_info=True,
        )
        return True

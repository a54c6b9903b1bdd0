"""Scheduler of many utterances: its workers, one thread each, compute the batches that `policy.py` forms.

An utterance belongs to one worker at a time. Its requests are consumed in order, each answered as soon as its
tokens have been taken and the chunks that they made possible have been sent.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from token2wav.config import LimitConfig
from token2wav.errors import (
    DeviceLostError,
    EngineError,
    ExpiredError,
    IdleError,
    InputError,
    LimitError,
    StreamClosedError,
    Token2WavError,
)
from token2wav.model import Token2Wav
from token2wav.policy import Policy, Ready, has_time
from token2wav.streaming.pipeline import Timed
from token2wav.streaming.session import AudioChunk, Session
from token2wav.utterance import Observer, Reply, Request, Utterance
from token2wav.voice import Voice, check_vocabulary, token_array

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.05  # how soon a vanished client or an idle utterance is noticed
_MOST_WORKERS = 4
MOST_QUEUED_REQUESTS = 1024  # of one utterance, that wait to be consumed


def default_workers(device: str) -> int:
    """Returns the number of workers: one per CPU core that this process may use, up to 4; on a GPU one fills it."""
    return min(_MOST_WORKERS, len(os.sched_getaffinity(0))) if device == "cpu" else 1


class Scheduler:
    """Scheduler of utterances; it runs them until `close`.

    Its methods may be called from any thread and never wait for a chunk.

    Args:
        model: runs the batches.
        limits: bounds that are checked before work starts.
        observer: is called at every admission, batch, chunk and end.
        clock: returns monotonic seconds.
        workers: batches that are computed at the same time, in a thread each; they share the threads of torch.
        on_device_lost: is called, from any thread, after an utterance failed because the process has lost its GPU.
    """

    def __init__(
        self,
        model: Token2Wav,
        limits: LimitConfig,
        observer: Observer | None = None,
        clock: Callable[[], float] = time.monotonic,
        workers: int = 1,
        on_device_lost: Callable[[], None] = lambda: None,
    ) -> None:
        self._model = model
        self._limits = limits
        self._open_seconds = limits.open_seconds(model.config.token_frame_rate)
        self._observer = observer or Observer()
        self._clock = clock
        self._on_device_lost = on_device_lost
        self._utterances: list[Utterance] = []
        self._numbers = itertools.count(1)
        self._policy: Policy[Utterance] = Policy(limits.batch_streams)
        self._looked_for_abandoned = clock()
        self._closing = False
        self._wake = threading.Condition()
        self._telling = threading.Lock()
        self._idle_workers = workers
        self._torch_threads = max(1, torch.get_num_threads() // workers)
        self._workers = [
            threading.Thread(target=self._run, name=f"token2wav-worker-{number}", daemon=True)
            for number in range(workers)
        ]
        for worker in self._workers:
            worker.start()

    @property
    def open_utterances(self) -> int:
        return len(self._utterances)

    def open(
        self, voice: Voice, on_close: Callable[[], None] = lambda: None, *, steps: int = 0, client: str = ""
    ) -> Utterance:
        """Admits an utterance; nothing is computed yet.

        Args:
            voice: prompt and speaker.
            on_close: is called once, from any thread, when the utterance is over for any reason.
            steps: number of ODE steps, one of `StreamConfig.steps`; 0 for the usual number.
            client: name of the client it belongs to; empty if that is not known.

        Raises:
            InputError: the voice does not fit the model, its prompt is too long, or steps are not allowed.
            LimitError: there are too many utterances, at all or of this client.
        """
        voice.check(self._model.config)
        pipeline = self._model.pipeline
        pipeline.check_steps(steps)
        with self._wake:
            if self._closing:
                raise LimitError("server: it is shutting down; try another one")
            self._limits.check_room([utterance.client for utterance in self._utterances], client)
            now, steps = self._clock(), steps or pipeline.steps[0]
            utterance = Utterance(next(self._numbers), voice, on_close, steps, client, now, now)
            self._utterances.append(utterance)
            self._wake.notify()  # from now on, idle time is watched
        self._changed()
        return utterance

    def push(
        self, utterance: Utterance, tokens: ArrayLike, reply: Reply, *, end: bool, keep_open: bool = False
    ) -> None:
        """Queues a request.

        Args:
            utterance: result of `open`.
            tokens: (n,) integers, n >= 0, or (n, codebooks).
            reply: takes its chunks.
            end: whether the utterance ends with these tokens.
            keep_open: leave `reply` unfinished until the utterance is over, so that it can tell of a cancellation.

        Raises:
            InputError: a token is not one of the model's, there are too many, or the utterance would end without any.
            LimitError: too many requests wait.
            StreamClosedError: the utterance is over, or was to end with earlier tokens; those are still computed and
                sent.
            After any of the others the utterance is closed. In no case has `reply` been used.
        """
        self.check_open(utterance)
        try:
            array = token_array("tokens", tokens, self._model.config.token_shape)
            check_vocabulary("tokens", array, self._model.config.vocab_size)
            with self._wake:
                self._admit(utterance, array, end)
                request = Request(array, end, reply, keep_open)
                utterance.requests.append(request)
                if request.progress:
                    utterance.last_progress = self._clock()
                self._wake.notify()
        except StreamClosedError:
            raise
        except Token2WavError as error:
            self.cancel(utterance, error)
            raise

    def check_open(self, utterance: Utterance) -> None:
        """Raises StreamClosedError if an utterance takes no more requests, saying why."""
        if utterance.closed or utterance.ended:
            raise StreamClosedError(utterance.why_closed)

    def cancel(self, utterance: Utterance, reason: Token2WavError | None = None) -> None:
        """Ends an utterance and fails its waiting requests with `reason`; does nothing when it is over."""
        with self._wake:
            if utterance.closed:
                return
            utterance.closed = True
            error = reason or StreamClosedError("stream: it was cancelled")
            utterance.why_closed = str(error) if isinstance(error, StreamClosedError) else f"stream: it failed: {error}"
            self._utterances.remove(utterance)
            replies = [request.reply for request in utterance.requests]
            utterance.requests.clear()
            replies += [reply for reply in utterance.kept_open if reply not in replies]
            if utterance.worker in (None, threading.get_ident()):
                self._close_session(utterance)
        self._over(utterance, type(reason).__name__ if reason else "cancelled")
        for reply in replies:
            _answer(reply, lambda reply: reply.fail(error))
        if isinstance(reason, DeviceLostError):
            self._on_device_lost()

    def close(self, drain_seconds: float = 0.0) -> None:
        """Takes no more utterances, waits for the open ones as long as asked, then ends them and the workers."""
        with self._wake:
            self._closing = True
        deadline = time.monotonic() + drain_seconds
        while self._utterances and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        for utterance in list(self._utterances):
            self.cancel(utterance, LimitError("server: it is shutting down; try another one"))
        with self._wake:
            self._wake.notify_all()
        for worker in self._workers:
            worker.join()

    def _admit(self, utterance: Utterance, tokens: NDArray[np.int32], end: bool) -> None:
        self.check_open(utterance)
        if utterance.tokens + len(tokens) > self._limits.stream_tokens:
            raise InputError(
                "tokens", f"the utterance would exceed {self._limits.stream_tokens} tokens, the limit of one stream"
            )
        if len(utterance.requests) >= MOST_QUEUED_REQUESTS:
            raise LimitError(f"requests: {MOST_QUEUED_REQUESTS} of this stream already wait; send more tokens in each")
        if end and not utterance.tokens + len(tokens):
            raise InputError("tokens", "the utterance ended without any; at least 1 is needed")
        utterance.tokens += len(tokens)
        utterance.ended = end

    def _run(self) -> None:
        torch.set_num_threads(self._torch_threads)  # of this worker alone: each thread has a number of its own
        while True:
            self._drop_abandoned()
            self._take_requests()
            with self._wake:
                batch = self._next_batch()
                if not batch:
                    if self._closing and not self._utterances:
                        return
                    if not any(self._can_take(utterance) for utterance in self._utterances):
                        self._wake.wait(_POLL_SECONDS if self._utterances else None)
                    continue
            self._compute(batch)

    def _drop_abandoned(self) -> None:
        now = self._clock()
        if 0 <= now - self._looked_for_abandoned < _POLL_SECONDS:
            return
        self._looked_for_abandoned = now
        for utterance in list(self._utterances):
            with self._wake:
                waiting = [request.reply for request in itertools.islice(utterance.requests, 1)]
            if any(_is_cancelled(reply) for reply in waiting + utterance.kept_open):
                self.cancel(utterance)
            elif (error := self._overdue(utterance, now)) is not None:
                self.cancel(utterance, error)

    def _overdue(self, utterance: Utterance, now: float) -> StreamClosedError | None:
        """Returns the error that ends an utterance which was open or idle for too long, else None."""
        if now - utterance.admitted > (seconds := self._open_seconds):
            return ExpiredError(f"stream: open for {seconds:g} s, which is the limit of one stream; it was dropped")
        with self._wake:
            waiting = any(request.progress for request in utterance.requests)
        if not waiting and now - utterance.last_progress > (seconds := self._limits.idle_seconds):
            return IdleError(f"stream: no tokens for {seconds:g} s; it was dropped")
        return None

    def _take_requests(self) -> None:
        """Hands tokens to sessions until each has a chunk to run or no more tokens.

        To open a session may cost as much as a chunk, for a voice that was not heard before. So utterances are opened
        in the order of their admission, and not before a chunk that has waited longer and has no time.
        """
        for utterance in list(self._utterances):
            with self._wake:
                if not self._can_take(utterance):
                    continue
                if utterance.session is None and self._must_wait(utterance):
                    continue
                utterance.worker = threading.get_ident()
            self._guarded(utterance, self._take)
            self._release([utterance])

    def _must_wait(self, newcomer: Utterance) -> bool:
        now = self._clock()
        return any(chunk.since < newcomer.admitted and not has_time(chunk, now) for chunk in self._ready())

    def _can_take(self, utterance: Utterance) -> bool:
        return bool(utterance.requests) and utterance.ready_since is None and utterance.worker is None

    def _take(self, utterance: Utterance) -> None:
        session = utterance.session or self._open_session(utterance)
        while True:
            with self._wake:
                if utterance.closed or not utterance.requests:
                    return
                request = utterance.requests[0]
            if not request.taken:
                request.taken = True
                session.push(request.tokens)
                if request.end:
                    session.end()
                if request.keep_open:
                    utterance.kept_open.append(request.reply)
            if session.next_chunk() is not None:
                utterance.ready_since = self._clock()
                return
            self._consumed(utterance, request, last=session.done)

    def _open_session(self, utterance: Utterance) -> Session:
        utterance.session = session = self._model.pipeline.open(utterance.voice, utterance.steps)
        self._changed()
        return session

    def _ready(self) -> list[Ready[Utterance]]:
        """Returns the chunks that could run now and that no worker has taken."""
        ready = []
        for utterance in self._utterances:
            since, session = utterance.ready_since, utterance.session
            if since is None or session is None or utterance.worker is not None:
                continue
            if (chunk := session.next_chunk()) is not None:
                ready.append(Ready(utterance, since, utterance.plays_until, chunk.stop - chunk.start, utterance.steps))
        return ready

    def _awaited(self) -> list[float]:
        """Returns when listeners of utterances that wait for tokens run out of audio; unheard ones, their admission."""
        return [
            utterance.admitted if utterance.plays_until is None else utterance.plays_until
            for utterance in self._utterances
            if utterance.ready_since is None and utterance.worker is None
        ]

    def _next_batch(self) -> list[Ready[Utterance]]:
        """Takes the batch that this worker is to compute; from now on its utterances belong to this worker."""
        ready = self._ready()
        batch = self._policy.next_batch(ready, self._clock(), self._idle_workers, self._awaited())
        for chunk in batch:
            chunk.owner.worker = threading.get_ident()
        if batch:
            self._idle_workers -= 1
            if len(batch) < len(ready):
                self._wake.notify()
        return batch

    def _compute(self, batch: list[Ready[Utterance]]) -> None:
        """Runs one chunk of every utterance and sends what comes out."""
        utterances = [chunk.owner for chunk in batch]
        start = self._clock()
        waited = [start - utterance.ready_since for utterance in utterances if utterance.ready_since is not None]
        results = self._advance(
            [utterance.session for utterance in utterances if utterance.session is not None],
            lambda flow, vocoder: self._observer.computed(waited, flow, vocoder),
        )
        took = self._clock() - start
        for utterance, result in zip(utterances, results, strict=True):
            utterance.ready_since = None
            utterance.compute_seconds += took
            if isinstance(result, EngineError):
                self.cancel(utterance, result)
            else:
                self._guarded(utterance, partial(self._send, chunk=result))
        self._release(utterances)
        with self._wake:
            self._idle_workers += 1
            self._policy.computed(sum(chunk.tokens for chunk in batch), took)

    def _advance(self, sessions: list[Session], timed: Timed) -> list[AudioChunk | EngineError]:
        """Runs the pipeline; where it fails as a whole, every session gets that error."""
        try:
            return self._model.pipeline.advance(sessions, timed)
        except EngineError as error:
            return [error] * len(sessions)
        except Exception as error:
            log.exception("a batch failed")
            return [EngineError(f"engine: {type(error).__name__}: {error}")] * len(sessions)

    def _send(self, utterance: Utterance, chunk: AudioChunk) -> None:
        with self._wake:
            if utterance.closed:
                return
            request = utterance.requests[0]
        seconds, now = len(chunk.audio) / self._model.config.sample_rate, self._clock()
        late = 0.0
        if utterance.plays_until is None:
            utterance.heard_since, utterance.plays_until = now, now + self._limits.player_buffer_seconds
        elif now > utterance.plays_until:
            late, utterance.plays_until = now - utterance.plays_until, now
            utterance.underruns += 1
        utterance.plays_until += seconds
        utterance.seconds_sent += seconds
        request.reply.send(chunk)
        self._observer.sent(utterance, seconds, late)
        assert utterance.session is not None
        if utterance.session.next_chunk() is not None:
            utterance.ready_since = self._clock()
        else:
            self._consumed(utterance, request, last=utterance.session.done)

    def _guarded(self, utterance: Utterance, work: Callable[[Utterance], None]) -> None:
        """Runs `work` for an utterance and ends that one alone if it fails."""
        try:
            work(utterance)
        except Token2WavError as error:
            self.cancel(utterance, error)
        except Exception as error:
            log.exception("stream %d failed", utterance.number)
            self.cancel(utterance, EngineError(f"engine: {type(error).__name__}: {error}"))

    def _consumed(self, utterance: Utterance, request: Request, *, last: bool) -> None:
        with self._wake:
            if utterance.closed:
                return
            utterance.requests.popleft()
            if request.progress:
                utterance.last_progress = self._clock()
            finished = [] if request.keep_open else [request.reply]
            if last:
                finished += utterance.kept_open
                utterance.closed = True
                self._utterances.remove(utterance)
                self._close_session(utterance)
        if last:
            self._over(utterance, "finished")
        for reply in finished:
            _answer(reply, lambda reply: reply.finish())

    def _release(self, utterances: list[Utterance]) -> None:
        """Releases utterances of this worker; those that were cancelled meanwhile are freed only now."""
        with self._wake:
            for utterance in utterances:
                utterance.worker = None
            cancelled = [utterance for utterance in utterances if utterance.closed and utterance.session is not None]
            for utterance in cancelled:
                self._close_session(utterance)
        if cancelled:
            self._changed()

    def _close_session(self, utterance: Utterance) -> None:
        if utterance.session is not None:
            self._model.pipeline.close(utterance.session)
            utterance.session = None

    def _over(self, utterance: Utterance, reason: str) -> None:
        utterance.on_close()
        self._observer.ended(utterance, reason)
        self._changed()  # last, so that who sees nothing open has been told of every end

    def _changed(self) -> None:
        with self._telling:  # else an older number could be told after a newer one, and stay
            self._observer.changed(len(self._utterances))


def _is_cancelled(reply: Reply) -> bool:
    try:
        return reply.is_cancelled()
    except Exception:
        log.warning("a request could not say whether it was cancelled, so it is taken to be", exc_info=True)
        return True


def _answer(reply: Reply, call: Callable[[Reply], None]) -> None:
    """Sends a last word that may not come through: the client can be gone, and nobody else may suffer from it."""
    try:
        call(reply)
    except Exception:
        log.warning("the end of a request could not be told", exc_info=True)

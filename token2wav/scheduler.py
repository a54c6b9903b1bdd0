"""Many utterances on one pipeline: one thread that decides whose chunk runs next.

Requests of an utterance are consumed in order, each answered as soon as its tokens have been taken and the chunks that
they made possible have been sent. Utterances that have not been heard yet go first, then whoever waited longest.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from token2wav.config import LimitConfig
from token2wav.errors import EngineError, InputError, LimitError, StreamClosedError, Token2WavError
from token2wav.model import Token2Wav
from token2wav.streaming.session import AudioChunk, Session
from token2wav.voice import Voice, check_vocabulary, token_array

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.05  # how soon a vanished client or an idle utterance is noticed while nothing runs


class Reply(Protocol):
    """Where the answers to one request go. Exactly one of `finish` and `fail` is called, once, and last."""

    def send(self, chunk: AudioChunk) -> None:
        """Delivers one chunk."""

    def finish(self) -> None:
        """Says that the request is consumed."""

    def fail(self, error: Token2WavError) -> None:
        """Says that the utterance is lost, and why."""

    def is_cancelled(self) -> bool:
        """Whether nobody waits for answers any more."""


@dataclass(eq=False)
class _Request:
    tokens: NDArray[np.int32]
    end: bool
    reply: Reply
    keep_open: bool
    taken: bool = False


@dataclass(eq=False)
class Utterance:
    """One utterance in the scheduler. Opaque to callers.

    Attributes:
        closed: whether it has ended for any reason; no more requests are taken.
    """

    voice: Voice
    on_close: Callable[[], None]
    last_request: float
    session: Session | None = None
    requests: deque[_Request] = field(default_factory=deque)
    kept_open: list[Reply] = field(default_factory=list)
    tokens: int = 0
    ended: bool = False
    closed: bool = False
    last_turn: int = -1  # -1: not heard yet


class Scheduler:
    """Runs utterances until `close`. Its methods may be called from any thread and never wait for a chunk.

    Args:
        model: what to run.
        limits: bounds that are checked before work starts.
        on_change: called after an utterance was admitted, started or ended, from any thread.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        model: Token2Wav,
        limits: LimitConfig,
        on_change: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model = model
        self._limits = limits
        self._on_change = on_change
        self._clock = clock
        self._utterances: list[Utterance] = []
        self._turns = itertools.count()
        self._closing = False
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="token2wav-scheduler", daemon=True)
        self._thread.start()

    @property
    def open_utterances(self) -> int:
        return len(self._utterances)

    def open(self, voice: Voice, on_close: Callable[[], None] = lambda: None) -> Utterance:
        """Admits an utterance; nothing is computed yet.

        Args:
            voice: of the speaker.
            on_close: called once, from any thread, when the utterance is over for any reason.

        Raises:
            InputError: the voice does not fit the model, or its prompt is too long.
            LimitError: there are too many utterances.
        """
        voice = self.prepared(voice)
        with self._wake:
            if self._closing:
                raise LimitError("server: it is shutting down; try another one")
            if len(self._utterances) >= self._limits.streams:
                raise LimitError(f"streams: all {self._limits.streams} are in use; try again later")
            utterance = Utterance(voice, on_close, self._clock())
            self._utterances.append(utterance)
            self._wake.notify()  # from now on, idle time is watched
        self._on_change()
        return utterance

    def prepared(self, voice: Voice) -> Voice:
        """A voice as utterances use it.

        Raises:
            InputError: it does not fit the model, or its prompt is too long.
        """
        if (count := len(voice.prompt_tokens)) > self._limits.prompt_tokens:
            raise InputError("prompt_tokens", f"{count} tokens, at most {self._limits.prompt_tokens} are allowed")
        return self._model.prepared(voice)

    def push(
        self, utterance: Utterance, tokens: ArrayLike, reply: Reply, *, end: bool, keep_open: bool = False
    ) -> None:
        """Queues a request.

        Args:
            utterance: from `open`.
            tokens: (n,) integers, n >= 0.
            reply: where its chunks go.
            end: whether the utterance ends with these tokens.
            keep_open: leave `reply` unfinished until the utterance is over, so that it can tell of a cancellation.

        Raises:
            InputError: a token is not one of the model's, there are too many, or the utterance would end without any.
            LimitError: too many requests wait.
            StreamClosedError: the utterance is over.
            After any of them the utterance is closed and `reply` has not been used.
        """
        try:
            array = token_array("tokens", tokens)
            if array.size > self._limits.request_tokens:
                raise InputError(
                    "tokens", f"{array.size} in one request, at most {self._limits.request_tokens} are allowed"
                )
            check_vocabulary("tokens", array, self._model.config.flow.vocab_size)
            with self._wake:
                self._admit(utterance, array, end)
                utterance.requests.append(_Request(array, end, reply, keep_open))
                utterance.last_request = self._clock()
                self._wake.notify()
        except Token2WavError as error:
            self.cancel(utterance, error)
            raise

    def cancel(self, utterance: Utterance, reason: Token2WavError | None = None) -> None:
        """Ends an utterance; requests that wait are failed with `reason`. Harmless when it is over."""
        with self._wake:
            if utterance.closed:
                return
            utterance.closed = True
            self._utterances.remove(utterance)
            replies = [request.reply for request in utterance.requests]
            utterance.requests.clear()
            replies += [reply for reply in utterance.kept_open if reply not in replies]
            if utterance.session is not None:
                self._model.pipeline.close(utterance.session)
        utterance.on_close()
        self._on_change()
        error = reason or StreamClosedError("stream: it was cancelled")
        for reply in replies:
            _answer(reply, lambda reply: reply.fail(error))

    def close(self, drain_seconds: float = 0.0) -> None:
        """Takes no more utterances, waits for the open ones as long as asked, then ends them and the thread."""
        with self._wake:
            self._closing = True
        deadline = time.monotonic() + drain_seconds
        while self._utterances and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        for utterance in list(self._utterances):
            self.cancel(utterance, LimitError("server: it is shutting down; try another one"))
        with self._wake:
            self._wake.notify()
        self._thread.join()

    def _admit(self, utterance: Utterance, tokens: NDArray[np.int32], end: bool) -> None:
        if utterance.closed or utterance.ended:
            raise StreamClosedError("stream: it has ended; tokens after the end are not taken")
        if utterance.tokens + tokens.size > self._limits.stream_tokens:
            raise InputError(
                "tokens", f"the utterance would exceed {self._limits.stream_tokens} tokens, the limit of one stream"
            )
        if len(utterance.requests) >= self._limits.queued_requests:
            raise LimitError(
                f"requests: {self._limits.queued_requests} of this stream already wait; send more tokens in each"
            )
        if end and not utterance.tokens + tokens.size:
            raise InputError("tokens", "the utterance ended without any; at least 1 is needed")
        utterance.tokens += tokens.size
        utterance.ended = end

    def _run(self) -> None:
        while True:
            with self._wake:
                utterance = self._next()
                if utterance is None:
                    if self._closing and not self._utterances:
                        return
                    self._wake.wait(_POLL_SECONDS if self._utterances else None)
            self._drop_abandoned()
            if utterance is not None and not utterance.closed:
                self._serve(utterance)

    def _next(self) -> Utterance | None:
        waiting = [utterance for utterance in self._utterances if utterance.requests]
        return min(waiting, key=lambda utterance: utterance.last_turn, default=None)

    def _drop_abandoned(self) -> None:
        now = self._clock()
        for utterance in list(self._utterances):
            with self._wake:
                waiting = [request.reply for request in itertools.islice(utterance.requests, 1)]
            if any(_is_cancelled(reply) for reply in waiting + utterance.kept_open):
                self.cancel(utterance)
            elif not utterance.requests and now - utterance.last_request > self._limits.idle_seconds:
                self.cancel(
                    utterance,
                    StreamClosedError(f"stream: no request for {self._limits.idle_seconds:g} s; it was dropped"),
                )

    def _serve(self, utterance: Utterance) -> None:
        """One turn: takes the next request if need be, and runs at most one chunk."""
        try:
            self._turn(utterance)
        except Token2WavError as error:
            self.cancel(utterance, error)
        except Exception as error:
            # Whatever it was, it must not take the other utterances with it.
            log.exception("utterance failed")
            self.cancel(utterance, EngineError(f"engine: {type(error).__name__}: {error}"))

    def _turn(self, utterance: Utterance) -> None:
        pipeline = self._model.pipeline
        if utterance.session is None:
            session = pipeline.open(utterance.voice)
            with self._wake:
                utterance.session = session
                if utterance.closed:  # cancelled meanwhile, when there was nothing to close yet
                    pipeline.close(session)
                    return
            self._on_change()
        session = utterance.session
        with self._wake:
            if utterance.closed:
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
            [chunk] = pipeline.advance([session])
            utterance.last_turn = next(self._turns)
            with self._wake:
                if utterance.closed:
                    return
            request.reply.send(chunk)
        if session.next_chunk() is None:
            self._consumed(utterance, request, last=session.done)

    def _consumed(self, utterance: Utterance, request: _Request, *, last: bool) -> None:
        with self._wake:
            if utterance.closed:
                return
            utterance.requests.popleft()
            utterance.last_request = self._clock()
            finished = [] if request.keep_open else [request.reply]
            if last:
                finished += utterance.kept_open
                utterance.closed = True
                self._utterances.remove(utterance)
                assert utterance.session is not None
                self._model.pipeline.close(utterance.session)
        if last:
            utterance.on_close()
            self._on_change()
        for reply in finished:
            _answer(reply, lambda reply: reply.finish())


def _is_cancelled(reply: Reply) -> bool:
    try:
        return reply.is_cancelled()
    except Exception:
        log.warning("a request could not say whether it was cancelled, so it is taken to be", exc_info=True)
        return True


def _answer(reply: Reply, call: Callable[[Reply], None]) -> None:
    """A last word that may not come through: the client can be gone, and nobody else may suffer from it."""
    try:
        call(reply)
    except Exception:
        log.warning("the end of a request could not be told", exc_info=True)

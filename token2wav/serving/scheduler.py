"""Scheduler of requests: it admits them, keeps their state, and decides whose chunks run next.

It has no threads, clock or tensors of its own, and sends nothing: workers (`worker.py`) call it
under their lock, and do what it says.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from token2wav.config import LimitConfig
from token2wav.errors import (
    ExpiredError,
    IdleError,
    InputError,
    LimitError,
    StreamClosedError,
    Token2WavError,
)
from token2wav.serving.policy import Policy, Ready, has_time
from token2wav.serving.request import Message, Reply, Request, Status

MOST_QUEUED_REQUESTS = 1024  # messages of one request that wait to be consumed


class Scheduler:
    """Scheduler of requests.

    Args:
        limits: bounds that are checked before work starts.
        token_rate: tokens that a second of audio has.
        clock: returns monotonic seconds.
    """

    def __init__(self, limits: LimitConfig, token_rate: float, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._open_seconds = limits.open_seconds(token_rate)
        self._clock = clock
        self._policy: Policy[Request] = Policy(limits.batch_streams)
        self._admitted = 0
        self.requests: list[Request] = []  # open ones, in the order of their admission
        self.closing = False  # no more are admitted

    def admit(self, request: Request) -> None:
        """Takes a request in, whose idle time counts from now on; LimitError if there are too many."""
        if self.closing:
            raise LimitError("server: it is shutting down; try another one")
        self._limits.check_room([each.client for each in self.requests], request.client)
        self._admitted += 1
        request.number = self._admitted
        request.admitted = request.last_progress = self._clock()
        self.requests.append(request)

    def push(
        self,
        request: Request,
        tokens: NDArray[np.int32],
        reply: Reply,
        *,
        end: bool,
        keep_open: bool,
    ) -> list[Reply]:
        """Takes tokens that have been checked, and returns the replies that are to be finished now.

        Errors are those of `WorkerPool.push`.
        """
        request.check_open()
        if request.chunker.new_tokens + len(tokens) > self._limits.stream_tokens:
            raise InputError(
                "tokens",
                f"the utterance would exceed {self._limits.stream_tokens} tokens, the limit of "
                f"one stream",
            )
        if len(request.messages) >= MOST_QUEUED_REQUESTS:
            raise LimitError(
                f"requests: {MOST_QUEUED_REQUESTS} of this stream already wait; send more tokens "
                f"in each"
            )
        request.chunker.push(tokens, end=end)
        if request.owner is None:
            request.chunker.decide()  # perhaps for more, where it has waited
        request.messages.append(Message(request.chunker.received, end, reply, keep_open))
        if keep_open:
            request.kept_open.append(reply)
        if len(tokens) or end:
            request.last_progress = self._clock()
        if request.owner is not None:  # who answers, in order
            return []
        finished = self.finish_consumed_messages(request)
        self.release(request)
        return finished

    def finish_consumed_messages(self, request: Request) -> list[Reply]:
        """Returns the replies to messages that are consumed: their tokens have made no chunk
        possible, or it was sent.

        A request whose last chunk was sent is finished.
        """
        # an engine that cannot open it still needs a reply to say so
        if request.over or request.handles is None:
            return []
        finished, messages, chunker = list[Reply](), request.messages, request.chunker
        while messages and (
            chunker.done or (not messages[0].end and chunker.needs(messages[0].received))
        ):
            message = messages.popleft()
            finished += [] if message.keep_open else [message.reply]
        if chunker.done:
            finished += request.kept_open
            self._end(request, Status.FINISHED)
        return finished

    def release(self, request: Request) -> None:
        """Takes a request back from its worker, and notes what it waits for."""
        request.owner = None
        if request.over:
            return
        if not (request.chunker.next_chunk if request.handles else request.messages):
            request.status = Status.WAITING
        elif request.status is not Status.READY:
            request.status, request.ready_since = Status.READY, self._clock()

    def recheck_waiting(self) -> None:
        """Decides again for requests that wait for tokens, whose listeners may not be able to wait
        any longer.

        Their messages are consumed, so only a reply that is kept open can take what is computed
        then.
        """
        for request in self.requests:
            if (
                request.status is Status.WAITING
                and request.handles is not None
                and request.kept_open
            ):
                request.chunker.decide()
                self.release(request)

    def next_to_open(self, owner: int) -> Request | None:
        """Gives a request to a worker that is to open it in the engines, or returns None.

        To open one may cost as much as a chunk, for a voice that was not heard before. So requests
        are opened in the order of their admission, and not before a chunk that has waited longer
        and has no time.
        """
        now = self._clock()
        urgent = min(
            (chunk.since for chunk in self._ready() if not has_time(chunk, now)), default=now
        )
        for request in self.requests:
            if (
                request.status is Status.READY
                and request.handles is None
                and request.admitted <= urgent
            ):
                request.owner, request.status = owner, Status.RUNNING
                return request
        return None

    def next_batch(self, owner: int, idle_workers: int) -> list[Request]:
        """Gives the requests whose chunks are computed together next to a worker; none if none is
        to run now.
        """
        awaited = [  # unopened ones have not been heard either
            request.admitted
            if request.playback.plays_until is None
            else request.playback.plays_until
            for request in self.requests
            if request.status is Status.WAITING
            or (request.status is Status.READY and request.handles is None)
        ]
        batch = [
            chunk.owner
            for chunk in self._policy.next_batch(
                self._ready(), self._clock(), idle_workers, awaited
            )
        ]
        for request in batch:
            request.owner, request.status = owner, Status.RUNNING
        return batch

    def computed(self, tokens: int, seconds: float) -> None:
        """Learns the speed of a worker from a batch that it has computed."""
        self._policy.computed(tokens, seconds)

    def sent(self, request: Request, *, heard: bool = True) -> None:
        """Notes that the next chunk of a request was computed, and whether any of it was sent."""
        request.chunker.computed(heard=heard)
        request.last_progress = self._clock()

    def overdue(self) -> list[tuple[Request, StreamClosedError]]:
        """Returns the requests that were open or idle for too long, each with the error that ends
        it.
        """
        now, limits, found = self._clock(), self._limits, list[tuple[Request, StreamClosedError]]()
        for request in self.requests:
            if now - request.admitted > (seconds := self._open_seconds):
                told = f"stream: open for {seconds:g} s, which is the limit of one stream; it was dropped"
                found.append((request, ExpiredError(told)))
            elif request.status is Status.WAITING and now - request.last_progress > (
                seconds := limits.idle_seconds
            ):
                found.append(
                    (request, IdleError(f"stream: no tokens for {seconds:g} s; it was dropped"))
                )
        return found

    def fail(self, request: Request, error: Token2WavError) -> list[Reply]:
        """Ends a request, and returns the replies that are to say why; none if it is over."""
        if request.over:
            return []
        request.why_closed = (
            str(error) if isinstance(error, StreamClosedError) else f"stream: it failed: {error}"
        )
        replies = [message.reply for message in request.messages]
        replies += [reply for reply in request.kept_open if reply not in replies]
        self._end(request, Status.FAILED)
        return replies

    def _ready(self) -> list[Ready[Request]]:
        """Returns the chunks that could run now and that no worker has taken."""
        return [
            Ready(
                owner=request,
                since=request.ready_since,
                plays_until=request.playback.plays_until,
                tokens=request.chunker.next_tokens,
                steps=request.ode_steps,
            )
            for request in self.requests
            if request.status is Status.READY and request.handles is not None
        ]

    def _end(self, request: Request, status: Status) -> None:
        request.status = status
        request.messages.clear()
        self.requests.remove(request)

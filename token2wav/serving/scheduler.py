"""Scheduler of requests: admits requests, updates their status, and selects the next batch.

The scheduler has no threads, no tensors and no clock of its own, and it sends nothing. Callers hold
the lock of the `RequestPool`, and finish the replies that the scheduler returns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numpy.typing import NDArray

from token2wav.config import LimitConfig
from token2wav.config.model_config import ModelConfig
from token2wav.errors import (
    ExpiredError,
    IdleError,
    InputError,
    LimitError,
    StreamClosedError,
    Token2WavError,
)
from token2wav.serving.policy import Policy, has_time
from token2wav.serving.request import PendingMessage, Reply, Request, Status

# Largest number of messages of one request that wait. The server keeps the memory of each waiting
# message allocated until its reply is finished.
MAX_WAITING_MESSAGES = 64
# Total time of openings in a row by which they may always delay a chunk that has waited longer.
_HARMLESS_SECONDS = 0.05


class Scheduler:
    """Scheduler of requests.

    Attributes:
        requests: open requests, in the order of their admission.
        admitted: number of requests that were ever admitted.
    """

    def __init__(
        self, limits: LimitConfig, config: ModelConfig, clock: Callable[[], float]
    ) -> None:
        self._limits = limits
        self._open_seconds = limits.open_seconds(config.token_frame_rate)
        self._clock = clock
        equal_block = config.block_tokens if config.equal_chunks else 0
        self._policy: Policy[Request] = Policy(limits.batch_streams, equal_block)
        self._opening_debt = 0.0  # seconds of openings that no batches have made up for
        self.admitted = 0
        self.requests: list[Request] = []
        self.closing = False

    def admit(self, request: Request) -> None:
        """Admits a request. Its idle time starts now.

        Raises:
            LimitError: as in `RequestPool.open`.
        """
        if self.closing:
            raise LimitError("server: it is shutting down; try another one")
        if not request.canary:
            owners = [other.client for other in self.requests if not other.canary]
            self._limits.check_room(owners, request.client)
        self.admitted += 1
        request.number = self.admitted
        request.admitted = request.last_progress = self._clock()
        self.requests.append(request)

    def push(
        self,
        request: Request,
        tokens: NDArray[Any],
        reply: Reply,
        *,
        end: bool,
        keep_open: bool,
    ) -> list[Reply]:
        """Adds tokens (n, *token_shape) to a request, and returns the replies that the caller must
        finish now.

        If the largest number of messages waits, the newest waiting message is merged with this one:
        its reply is finished at once, and `reply` takes its place. A client that sends single
        tokens faster than the server computes them therefore loses nothing.

        Raises:
            InputError, StreamClosedError: as in `RequestPool.push`.
        """
        request.check_open()
        if not request.drops_tokens:
            self._add_tokens(request, tokens, end=end)
        merged = list[Reply]()
        if len(request.messages) >= MAX_WAITING_MESSAGES:
            newest = request.messages.pop()
            merged += [] if newest.keep_open else [newest.reply]
        # A limit may have ended the utterance, with or without `end`.
        chunker = request.chunker
        request.messages.append(PendingMessage(chunker.received, chunker.ended, reply, keep_open))
        if keep_open:
            request.kept_open.append(reply)
        if len(tokens) or end:
            request.last_progress = self._clock()
        # A worker that runs the request finishes its replies later, in the order of the messages.
        # An unopened request keeps all replies, because opening may fail, and a reply is needed to
        # send the error.
        if request.status in (Status.RUNNING, Status.UNOPENED):
            return merged
        finished = merged + self.finish_consumed_messages(request)
        self.release(request)
        return finished

    def _add_tokens(self, request: Request, tokens: NDArray[Any], *, end: bool) -> None:
        tokens, end = request.within_limits(tokens, end=end)
        if request.chunker.new_tokens + len(tokens) > self._limits.stream_tokens:
            raise InputError(
                "tokens",
                f"the utterance would exceed {self._limits.stream_tokens} tokens, the limit of "
                f"one stream",
            )
        chunker = request.chunker
        waits = chunker.next_chunk is not None and request.status is not Status.RUNNING
        chunker.push(tokens, end=end)
        if waits:
            # A provisional chunk that waits for a worker may become longer by the new tokens.
            chunker.decide()

    def finish_consumed_messages(self, request: Request) -> list[Reply]:
        """Removes the consumed messages of a request, and returns the replies to finish.

        A message is consumed when every chunk that its tokens make possible was sent.
        """
        if request.over:
            return []
        finished, messages, chunker = list[Reply](), request.messages, request.chunker
        while messages and (
            chunker.done or (not messages[0].end and chunker.needs(messages[0].received))
        ):
            message = messages.popleft()
            finished += [] if message.keep_open else [message.reply]
        if chunker.done:
            finished += request.kept_open
            request.finish()
            self._forget(request)
        return finished

    def release(self, request: Request) -> None:
        request.release(self._clock())

    def recheck_waiting(self) -> None:
        """Lets a shorter chunk run when a listener comes close to the end of its audio.

        By then all messages of the request are consumed. So only a reply that is kept open can take
        the chunk.
        """
        for request in self.requests:
            waits = request.status is Status.WAITING and request.kept_open
            if waits and request.chunker.recheck():
                self.release(request)

    def next_to_open(self, owner: int) -> Request | None:
        """Selects the request that a worker opens next in the stages, in the order of admission.

        Opening computes the prompt of a new voice, which may take as long as a chunk. While an
        urgent or unheard chunk (`policy.py`) has waited longer than a request, openings get as much
        time as batches. This keeps newcomers and open streams from starving each other under
        overload. A canary is opened at once.
        """
        now = self._clock()
        until = now
        if self._opening_debt > _HARMLESS_SECONDS:
            urgent = (request for request in self._ready() if not has_time(request, now))
            until = min((request.ready_since for request in urgent), default=now)
        for request in sorted(self.requests, key=lambda request: not request.canary):
            unopened = request.status is Status.UNOPENED and bool(request.messages)
            if unopened and (request.canary or request.admitted <= until):
                request.start(owner)
                return request
        return None

    def next_batch(self, owner: int, idle_workers: int) -> list[Request]:
        """Selects the requests whose next chunks a worker computes as one batch. The worker then
        owns them. A canary runs alone and first.
        """
        ready = self._ready()
        ready = [request for request in ready if request.canary] or ready
        waiting = [
            request
            for request in self.requests
            if request.status in (Status.WAITING, Status.UNOPENED)
        ]
        batch = self._policy.next_batch(ready, self._clock(), idle_workers, waiting)
        common_tokens = self._policy.common_tokens(batch)
        for request in batch:
            if common_tokens:
                request.chunker.shorten(common_tokens)
            request.start(owner)
        return batch

    def record_opening(self, seconds: float) -> None:
        self._opening_debt += seconds

    def record_batch(self, tokens: int, seconds: float) -> None:
        self._opening_debt = max(0.0, self._opening_debt - seconds)
        self._policy.record_batch(tokens, seconds)

    def overdue(self) -> list[tuple[Request, StreamClosedError]]:
        now, limits = self._clock(), self._limits
        overdue = list[tuple[Request, StreamClosedError]]()
        for request in self.requests:
            if now - request.admitted > (seconds := self._open_seconds):
                message = (
                    f"stream: open for {seconds:g} s, the limit of one stream, so it was closed"
                )
                overdue.append((request, ExpiredError(message)))
            elif request.awaits_tokens and now - request.last_progress > (
                seconds := limits.idle_seconds
            ):
                overdue.append(
                    (request, IdleError(f"stream: no tokens for {seconds:g} s, so it was closed"))
                )
        return overdue

    def fail(self, request: Request, error: Token2WavError) -> list[Reply]:
        """Returns the replies that the caller must fail with the error."""
        if request.over:
            return []
        replies = [message.reply for message in request.messages]
        replies += [reply for reply in request.kept_open if reply not in replies]
        request.fail(error)
        self._forget(request)
        return replies

    def _ready(self) -> list[Request]:
        return [request for request in self.requests if request.status is Status.READY]

    def _forget(self, request: Request) -> None:
        request.messages.clear()
        self.requests.remove(request)

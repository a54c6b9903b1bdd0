"""Scheduler of requests: admits requests, updates their status, and decides the turns of workers.

The scheduler has no threads, no tensors and no clock of its own, and it sends nothing. Callers hold
the lock of the `RequestPool`, and pass the time of its clock. A turn of a worker has four steps:

1. `next_turn` decides what the worker opens or computes.
2. `finish_turn` takes the results, and returns what is sent to clients.
3. `settle` records what was sent, and returns the replies to end.
4. Further calls of `settle` take the messages that arrive while replies end. The turn is over when
   there are no more replies to end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from numpy.typing import NDArray

from token2wav.config import LimitConfig
from token2wav.config.model_config import ModelConfig
from token2wav.errors import (
    BackendError,
    ExpiredError,
    IdleError,
    InputError,
    LimitError,
    StreamClosedError,
    Token2WavError,
    to_public_error,
)
from token2wav.serving.policy import Policy, has_time
from token2wav.serving.request import PendingMessage, Reply, Request, Status
from token2wav.serving.turn import Answer, Delivery, ResultT, Turn, hang_seconds

# Largest number of messages of one request that wait. The server keeps the memory of each waiting
# message allocated until its reply is finished.
MAX_WAITING_MESSAGES = 64
# Total time of openings in a row by which they may always delay a chunk that has waited longer.
_HARMLESS_SECONDS = 0.05


class ReadyChunk(NamedTuple):
    """Next chunk of a request, with the properties that the policy reads (`Schedulable`)."""

    request: Request
    ready_since: float
    plays_until: float | None
    seconds_sent: float
    next_tokens: int
    ode_steps: int
    next_provisional: bool
    next_divisible: bool

    @classmethod
    def of(cls, request: Request) -> ReadyChunk:
        chunker, playback = request.chunker, request.playback
        return cls(
            request,
            request.ready_since,
            playback.plays_until,
            playback.seconds_sent,
            chunker.next_tokens,
            request.stream_options.steps,
            chunker.next_provisional,
            chunker.next_divisible,
        )


class Scheduler:
    """Scheduler of requests.

    Args:
        workers: turns that are computed at the same time.
        senders: further workers, which send the results of their turns meanwhile.

    Attributes:
        requests: open requests, in the order of their admission.
        admitted: number of requests that were ever admitted.
        turns: turns that are not over.
        threads: number of all workers.
    """

    def __init__(
        self, limits: LimitConfig, config: ModelConfig, workers: int = 1, senders: int = 0
    ) -> None:
        self._limits = limits
        self._open_seconds = limits.open_seconds(config.token_frame_rate)
        equal_block = config.block_tokens if config.equal_chunks else 0
        self._policy: Policy[ReadyChunk] = Policy(limits.batch_streams, equal_block)
        self._opening_debt = 0.0  # seconds of openings that no batches have made up for
        self._workers, self._senders = workers, senders
        self.threads = workers + senders
        self.turns: set[Turn] = set()
        self._computing: set[Turn] = set()
        self.admitted = 0
        self.requests: list[Request] = []
        self.closing = False

    def admit(self, request: Request, now: float) -> None:
        """Admits a request. Its idle time starts now.

        Raises:
            LimitError, BackendError: as in `RequestPool.open`.
        """
        # This check precedes the limits, because the health check and the canary (the launcher's
        # test synthesis) regard a server that raises LimitError as healthy.
        self._check_working(now)
        if self.closing:
            raise LimitError("server: it is shutting down; try another one")
        if not request.canary:
            owners = [other.client for other in self.requests if not other.canary]
            self._limits.check_room(owners, request.client)
        self.admitted += 1
        request.number = self.admitted
        request.admitted = request.last_progress = now
        self.requests.append(request)

    def push(
        self,
        request: Request,
        tokens: NDArray[Any],
        reply: Reply,
        now: float,
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
            request.last_progress = now
        # A worker that runs the request finishes its replies later, in the order of the messages.
        # An unopened request keeps all replies, because opening may fail, and a reply is needed to
        # send the error.
        if request.status in (Status.RUNNING, Status.UNOPENED):
            return merged
        finished = merged + self._finish_consumed_messages(request)
        request.release(now)
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

    @property
    def can_compute(self) -> bool:
        """Whether a further turn may be computed now."""
        return len(self._computing) < self._workers

    @property
    def has_work(self) -> bool:
        """Whether an idle worker may find a turn now."""
        return bool(self.can_compute and self.idle_workers) and any(
            request.status is Status.READY
            or (request.status is Status.UNOPENED and request.messages)
            for request in self.requests
        )

    @property
    def idle_workers(self) -> int:
        return self.threads - len(self.turns)

    def next_turn(self, worker: int, now: float) -> Turn | None:
        """Decides what a worker opens or computes next. The worker then owns these requests.

        Returns:
            None if the worker has to wait.
        """
        if not self.can_compute:
            return None
        self._recheck_waiting(now)
        unopened = self._next_to_open(now)
        requests = [unopened] if unopened else self._next_batch(now)
        if not requests:
            return None
        turn = _turn(worker, requests, now, opens=unopened is not None)
        for request in requests:
            request.start(worker)
        self.turns.add(turn)
        self._computing.add(turn)
        return turn

    def finish_turn(
        self,
        turn: Turn,
        results: Sequence[ResultT | Token2WavError | None],
        seconds: float,
        now: float,
    ) -> list[Delivery[ResultT]]:
        """Records the computation of a turn, and returns the results to send.

        Args:
            seconds: time of the computation.
            now: time at which the results are sent.
        """
        self._computing.discard(turn)
        if turn.opens:
            self._opening_debt += seconds
        else:
            self._opening_debt = max(0.0, self._opening_debt - seconds)
            self._policy.record_batch(turn.tokens, seconds)
            for request in turn.requests:
                request.compute_seconds += seconds
        return [
            _delivery(request, result)
            for request, result in zip(turn.requests, results, strict=True)
        ]

    def settle(
        self, turn: Turn, now: float, sent: Sequence[ResultT | Token2WavError | None] = ()
    ) -> list[Answer]:
        """Records what was sent, and releases the requests that have no more replies to end.

        Args:
            sent: result of each request that was sent, or the error of a request that cannot
                continue; empty for the second and all further calls.

        Returns:
            The replies to end before the next call, and requests that are over and released, whose
            memory must be freed. The turn is over when the list is empty.
        """
        answers = list[Answer]()
        for request, result in zip(turn.requests, sent, strict=False):
            if answer := self._finish_chunk(request, result, opened=turn.opens):
                answers.append(answer)
        for request in turn.requests:
            if request.owner == turn.worker and (answer := self._release(request, now)):
                answers.append(answer)
        if not answers:
            self.turns.discard(turn)
        return answers

    def give_up(self, turn: Turn, error: Token2WavError, now: float) -> list[Answer]:
        """Ends a turn whose worker has failed, and fails the requests that the worker still owns.

        Returns:
            As in `settle`.
        """
        self._computing.discard(turn)
        self.turns.discard(turn)
        owned = [request for request in turn.requests if request.owner == turn.worker]
        answers = [self.fail(request, error) or Answer(request, []) for request in owned]
        for request in owned:
            request.release(now)
        return answers

    def hung(self, now: float) -> list[Turn]:
        return [turn for turn in self.turns if now > turn.hangs_after]

    def fail(self, request: Request, error: Token2WavError, ended: str = "") -> Answer | None:
        """Ends a request with an error. The caller must fail the replies.

        Args:
            ended: reason for the end; empty for the name of the error.

        Returns:
            None if the request is over.
        """
        if request.over:
            return None
        replies = [message.reply for message in request.messages]
        replies += [reply for reply in request.kept_open if reply not in replies]
        request.fail(error)
        self._forget(request)
        return Answer(request, replies, error, ended or type(error).__name__)

    def overdue(self, now: float) -> list[tuple[Request, StreamClosedError]]:
        limits = self._limits
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

    def _check_working(self, now: float) -> None:
        hung = self.hung(now)
        if len(hung) >= self._workers:
            seconds = now - max(turn.started for turn in hung)
            raise BackendError(
                f"backend: no batch has finished for {seconds:.0f} s; the server hangs"
            )

    def _finish_consumed_messages(self, request: Request) -> list[Reply]:
        """Removes the consumed messages of a request, and returns the replies to finish.

        A message is consumed when every chunk that its tokens make possible was sent.
        """
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

    def _recheck_waiting(self, now: float) -> None:
        """Lets a shorter chunk run when a listener comes close to the end of its audio.

        By then all messages of the request are consumed. So only a reply that is kept open can take
        the chunk.
        """
        for request in self.requests:
            waits = request.status is Status.WAITING and request.kept_open
            if waits and request.chunker.recheck():
                request.release(now)

    def _next_to_open(self, now: float) -> Request | None:
        """Selects the request that a worker opens next in the stages, in the order of admission.

        Opening computes the prompt of a new voice, which may take as long as a chunk. While an
        urgent or unheard chunk (`policy.py`) has waited longer than a request, openings get as much
        time as batches. This keeps newcomers and open streams from starving each other under
        overload. A canary is opened at once.
        """
        unopened = [
            request
            for request in self.requests
            if request.status is Status.UNOPENED and request.messages
        ]
        if canary := next((request for request in unopened if request.canary), None):
            return canary
        until = now
        if unopened and self._opening_debt > _HARMLESS_SECONDS:
            urgent = (
                request.ready_since
                for request in self.requests
                if request.status is Status.READY
                and not has_time(request.playback.plays_until, now)
            )
            until = min(urgent, default=now)
        return next((request for request in unopened if request.admitted <= until), None)

    def _next_batch(self, now: float) -> list[Request]:
        """Selects the requests whose next chunks a worker computes as one batch. A canary runs
        alone and first.
        """
        ready = [request for request in self.requests if request.status is Status.READY]
        ready = [request for request in ready if request.canary] or ready
        waiting = (
            request.admitted if (ends := request.playback.plays_until) is None else ends
            for request in self.requests
            if request.status in (Status.WAITING, Status.UNOPENED)
        )
        idle = max(1, self.idle_workers - self._senders)
        batch = self._policy.next_batch([*map(ReadyChunk.of, ready)], now, idle, waiting)
        if common_tokens := self._policy.common_tokens(batch):
            for chunk in batch:
                chunk.request.chunker.shorten(common_tokens)
        return [chunk.request for chunk in batch]

    def _finish_chunk(
        self, request: Request, result: ResultT | Token2WavError | None, *, opened: bool
    ) -> Answer | None:
        """Records the result of a turn for one request. Any error ends only this request."""
        if isinstance(result, Token2WavError):
            return self.fail(request, result)
        try:
            if not opened:
                request.finish_chunk(result)
        except Exception as error:
            return self.fail(request, to_public_error(error))
        return None

    def _release(self, request: Request, now: float) -> Answer | None:
        """Releases a request, unless replies have to end before. Any error ends it alone."""
        try:
            answer = self._answer(request)
        except Exception as error:
            answer = self.fail(request, to_public_error(error))
        if answer is None or request.over:
            request.release(now)
        return answer

    def _answer(self, request: Request) -> Answer | None:
        if request.over:
            return Answer(request, [])
        replies = self._finish_consumed_messages(request)
        if not request.over:
            return Answer(request, replies) if replies else None
        error, reason = request.last_error, request.end_reason
        ended = type(error).__name__ if error else reason.value if reason else "finished"
        return Answer(request, replies, error, ended)

    def _forget(self, request: Request) -> None:
        request.messages.clear()
        self.requests.remove(request)


def _turn(worker: int, requests: Sequence[Request], now: float, *, opens: bool) -> Turn:
    tokens = sum(
        len(request.voice.prompt_tokens) if opens else request.chunker.next_tokens
        for request in requests
    )
    predicts = not opens and not requests[0].chunker.next_provisional
    waited = [now - request.ready_since for request in requests]
    return Turn(worker, requests, opens, tokens * predicts, waited, now, now + hang_seconds(tokens))


def _delivery(request: Request, result: ResultT | Token2WavError | None) -> Delivery[ResultT]:
    """Finds the reply that takes a result. Any error ends only this request."""
    if result is None or isinstance(result, Token2WavError):
        return Delivery(request, result)
    try:
        late = request.hear(result)
        return Delivery(request, result, request.next_reply(), late)
    except Exception as error:
        return Delivery(request, to_public_error(error))

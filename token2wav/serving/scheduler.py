"""Scheduler of utterances: admits them, updates their status, and decides the turns of workers.

The scheduler has no threads, no tensors and no clock of its own, and it sends nothing. Callers hold
the lock of the `UtterancePool`, and pass the time of its clock. A turn of a worker has four steps:

1. `next_turn` decides: the worker opens an utterance, or computes a batch of chunks.
2. `finish_turn` takes the results, and returns the audio to send.
3. `settle` records the sent audio, and returns the replies to end.
4. Further calls of `settle` take the messages that arrive while replies end. The turn is over when
   there are no more replies to end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

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
from token2wav.serving.pipeline import Result
from token2wav.serving.policy import (
    Policy,
    ReadyChunk,
    hang_seconds,
    has_interruptions,
    has_time,
)
from token2wav.serving.turn import Answer, Delivery, Turn
from token2wav.serving.utterance import PendingMessage, Reply, Status, Utterance

# Most messages of one utterance that wait. The server keeps the memory of each waiting
# message allocated until its reply is finished.
MAX_WAITING_MESSAGES = 64
# Openings may always delay a chunk by this time in total, even if it has waited longer.
_HARMLESS_SECONDS = 0.05


class Scheduler:
    """Scheduler of utterances.

    Args:
        workers: turns that are computed at the same time.
        senders: further workers, which send the results of their turns meanwhile.
        prompt_batches: returns how many batches the opening of an utterance computes, as
            `Stage.prompt_batches`.

    Attributes:
        utterances: open utterances, in the order of their admission.
        admitted: utterances that were ever admitted.
        threads: all workers, senders included.
    """

    def __init__(
        self,
        limits: LimitConfig,
        config: ModelConfig,
        workers: int = 1,
        senders: int = 0,
        prompt_batches: Callable[[Utterance], int] = lambda _: 0,
    ) -> None:
        self._limits = limits
        self._open_seconds = limits.open_seconds(config.token_frame_rate)
        equal_block = config.block_tokens if config.equal_chunks else 0
        self._policy = Policy(limits.batch_streams, equal_block)
        self._opening_debt = 0.0  # seconds of openings that no batches have made up for
        self._has_interruptions = has_interruptions(config, workers)
        self._prompt_batches = prompt_batches
        self._workers, self._senders = workers, senders
        self.threads = workers + senders
        self.turns: set[Turn] = set()
        self._computing: set[Turn] = set()
        self.admitted = 0
        self.utterances: list[Utterance] = []
        self.closing = False

    def admit(self, utterance: Utterance, now: float) -> None:
        """Admits an utterance, or raises LimitError or BackendError, as `UtterancePool.open`. Its
        idle time starts now.
        """
        # This check precedes the limits, because the health check and the canary (the launcher's
        # test synthesis) regard a server that raises LimitError as healthy.
        self._check_working(now)
        if self.closing:
            raise LimitError("server: it is shutting down; try another one")
        if not utterance.canary:
            owners = [
                other.client for other in self.utterances if not (other.canary or other.leaves)
            ]
            self._limits.check_room(owners, utterance.client)
        self.admitted += 1
        utterance.number = self.admitted
        utterance.admitted = utterance.last_progress = now
        self.utterances.append(utterance)

    def push(
        self,
        utterance: Utterance,
        tokens: NDArray[Any],
        reply: Reply,
        now: float,
        *,
        end: bool,
        keep_open: bool,
    ) -> list[Reply]:
        """Adds tokens (n, *token_shape) to an utterance, and returns the replies that the caller
        must finish now.

        If `MAX_WAITING_MESSAGES` messages wait already, the newest of them is merged with this
        one: its reply is finished at once, and `reply` takes its place. A client that sends single
        tokens faster than the server computes them therefore loses nothing.

        Raises:
            InputError, StreamClosedError: as in `UtterancePool.push`.
        """
        utterance.check_open()
        if not utterance.drops_tokens:
            self._add_tokens(utterance, tokens, end=end)
        merged = list[Reply]()
        if len(utterance.messages) >= MAX_WAITING_MESSAGES:
            newest = utterance.messages.pop()
            merged += [] if newest.keep_open else [newest.reply]
        # A limit may have ended the utterance, with or without `end`.
        chunker = utterance.chunker
        utterance.messages.append(PendingMessage(chunker.received, chunker.ended, reply, keep_open))
        if keep_open:
            utterance.kept_open.append(reply)
        # A worker that runs the utterance finishes its replies later, in the order of the messages.
        # An unopened utterance keeps all replies, because opening may fail, and a reply is needed
        # to send the error.
        if utterance.status in (Status.RUNNING, Status.UNOPENED):
            return merged
        finished = merged + self._finish_consumed_messages(utterance)
        utterance.release(now)
        return finished

    def _add_tokens(self, utterance: Utterance, tokens: NDArray[Any], *, end: bool) -> None:
        room = self._limits.stream_tokens - utterance.chunker.new_tokens
        # A message may have millions of tokens. One more than there is room for is enough.
        tokens, end = utterance.within_limits(tokens[: room + 1], end=end)
        if len(tokens) > room:
            raise InputError(
                "tokens",
                f"the utterance would exceed {self._limits.stream_tokens} tokens, the limit of "
                f"one stream",
            )
        chunker = utterance.chunker
        waits = chunker.next_chunk is not None and utterance.status is not Status.RUNNING
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
        return bool(self.can_compute and self.idle_workers) and (
            any(utterance.status is Status.READY for utterance in self.utterances)
            or bool(self._unopened)
        )

    @property
    def _unopened(self) -> list[Utterance]:
        """Utterances that may be opened, in the order of their admission."""
        return [
            utterance
            for utterance in self.utterances
            if utterance.status is Status.UNOPENED and utterance.messages
        ]

    @property
    def idle_workers(self) -> int:
        return self.threads - len({turn.worker for turn in self.turns})

    def next_turn(self, worker: int, now: float) -> Turn | None:
        """Returns the next turn of a worker, which then owns its utterances; None if the worker has
        to wait.
        """
        if not self.can_compute:
            return None
        self._recheck_waiting(now)
        unopened = self._next_to_open(now)
        utterances = [unopened] if unopened else self._next_batch(now)
        if not utterances:
            return None
        turn = self._begin(worker, utterances, now, opens=unopened is not None)
        self._computing.add(turn)
        return turn

    def next_interruption(self, turn: Turn, spent: float, now: float) -> Turn | None:
        """Returns a turn that a worker takes between two ODE steps of its present turn: a batch of
        first chunks, or the opening of an utterance. Returns None if nothing may interrupt it now.

        Args:
            turn: present turn, which must be interruptible.
            spent: seconds of earlier interruptions of `turn`.
        """
        ready = [utterance for utterance in self.utterances if utterance.status is Status.READY]
        first = [
            ReadyChunk.of(utterance)
            for utterance in ready
            if not utterance.chunker.chunks and not utterance.canary
        ]
        unopened = [utterance for utterance in self._unopened if not utterance.canary]
        if not (first or unopened) or now > turn.hangs_after:
            return None
        ends = [
            utterance.playback.plays_until for utterance in turn.utterances if not utterance.over
        ]
        # A listener that is without audio already waits for the next batch in any case.
        next_ends = [utterance.playback.plays_until for utterance in ready]
        ends += [end for end in next_ends if end is not None and end > now]
        ran = now - turn.started - spent
        if not self._policy.may_interrupt(turn.tokens, ran, spent, ends, now):
            return None
        batch = [chunk.utterance for chunk in self._policy.interrupting(first, spent)]
        if batch:
            return self._begin(turn.worker, batch, now, opens=False, interrupts=True)
        for utterance in unopened:
            if self._opens_in_time(utterance, spent):
                return self._begin(turn.worker, [utterance], now, opens=True, interrupts=True)
        return None

    def _opens_in_time(self, utterance: Utterance, spent: float) -> bool:
        """Returns whether the opening of an utterance may interrupt a batch."""
        batches = self._prompt_batches(utterance)
        tokens = len(utterance.voice.prompt_tokens) if batches else 0
        return self._policy.fits_interruption(tokens, batches, spent)

    def _begin(
        self,
        worker: int,
        utterances: Sequence[Utterance],
        now: float,
        *,
        opens: bool,
        interrupts: bool = False,
    ) -> Turn:
        """Makes a turn, and gives its utterances to the worker."""
        tokens = sum(
            len(utterance.voice.prompt_tokens) if opens else utterance.chunker.next_tokens
            for utterance in utterances
        )
        predicts = not opens and not utterances[0].chunker.next_provisional
        long = predicts and self._policy.is_long(tokens)
        turn = Turn(
            worker=worker,
            utterances=utterances,
            opens=opens,
            interrupts=interrupts,
            interruptible=self._has_interruptions and long and not interrupts,
            tokens=tokens * predicts,
            waited=[now - utterance.ready_since for utterance in utterances],
            started=now,
            hangs_after=now + hang_seconds(tokens),
        )
        for utterance in utterances:
            utterance.start(worker)
        self.turns.add(turn)
        return turn

    def finish_turn(
        self,
        turn: Turn,
        results: Sequence[Result],
        seconds: float,
        now: float,
    ) -> list[Delivery]:
        """Records the computation of a turn, and returns the results to send."""
        self._computing.discard(turn)
        if turn.opens:
            self._opening_debt += seconds
        else:
            self._opening_debt = max(0.0, self._opening_debt - seconds)
            if turn.interrupts:
                self._policy.record_interruption(seconds)
            else:
                self._policy.record_batch(turn.tokens, seconds)
            for utterance in turn.utterances:
                utterance.compute_seconds += seconds
        return [
            _delivery(utterance, result)
            for utterance, result in zip(turn.utterances, results, strict=True)
        ]

    def settle(self, turn: Turn, now: float, sent: Sequence[Result] = ()) -> list[Answer]:
        """Records the sent audio, and releases the utterances without replies to end.

        Args:
            sent: result of each utterance that was sent, or the error of an utterance that cannot
                continue; empty for the second and all further calls.

        Returns:
            The replies to end before the next call, and utterances that are over and released,
            whose memory must be freed. The turn is over when the list is empty.
        """
        answers = list[Answer]()
        computed, results = bool(sent) and not turn.opens, sent or [None] * len(turn.utterances)
        for utterance, result in zip(turn.utterances, results, strict=True):
            if utterance.owner != turn.worker:  # an earlier call has released it
                continue
            answer = self._settled(utterance, result, computed=computed)
            if answer is None or utterance.over:
                utterance.release(now)
            if answer:
                answers.append(answer)
        if not answers:
            self.turns.discard(turn)
        return answers

    def give_up(self, turn: Turn, error: Token2WavError, now: float) -> list[Answer]:
        """Ends the turn of a worker that has failed, and fails the utterances that the worker owns.
        Returns their replies, as `settle`.
        """
        self._computing.discard(turn)
        self.turns.discard(turn)
        owned = [utterance for utterance in turn.utterances if utterance.owner == turn.worker]
        answers = [self._failed(utterance, error) for utterance in owned]
        for utterance in owned:
            utterance.release(now)
        return answers

    def hung(self, now: float) -> list[Turn]:
        """Lists the turns of hung workers. If an interruption hangs, so does the batch under it."""
        workers = {turn.worker for turn in self.turns if now > turn.hangs_after}
        return [turn for turn in self.turns if turn.worker in workers]

    def fail(self, utterance: Utterance, error: Token2WavError, ended: str = "") -> Answer | None:
        """Ends an utterance with an error. Returns the replies that the caller must fail; None if
        the utterance is over already. `ended` is the reason for the end; empty for the name of the
        error.
        """
        if utterance.over:
            return None
        replies = [message.reply for message in utterance.messages]
        replies += [reply for reply in utterance.kept_open if reply not in replies]
        utterance.fail(error)
        self._forget(utterance)
        return Answer(utterance, replies, error, ended or type(error).__name__)

    def overdue(self, now: float) -> list[tuple[Utterance, StreamClosedError]]:
        limits = self._limits
        overdue = list[tuple[Utterance, StreamClosedError]]()
        for utterance in self.utterances:
            if now - utterance.admitted > (seconds := self._open_seconds):
                message = (
                    f"stream: open for {seconds:g} s, the limit of one stream, so it was closed"
                )
                overdue.append((utterance, ExpiredError(message)))
            elif utterance.awaits_tokens and now - utterance.last_progress > (
                seconds := limits.idle_seconds
            ):
                overdue.append(
                    (utterance, IdleError(f"stream: no tokens for {seconds:g} s, so it was closed"))
                )
        return overdue

    def _check_working(self, now: float) -> None:
        hung = self.hung(now)
        if len({turn.worker for turn in hung}) >= self._workers:
            seconds = now - max(turn.started for turn in hung)
            raise BackendError(
                f"backend: no batch has finished for {seconds:.0f} s; the server hangs"
            )

    def _finish_consumed_messages(self, utterance: Utterance) -> list[Reply]:
        """Removes the consumed messages of an utterance, and returns the replies to finish.

        A message is consumed when every chunk that its tokens make possible was sent.
        """
        finished, messages, chunker = list[Reply](), utterance.messages, utterance.chunker
        while messages and (
            chunker.done or (not messages[0].end and chunker.needs(messages[0].received))
        ):
            message = messages.popleft()
            finished += [] if message.keep_open else [message.reply]
        if chunker.done:
            finished += utterance.kept_open
            utterance.finish()
            self._forget(utterance)
        return finished

    def _recheck_waiting(self, now: float) -> None:
        """Lets a shorter chunk run when a listener comes close to the end of its audio.

        By then all messages of the utterance are consumed. So only a reply that is kept open can
        take the chunk.
        """
        for utterance in self.utterances:
            waits = utterance.status is Status.WAITING and utterance.kept_open
            if waits and utterance.chunker.recheck():
                utterance.release(now)

    def _next_to_open(self, now: float) -> Utterance | None:
        """Selects the utterance that a worker opens next in the stages, in the order of admission.

        Opening computes the prompt of a new voice, which may take as long as a chunk. While an
        urgent or unheard chunk (`policy.py`) has waited longer than an utterance, openings get as
        much time as batches. This keeps newcomers and open streams from starving each other under
        overload. A canary is opened at once.
        """
        unopened = self._unopened
        if canary := next((utterance for utterance in unopened if utterance.canary), None):
            return canary
        until = now
        if unopened and self._opening_debt > _HARMLESS_SECONDS:
            urgent = (
                utterance.ready_since
                for utterance in self.utterances
                if utterance.status is Status.READY
                and not has_time(utterance.playback.plays_until, now)
            )
            until = min(urgent, default=now)
        return next((utterance for utterance in unopened if utterance.admitted <= until), None)

    def _next_batch(self, now: float) -> list[Utterance]:
        """Selects the utterances whose next chunks a worker computes as one batch. A canary runs
        alone and first.
        """
        ready = [utterance for utterance in self.utterances if utterance.status is Status.READY]
        if not ready:
            return []
        ready = [utterance for utterance in ready if utterance.canary] or ready
        waiting = (
            utterance.admitted if (ends := utterance.playback.plays_until) is None else ends
            for utterance in self.utterances
            if utterance.status in (Status.WAITING, Status.UNOPENED)
        )
        idle = max(1, self.idle_workers - self._senders)
        batch = self._policy.next_batch([*map(ReadyChunk.of, ready)], now, idle, waiting)
        if common_tokens := self._policy.common_tokens(batch):
            for chunk in batch:
                chunk.utterance.chunker.shorten(common_tokens)
        return [chunk.utterance for chunk in batch]

    def _settled(self, utterance: Utterance, result: Result, *, computed: bool) -> Answer | None:
        """Returns the replies to end before a worker can release an utterance; None if there are
        none. Any error ends only this utterance. If `computed`, `result` belongs to its next chunk.
        """
        if isinstance(result, Token2WavError):
            return self._failed(utterance, result)
        try:
            if computed:
                utterance.finish_chunk(result)
            return self._answer(utterance)
        except Exception as error:
            return self._failed(utterance, to_public_error(error))

    def _failed(self, utterance: Utterance, error: Token2WavError) -> Answer:
        return self.fail(utterance, error) or Answer(utterance, [])

    def _answer(self, utterance: Utterance) -> Answer | None:
        if utterance.over:
            return Answer(utterance, [])
        replies = self._finish_consumed_messages(utterance)
        if not utterance.over:
            return Answer(utterance, replies) if replies else None
        error, reason = utterance.last_error, utterance.end_reason
        ended = type(error).__name__ if error else reason.value if reason else "finished"
        return Answer(utterance, replies, error, ended)

    def _forget(self, utterance: Utterance) -> None:
        utterance.messages.clear()
        self.utterances.remove(utterance)


def _delivery(utterance: Utterance, result: Result) -> Delivery:
    """Finds the reply that takes a result. Any error ends only this utterance."""
    if result is None or isinstance(result, Token2WavError):
        return Delivery(utterance, result)
    try:
        late = utterance.hear(result)
        return Delivery(utterance, result, utterance.next_reply(), late)
    except Exception as error:
        return Delivery(utterance, to_public_error(error))

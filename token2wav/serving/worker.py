"""Workers of a server: threads that compute the batches which the scheduler forms, and answer who
waits for them.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from numpy.typing import ArrayLike

from token2wav.config import LimitConfig
from token2wav.errors import (
    DeviceLostError,
    EngineError,
    LimitError,
    StreamClosedError,
    Token2WavError,
)
from token2wav.model_config import StageName
from token2wav.serving.audio_output import AudioChunk, AudioFormat
from token2wav.serving.chunking import checked_tokens
from token2wav.serving.pipeline import Pipeline
from token2wav.serving.request import Reply, Request
from token2wav.serving.scheduler import Scheduler
from token2wav.voice import Voice

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.05  # how soon a vanished client or an idle request is noticed
_HANG_SECONDS = 180.0  # a batch of eight chunks of 100 tokens takes a slow CPU 130 s
# in these eight chunks; a larger batch, which `limits.batch_streams` may allow, has longer
_HANG_TOKENS = 800
_MOST_WORKERS = 4


class Observer:
    """Observer of workers: it is called from any thread when something happens, and does nothing by
    itself.
    """

    def changed(self, open_requests: int) -> None:
        """Is called when a request was admitted, opened or ended, with the number of open ones."""

    def computed(self, waited: list[float], seconds: Mapping[StageName, float]) -> None:
        """Is called when a batch has run, with the seconds that each chunk had waited, and those of
        each stage.
        """

    def refused(self, error: Token2WavError) -> None:
        """Is called when a request that was admitted found no room in the engines."""

    def sent(self, request: Request, seconds: float, late: float) -> None:
        """Is called when audio was sent, with its duration, and the seconds for which the listener
        heard nothing.
        """

    def ended(self, request: Request, reason: str) -> None:
        """Is called when a request is over: `finished`, `cancelled`, or the name of an error such
        as `IdleError`.
        """


def default_workers(device: str) -> int:
    """Returns the number of workers: one per CPU core that this process may use, up to 4; on a GPU
    one fills it.
    """
    return min(_MOST_WORKERS, len(os.sched_getaffinity(0))) if device == "cpu" else 1


def hang_seconds(tokens: int) -> float:
    """Returns the time after which a worker that computes so many tokens is taken to hang."""
    return _HANG_SECONDS * max(1.0, tokens / _HANG_TOKENS)


@dataclass(eq=False)
class _Worker:
    """Worker of a pool: one thread, and the requests that it works on.

    Attributes:
        number: position in its pool, for logs and the name of the thread.
        taken: requests that it opens or computes now; none while it is idle.
        since: time at which it took them.
        hang_seconds: time after which it is taken to hang.
        lost: whether it was found to hang, so that these requests have failed.
    """

    number: int
    taken: Sequence[Request] = ()
    since: float = 0.0
    hang_seconds: float = _HANG_SECONDS
    lost: bool = False

    def hangs(self, now: float) -> bool:
        return bool(self.taken) and now - self.since > self.hang_seconds


class WorkerPool:
    """Pool of workers, which serve requests until `close`, and a thread that drops requests nobody
    waits for.

    A request belongs to one worker at a time. Its messages are consumed in order, each answered as
    soon as its tokens have been taken and the chunks that they made possible have been sent.
    Methods may be called from any thread and never wait for a chunk.

    A worker that does not come back from the engines is taken to hang. Its requests fail; what they
    hold stays until it does come back, because it may still write there. The others go on. When all
    hang, no more requests are admitted.

    Args:
        pipeline: runs the batches.
        limits: bounds that are checked before work starts.
        observer: is called at every admission, batch, chunk and end.
        clock: returns monotonic seconds.
        workers: batches that are computed at the same time, in a thread each; they share the
            threads of torch.
        on_device_lost: is called, from any thread, after a request failed because the process has
            lost its GPU.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        limits: LimitConfig,
        observer: Observer | None = None,
        clock: Callable[[], float] = time.monotonic,
        workers: int = 1,
        on_device_lost: Callable[[], None] = lambda: None,
    ) -> None:
        self._pipeline = pipeline
        pipeline.load.workers = workers
        self._limits = limits
        self._observer = observer or Observer()
        self._clock = clock
        self._on_device_lost = on_device_lost
        self._scheduler = Scheduler(limits, pipeline.config.token_frame_rate, clock)
        self._closed = threading.Event()
        self._wake = threading.Condition()  # guards the scheduler and all that requests hold
        self._telling = threading.Lock()
        self._torch_threads = max(1, torch.get_num_threads() // workers)
        self._workers = [_Worker(number) for number in range(workers)]
        self._threads = [
            threading.Thread(
                target=self._run,
                args=(worker,),
                name=f"token2wav-worker-{worker.number}",
                daemon=True,
            )
            for worker in self._workers
        ]
        # Not a worker's business: it may hang, or compute for long.
        self._threads.append(
            threading.Thread(target=self._watch, name="token2wav-watch", daemon=True)
        )
        for thread in self._threads:
            thread.start()

    @property
    def open_requests(self) -> int:
        return len(self._scheduler.requests)

    def open(
        self,
        voice: Voice,
        on_close: Callable[[], None] = lambda: None,
        *,
        steps: int = 0,
        client: str = "",
        audio_format: AudioFormat | None = None,
    ) -> Request:
        """Admits a request; nothing is computed yet.

        Args:
            voice, steps, audio_format: see `Pipeline.request`.
            on_close: is called once, from any thread, when the request is over for any reason.
            client: name of the client it belongs to; empty if that is not known.

        Raises:
            InputError: steps are not allowed, or the model cannot have that sample rate.
            LimitError: there are too many requests, at all or of this client.
            EngineError: all workers hang.
        """
        buffer_seconds = self._limits.player_buffer_seconds
        request = self._pipeline.request(voice, steps, self._clock, buffer_seconds, audio_format)
        request.on_close, request.client = on_close, client
        with self._wake:
            now = self._clock()
            # First: a LimitError would tell canary and health check that all is well.
            if all(worker.hangs(now) for worker in self._workers):
                seconds = now - max(worker.since for worker in self._workers)
                raise EngineError(f"engine: no batch has ended for {seconds:.0f} s; it hangs")
            self._scheduler.admit(request)
        self._changed()
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
        """Takes a message of tokens.

        Args:
            request, reply: result of `open`, and what takes its chunks.
            tokens: (n,) integers, n >= 0, or (n, codebooks).
            end: whether the utterance ends with these tokens.
            keep_open: leave `reply` unfinished until the request is over, so that it can tell of a
                cancellation.

        Raises:
            InputError: a token is not one of the model's, there are too many, or the utterance
                would end without any.
            LimitError: too many messages wait.
            StreamClosedError: the request is over, or was to end with earlier tokens; those are
                still computed and sent.
            After any of the others the request is over. In no case has `reply` been used.
        """
        request.check_open()
        try:
            array = checked_tokens(tokens, self._pipeline.config)
            with self._wake:
                finished = self._scheduler.push(request, array, reply, end=end, keep_open=keep_open)
                self._wake.notify()
        except StreamClosedError:
            raise
        except Exception as error:
            self.cancel(request, to_public_error(error))
            raise
        _finish(finished)

    def cancel(self, request: Request, reason: Token2WavError | None = None) -> None:
        """Ends a request and fails its waiting messages with `reason`; does nothing when it is
        over.
        """
        error = reason or StreamClosedError("stream: it was cancelled")
        with self._wake:
            if request.over:
                return
            replies = self._scheduler.fail(request, error)
            if request.owner in (None, threading.get_ident()):
                _attempt(self._pipeline.close, request)
        self._over(request, type(reason).__name__ if reason else "cancelled")
        for reply in replies:
            _attempt(reply.fail, error)
        if isinstance(reason, DeviceLostError):
            _attempt(self._on_device_lost)

    def close(self) -> None:
        """Takes no more requests, ends the open ones, and then the workers."""
        with self._wake:
            self._scheduler.closing = True
        for request in list(self._scheduler.requests):
            self.cancel(request, LimitError("server: it is shutting down; try another one"))
        self._closed.set()
        for thread in self._threads:
            thread.join()

    @property
    def _idle_workers(self) -> int:
        return sum(not worker.taken for worker in self._workers)

    def _run(self, worker: _Worker) -> None:
        # of this worker alone: each thread has a number of its own
        torch.set_num_threads(self._torch_threads)
        going = True
        while going:
            try:
                going = self._turn(worker)
            # a fault of ours: the requests of this worker are lost, others are not
            except Exception as error:
                self._give_up(worker, to_public_error(error))
                time.sleep(_POLL_SECONDS)
            finally:
                with self._wake:
                    seconds, lost = self._clock() - worker.since, worker.lost
                    worker.taken, worker.lost = (), False
                if lost:
                    log.warning(
                        "worker %d is back after %.0f s, and takes requests again",
                        worker.number,
                        seconds,
                    )

    def _turn(self, worker: _Worker) -> bool:
        """Opens a request or computes a batch, or waits for either; says whether there is more to
        come.
        """
        scheduler, owner = self._scheduler, threading.get_ident()
        with self._wake:
            scheduler.recheck_waiting()
            unopened = scheduler.next_to_open(owner)
            taken = [unopened] if unopened else scheduler.next_batch(owner, self._idle_workers)
            if not taken:
                if scheduler.closing and not scheduler.requests:
                    return False
                self._wake.wait(_POLL_SECONDS)
                return True
            worker.taken, worker.since = taken, self._clock()
            tokens = [
                len(each.voice.prompt_tokens) if unopened else each.chunker.next_tokens
                for each in taken
            ]
            worker.hang_seconds = hang_seconds(sum(tokens))
            if not unopened:
                self._wake.notify()  # another worker may take what this one has left
        if unopened:
            self._serve(unopened, self._open)
        else:
            self._compute(taken)
        return True

    def _give_up(self, worker: _Worker, error: Token2WavError) -> None:
        """Ends the requests that still belong to a worker, and frees what they and cancelled ones
        among them hold.
        """
        for request in worker.taken:
            if request.owner == threading.get_ident():
                self.cancel(request, error)
                with self._wake:
                    # one that was cancelled meanwhile left it to this worker
                    _attempt(self._pipeline.close, request)
                    self._scheduler.release(request)
        self._changed()

    def _watch(self) -> None:
        while not self._closed.wait(_POLL_SECONDS):
            _attempt(self._drop_abandoned)
            _attempt(self._fail_hung)

    def _drop_abandoned(self) -> None:
        """Ends requests whose clients have vanished, and those that were idle or open for too long."""
        with self._wake:
            overdue: list[tuple[Request, Token2WavError | None]] = [*self._scheduler.overdue()]
            waiting = [
                (
                    request,
                    [message.reply for message in list(request.messages)[:1]] + request.kept_open,
                )
                for request in self._scheduler.requests
            ]
        vanished = [
            (request, None) for request, replies in waiting if any(map(_is_cancelled, replies))
        ]
        for request, error in vanished + overdue:
            self.cancel(request, error)

    def _fail_hung(self) -> None:
        """Fails the requests of workers that hang, and says so once."""
        with self._wake:
            now = self._clock()
            hung = [worker for worker in self._workers if worker.hangs(now) and not worker.lost]
            held = [(worker, list(worker.taken), now - worker.since) for worker in hung]
            for worker in hung:
                worker.lost = True
            working = sum(not worker.hangs(now) for worker in self._workers)
        for worker, requests, seconds in held:
            log.error(
                "worker %d hangs: its batch has not ended for %.0f s, and its %d streams have "
                "failed; %d of %d workers "
                "go on",
                *(worker.number, seconds, len(requests), working, len(self._workers)),
            )
            error = EngineError(f"engine: a batch has not ended for {seconds:.0f} s; it hangs")
            for request in requests:
                self.cancel(request, error)

    def _open(self, request: Request) -> None:
        try:
            self._pipeline.open(request)
        except LimitError as error:
            _attempt(self._observer.refused, error)
            raise
        self._changed()

    def _compute(self, batch: list[Request]) -> None:
        """Runs the next chunk of every request and sends what comes out."""
        start, tokens = self._clock(), sum(request.chunker.next_tokens for request in batch)
        waited = [start - request.ready_since for request in batch]
        results: Sequence[AudioChunk | Token2WavError | None]
        try:
            results = self._pipeline.advance(
                batch, partial(_attempt, self._observer.computed, waited)
            )
        except Exception as error:  # of the engines as a whole: nobody can go on
            results = [to_public_error(error)] * len(batch)
        took = self._clock() - start
        for request, result in zip(batch, results, strict=True):
            request.compute_seconds += took
            self._serve(request, partial(self._send, result=result))
        with self._wake:
            self._scheduler.computed(tokens, took)

    def _send(self, request: Request, result: AudioChunk | Token2WavError | None) -> None:
        if isinstance(result, Token2WavError):
            raise result
        if result is not None:
            with self._wake:
                if request.over:
                    return
                reply = request.messages[0].reply if request.messages else request.kept_open[0]
                late = request.playback.sent(result.duration_s, result.sound_s, result.trimmed_s)
            reply.send(result)
            _attempt(self._observer.sent, request, result.duration_s, late)
        with self._wake:
            if not request.over:
                self._scheduler.sent(request, heard=result is not None)

    def _serve(self, request: Request, work: Callable[[Request], None]) -> None:
        """Does something for a request of this worker, which ends that one alone if it fails, and
        releases it then.
        """
        try:
            work(request)
            self._release(request)
        except Exception as error:
            self.cancel(request, to_public_error(error))
            self._release(request)

    def _release(self, request: Request) -> None:
        """Releases a request of this worker, when all replies are finished that can be; one that is
        over is freed.
        """
        finished: list[Reply] | None = None
        while finished is None or finished:
            with self._wake:
                cancelled, held = request.over, request.handles is not None
                finished = self._scheduler.finish_consumed_messages(request)
                over = request.over
                if over:
                    _attempt(self._pipeline.close, request)
                if over or not finished:
                    self._scheduler.release(request)
            if over and not cancelled:
                self._over(request, "finished")
            elif over and held:  # it was cancelled meanwhile, and is freed only now
                self._changed()
            _finish(finished)
            if over:
                return

    def _over(self, request: Request, reason: str) -> None:
        _attempt(request.on_close)
        _attempt(self._observer.ended, request, reason)
        self._changed()  # last, so that who sees nothing open has been told of every end

    def _changed(self) -> None:
        with self._telling:  # else an older number could be told after a newer one, and stay
            _attempt(self._observer.changed, self.open_requests)


def to_public_error(error: Exception) -> Token2WavError:
    """Returns an error as clients are told it; one that is not ours is logged."""
    if isinstance(error, Token2WavError):
        return error
    log.error("the engine failed", exc_info=error)
    return EngineError(f"engine: {type(error).__name__}: {error}")


def _is_cancelled(reply: Reply) -> bool:
    try:
        return reply.is_cancelled()
    except Exception:
        log.warning(
            "a request could not say whether it was cancelled, so it is taken to be", exc_info=True
        )
        return True


def _finish(replies: list[Reply]) -> None:
    for reply in replies:
        _attempt(reply.finish)


def _attempt(call: Callable[..., None], *given: Any) -> None:
    """Calls what may fail, as an observer or the reply to a client that is gone: nobody else may
    suffer from it.
    """
    try:
        call(*given)
    except Exception:
        log.warning(
            "%s failed, and is passed over", getattr(call, "__qualname__", call), exc_info=True
        )

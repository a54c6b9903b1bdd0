"""Workers of a server: threads that compute the scheduler's batches and send audio to clients."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch

from token2wav.config import LimitConfig
from token2wav.config.model_config import StageName
from token2wav.errors import BackendError, LimitError, Token2WavError, to_public_error
from token2wav.serving.audio_output import AudioChunk
from token2wav.serving.delivery import attempt, deliver
from token2wav.serving.pipeline import Pipeline, Result
from token2wav.serving.request import Request
from token2wav.serving.request_pool import Observer, RequestPool

log = logging.getLogger(__name__)

# Interval at which idle workers look for work, and the watch thread for requests to end.
_POLL_SECONDS = 0.05
_MOST_WORKERS = 4
LONGEST_CHUNK_TOKENS = 100
_HANG_SECONDS = 180.0  # a batch of eight chunks of 100 tokens takes 130 s on a slow CPU
_HANG_TOKENS = 8 * LONGEST_CHUNK_TOKENS  # in that batch


class _Computed(NamedTuple):
    """Batch that was computed.

    Attributes:
        waited: for each chunk, the seconds between its readiness and the start of the batch.
        stages: compute time of each stage; empty if the backend failed.
    """

    results: Sequence[Result]
    waited: list[float]
    stages: Mapping[StageName, float]


def default_workers(device: str) -> int:
    """Returns the default number of workers: one for each usable CPU core, at most 4; one on a GPU.

    A GPU computes batches one after another.
    """
    return min(_MOST_WORKERS, len(os.sched_getaffinity(0))) if device == "cpu" else 1


def hang_seconds(tokens: int) -> float:
    """Returns the time after which a batch counts as hung. Above `_HANG_TOKENS` the time grows in
    proportion to the tokens.
    """
    return _HANG_SECONDS * max(1.0, tokens / _HANG_TOKENS)


@dataclass(eq=False)
class _Worker:
    """Worker of a pool, which runs in its own thread.

    Attributes:
        requests: requests that the worker opens, computes or sends now; empty while it is idle.
        since: time at which the worker took them.
        hang_seconds: seconds after `since` from which on the worker counts as hung.
        lost: whether the worker was found to be hung, so that its requests were failed.
    """

    number: int
    requests: Sequence[Request] = ()
    since: float = 0.0
    hang_seconds: float = 0.0
    lost: bool = False

    def hangs(self, now: float) -> bool:
        return bool(self.requests) and now - self.since > self.hang_seconds


class WorkerPool:
    """Pool of workers, which compute requests until `close` is called.

    One more thread, the watch thread, ends requests that are idle or open for too long, and
    requests of clients that have disconnected.

    If the batch of a worker does not end in time, the worker counts as hung, and its requests fail.
    The memory of these requests is not freed until the worker returns from the backend, because the
    backend may still write to it. The other workers continue. If every worker is hung, the pool
    admits no request.

    A GPU has one worker more than batches that are computed at the same time. While one worker
    sends the audio of its batch, the other computes the next batch, so that the GPU does not wait.

    Args:
        workers: batches that are computed at the same time. Their workers share the threads of
            torch.
        on_device_lost: called from any thread after a request has failed because the process lost
            its GPU.
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
        self.requests = RequestPool(
            pipeline, limits, observer, clock, on_device_lost, self._check_working
        )
        self._pipeline, self._clock = pipeline, clock
        pipeline.load.workers = workers
        pipeline.limit_chunks(workers * limits.batch_streams)
        self._closed = threading.Event()
        self._torch_threads = max(1, torch.get_num_threads() // workers)
        self._computing = threading.Semaphore(workers)
        self._senders = 0 if pipeline.on_cpu else 1  # workers that are not needed to compute
        self._workers = [_Worker(number) for number in range(workers + self._senders)]
        self._threads = [
            threading.Thread(
                target=self._run,
                args=(worker,),
                name=f"token2wav-worker-{worker.number}",
                daemon=True,
            )
            for worker in self._workers
        ]
        # The watch has its own thread, because every worker may be hung or compute for a long time.
        self._threads.append(
            threading.Thread(target=self._watch, name="token2wav-watch", daemon=True)
        )
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Ends all requests, and waits for all threads to end."""
        with self.requests.lock:
            self.requests.scheduler.closing = True
        for request in list(self.requests.scheduler.requests):
            self.requests.cancel(
                request, LimitError("server: it is shutting down; try another one")
            )
        self._closed.set()
        for thread in self._threads:
            thread.join()
        self.requests.report_changes()

    @property
    def _idle_workers(self) -> int:
        return sum(not worker.requests for worker in self._workers)

    def _check_working(self) -> None:
        now = self._clock()
        hung = [worker for worker in self._workers if worker.hangs(now)]
        if len(hung) + self._senders >= len(self._workers):
            seconds = now - max(worker.since for worker in hung)
            raise BackendError(
                f"backend: no batch has finished for {seconds:.0f} s; the server hangs"
            )

    def _run(self, worker: _Worker) -> None:
        # The number applies to this worker only, because torch stores it for each thread.
        torch.set_num_threads(self._torch_threads)
        going = True
        while going:
            try:
                going = self._turn(worker)
            # A defect of this program. The worker continues, and only its requests are lost.
            except Exception as error:
                self._give_up(worker, to_public_error(error))
                time.sleep(_POLL_SECONDS)
            finally:
                with self.requests.lock:
                    seconds, lost = self._clock() - worker.since, worker.lost
                    worker.requests, worker.lost = (), False
                if lost:
                    log.warning(
                        "worker %d has finished its batch after %.0f s and accepts requests again",
                        worker.number,
                        seconds,
                    )

    def _turn(self, worker: _Worker) -> bool:
        """Returns False when the pool is closing and no request is open."""
        scheduler, owner = self.requests.scheduler, threading.get_ident()
        # The batch is chosen when it can be computed, so that it has all chunks that are ready.
        with self._computing:
            with self.requests.lock:
                scheduler.recheck_waiting()
                unopened = scheduler.next_to_open(owner)
                sharing = max(1, self._idle_workers - self._senders)
                batch = [unopened] if unopened else scheduler.next_batch(owner, sharing)
                if not batch:
                    if scheduler.closing and not scheduler.requests:
                        return False
                    self.requests.lock.wait(_POLL_SECONDS)
                    return True
                worker.requests, worker.since = batch, self._clock()
                tokens = [
                    len(request.voice.prompt_tokens) if unopened else request.next_tokens
                    for request in batch
                ]
                worker.hang_seconds = hang_seconds(sum(tokens))
                if not unopened:
                    self.requests.lock.notify()  # another worker may compute the remaining chunks
            if unopened:
                self.requests.serve(unopened, self._open)
                return True
            computed = self._compute(batch)
        self._deliver(batch, computed)
        return True

    def _give_up(self, worker: _Worker, error: Token2WavError) -> None:
        for request in worker.requests:
            if request.owner == threading.get_ident():
                self.requests.cancel(request, error)
                with self.requests.lock:
                    # If another thread has cancelled the request, its memory is not freed yet.
                    attempt(self._pipeline.close, request)
                    self.requests.scheduler.release(request)
        self.requests.changed()

    def _watch(self) -> None:
        while not self._closed.wait(_POLL_SECONDS):
            attempt(self.requests.drop_abandoned)
            attempt(self._fail_hung)
            self.requests.report_changes()

    def _fail_hung(self) -> None:
        with self.requests.lock:
            now = self._clock()
            hung = [worker for worker in self._workers if worker.hangs(now) and not worker.lost]
            hung_batches = [(worker, list(worker.requests), now - worker.since) for worker in hung]
            for worker in hung:
                worker.lost = True
            working = sum(not worker.hangs(now) for worker in self._workers)
        for worker, requests, seconds in hung_batches:
            log.error(
                "worker %d hangs: its batch has run for %.0f s, and its %d streams have "
                "failed; %d of %d workers still run",
                *(worker.number, seconds, len(requests), working, len(self._workers)),
            )
            error = BackendError(
                f"backend: the worker of this stream hangs; its batch has run for {seconds:.0f} s"
            )
            for request in requests:
                self.requests.cancel(request, error)

    def _open(self, request: Request) -> None:
        start = self._clock()
        try:
            self._pipeline.open(request)
        except LimitError as error:
            attempt(self.requests.observer.refused, error)
            raise
        finally:
            with self.requests.lock:
                self.requests.scheduler.record_opening(self._clock() - start)
        self.requests.changed()

    def _compute(self, batch: list[Request]) -> _Computed:
        start = self._clock()
        # Provisional chunks may have fewer ODE steps, so their time predicts no other chunks.
        tokens = sum(request.next_tokens for request in batch if not request.next_provisional)
        waited = [start - request.ready_since for request in batch]
        results: Sequence[Result]
        stages: dict[StageName, float] = {}
        try:
            results = self._pipeline.advance(batch, stages.update)
        except Exception as error:  # the backend failed, so no request of the batch can continue
            results = [to_public_error(error)] * len(batch)
        seconds = self._clock() - start
        for request in batch:
            request.compute_seconds += seconds
        with self.requests.lock:
            self.requests.scheduler.record_batch(tokens, seconds)
        return _Computed(results, waited, stages)

    def _deliver(self, batch: list[Request], computed: _Computed) -> None:
        if computed.stages:
            attempt(self.requests.observer.on_batch, computed.waited, computed.stages)
        for request, result in zip(batch, computed.results, strict=True):
            send = partial(self._send, request=request)
            self.requests.serve(
                request, partial(deliver, result=result, send=send, lock=self.requests.lock)
            )
        with self.requests.lock:
            self.requests.lock.notify()  # another worker may compute the next chunks

    def _send(self, chunk: AudioChunk, late: float, request: Request) -> None:
        with self.requests.lock:
            reply = request.next_reply()
        if request.last_error is not None:  # it follows
            chunk = replace(chunk, final=False)
        reply.send(chunk)
        attempt(self.requests.observer.sent, request, chunk.duration_s, late)

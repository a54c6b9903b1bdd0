"""Workers of a server: threads that compute the scheduler's batches and send audio to clients."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from token2wav.config import LimitConfig
from token2wav.config.model_config import StageName
from token2wav.errors import attempt, to_public_error
from token2wav.execution.device import cpu_threads, usable_cores
from token2wav.serving.observer import Observer
from token2wav.serving.pipeline import Interruptions, Pipeline, Result
from token2wav.serving.policy import chunks_at_once
from token2wav.serving.turn import Computed, Turn
from token2wav.serving.utterance_pool import UtterancePool

_WATCH_SECONDS = 0.05  # interval at which the watch thread looks for utterances to end
_MOST_WORKERS = 4


def default_workers(device: str) -> int:
    """Returns the default number of workers: one for each usable CPU core, at most 4; one on a GPU,
    which computes batches one after another.
    """
    return min(_MOST_WORKERS, usable_cores()) if device == "cpu" else 1


class WorkerPool:
    """Pool of workers, which compute utterances until `close` is called.

    One more thread, the watch thread, ends utterances that are idle or open for too long, and
    utterances of clients that have disconnected.

    If the batch of a worker does not end in time, the worker counts as hung, and its utterances
    fail (`UtterancePool.fail_hung`). The other workers continue. If every worker is hung, the pool
    admits no utterance.

    A GPU has one more worker than `workers`. While one worker sends the audio of its batch, another
    computes the next batch, so that the GPU does not wait.

    Args:
        workers: batches that are computed at the same time. Their workers share the threads of
            torch.
        on_device_lost: called from any thread after an utterance has failed because the process
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
        senders = 0 if pipeline.on_cpu else 1  # workers that are not needed to compute
        self.utterances = UtterancePool(
            pipeline, limits, observer, clock, on_device_lost, workers, senders
        )
        self._pipeline, self._clock = pipeline, clock
        pipeline.load.workers = workers
        pipeline.limit_chunks(chunks_at_once(pipeline.config, limits.batch_streams, workers))
        self._closed = threading.Event()
        self._torch_threads = max(1, cpu_threads() // workers)
        self._threads = [
            threading.Thread(
                target=self._run, args=(worker,), name=f"token2wav-worker-{worker}", daemon=True
            )
            for worker in range(workers + senders)
        ]
        # The watch has its own thread, because every worker may be hung or compute for a long time.
        self._threads.append(
            threading.Thread(target=self._watch, name="token2wav-watch", daemon=True)
        )
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Ends all utterances, and waits for all threads to end."""
        self.utterances.close()
        self._closed.set()
        for thread in self._threads:
            thread.join()
        self.utterances.report_changes()

    def _run(self, worker: int) -> None:
        # The number applies to this worker only, because torch stores it for each thread.
        torch.set_num_threads(self._torch_threads)
        going = True
        while going:
            try:
                turn = self.utterances.next_turn(worker)
                going = turn is not None
                if turn:
                    self._take(turn)
            except Exception as error:  # a defect of this program
                to_public_error(error)  # it is logged
                time.sleep(_WATCH_SECONDS)

    def _take(self, turn: Turn) -> None:
        """Computes a turn, and sends its results."""
        try:
            self.utterances.finish_turn(turn, self._computed(turn))
        # A defect of this program. The worker continues, and only its utterances are lost.
        except Exception as error:
            self.utterances.give_up(turn, to_public_error(error))
            if not turn.interrupts:  # the interrupted batch must not wait
                time.sleep(_WATCH_SECONDS)

    def _computed(self, turn: Turn) -> Computed:
        start, stages = self._clock(), dict[StageName, float]()
        interruptions = Interruptions(partial(self._interrupt, turn))
        results: Sequence[Result]
        try:
            if turn.opens:
                [utterance] = turn.utterances
                self._pipeline.open(utterance)
                results = [None]
            else:
                handler = interruptions if turn.interruptible else None
                results = self._pipeline.advance(turn.utterances, stages.update, handler)
        except Exception as error:  # the backend failed, so no utterance of the turn can continue
            results = [to_public_error(error)] * len(turn.utterances)
        return Computed(results, self._clock() - start - interruptions.seconds, stages)

    def _interrupt(self, turn: Turn, spent: float) -> float | None:
        """Takes one turn, if there is one, between two ODE steps of another turn.

        Returns:
            Seconds of the interruption, up to the end of its work on the device; None if there was
            none, or after a defect of this program, which must not end the interrupted batch.
        """
        try:
            interrupting = self.utterances.next_interruption(turn, spent)
            if interrupting is None:
                return None
            attempt(self._pipeline.wait)  # the step that the device computes is of the batch
            start = self._clock()
            self._take(interrupting)
            attempt(self._pipeline.wait)
            return self._clock() - start
        except Exception as error:
            to_public_error(error)  # it is logged
            return None

    def _watch(self) -> None:
        while not self._closed.wait(_WATCH_SECONDS):
            attempt(self.utterances.drop_abandoned)
            attempt(self.utterances.fail_hung)
            self.utterances.report_changes()

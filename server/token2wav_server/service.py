"""Service of the Triton model `token2wav`, which passes the tokens of Triton requests to workers.

The whole model runs in the process of the service; the ensemble uses three processes. For each
Triton request, the service finds the utterance to which it belongs, or opens a new one.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any

import triton_python_backend_utils as pb_utils

from token2wav.cache.block_pool import PageNeeds
from token2wav.config import LimitConfig, ServerConfig
from token2wav.errors import InputError, LimitError, to_public_error
from token2wav.model import Token2Wav
from token2wav.serving.delivery import attempt
from token2wav.serving.request import Request
from token2wav.serving.worker import WorkerPool, default_workers
from token2wav.stages.cached_flow import page_needs
from token2wav.voice import Voice
from token2wav_server.metrics import ServerMetrics
from token2wav_server.model_process import (
    SUMMARY,
    check_not_draining,
    end_process,
    is_canary,
    read_environment,
)
from token2wav_server.sequences import Sequences
from token2wav_server.triton_reply import TritonReply
from token2wav_server.triton_request import Options, TritonRequest
from token2wav_server.voices import registry

log = logging.getLogger(__name__)

# Longest time at start-up in which prompts of voices are computed in advance. The remaining prompts
# are computed for the first utterance of each voice.
_PREFILL_SECONDS = 20.0
_FINISHERS = 4  # threads that send final responses
_MOST_UNREAD = 256  # Triton requests that wait to be read; Triton keeps further ones in its queue
_USUAL_SECONDS = 30.0  # assumed duration of an utterance, for the warning about a small cache


class Service:
    """Service behind the Triton model `token2wav`.

    The service identifies an utterance by its `Request` object, never by the sequence id alone. The
    id is only a name by which the Triton requests of one client find the utterance. When the
    utterance is over, another utterance can use the same id.
    """

    def __init__(self, model: Token2Wav, config: ServerConfig) -> None:
        self._model = model
        self._voices = registry(config, model.config)
        _prefill(model, [self._voices.named(Path(file).stem) for file in config.voices])
        self._sequences: Sequences[Request] = Sequences(config.limits.idle_seconds)
        self._metrics = ServerMetrics(model)
        workers = config.runtime.workers or default_workers(model.backend.device)
        _warn_of_small_cache(model, config, workers)
        _warn_of_small_backend(model, config.limits)
        self._workers = WorkerPool(
            model.pipeline,
            config.limits,
            self._metrics,
            workers=workers,
            on_device_lost=end_process,
        )
        self._requests = self._workers.requests
        self._finishers = ThreadPoolExecutor(_FINISHERS, "finish")
        self._unread: Queue[Any] = Queue(_MOST_UNREAD)  # Triton requests, then None
        self._reader = threading.Thread(target=self._read, name="token2wav-reader", daemon=True)
        self._reader.start()

    @classmethod
    def start(cls) -> Service:
        """Starts a service with the model folder and the settings that environment variables name.

        Raises:
            Token2WavError: the folder or the settings cannot be used.
        """
        log_to_triton()
        folder, config = read_environment()
        log.info("%sloading %s", SUMMARY, folder)
        model = Token2Wav.load(
            folder, stream=config.stream, runtime=config.runtime, streams=config.limits.streams
        )
        log.info("%swarming up", SUMMARY)
        model.probe()
        service = cls(model, config)
        for line in (*str(model).splitlines(), _limits(config.limits)):
            log.info("%s%s", SUMMARY, line)
        return service

    def handle(self, request: Any) -> None:
        """Queues one Triton request, which another thread reads.

        Triton passes the next request only after this method has returned. So a server takes in
        more requests a second if this method does nothing else.
        """
        self._unread.put(request)

    def _read(self) -> None:
        while (request := self._unread.get()) is not None:
            attempt(self._push, request)
            # Else the request would keep its shared memory until the next one arrives.
            del request

    def _push(self, request: Any) -> None:
        """Queues the tokens of one Triton request, and returns before they are computed.

        All responses, errors included, are sent through the response sender of the request.
        """
        reply = TritonReply(request, self._finishers)
        try:
            self._handle(TritonRequest.read(request), reply)
        except Exception as error:  # any exception, because further requests have to be handled
            # The public error is assigned to `error`, which Python deletes at the end of this
            # clause. Another variable would not be deleted. The error, its traceback and this frame
            # would then form a reference cycle, which would keep the request and its shared memory
            # alive until Python collects cycles.
            error = to_public_error(error)
            self._metrics.refused(error)
            reply.fail(error)

    def close(self) -> None:
        """Ends all utterances. All their responses are sent when this method returns."""
        self._unread.put(None)
        self._reader.join()
        self._workers.close()
        self._finishers.shutdown()

    def _handle(self, message: TritonRequest, reply: TritonReply) -> None:
        if message.start:
            check_not_draining()
            options = message.options()
            utterance, keep_open = self._open(message, options), options.keep_open
        else:
            utterance, keep_open = self._continued(message), False
        self._requests.push(utterance, message.tokens, reply, end=message.end, keep_open=keep_open)
        if message.end:
            self._sequences.remove(message.sequence_id, utterance, utterance.why_closed)

    def _open(self, message: TritonRequest, options: Options) -> Request:
        sequence_id, owner = message.sequence_id, message.owner
        if (open_utterance := self._sequences.started_by(sequence_id, owner)) is not None:
            error = self._sequences.start_twice(sequence_id, owner)
            self._requests.cancel(open_utterance, error)
            raise error
        voice = message.voice(options.voice, self._voices, self._model.config)
        utterance = self._requests.open(
            voice,
            lambda request: self._sequences.remove(sequence_id, request, request.why_closed),
            client=owner.client,
            canary=is_canary(owner.client),
            options=options.utterance,
        )
        self._sequences.add(sequence_id, owner, utterance)
        # The utterance may have been closed, for example as idle, before it was added.
        if utterance.over:
            self._sequences.remove(sequence_id, utterance, utterance.why_closed)
        # The voice is registered only after the client was admitted, because a new voice may evict
        # the voice of another client.
        self._voices.register(voice)
        return utterance

    def _continued(self, message: TritonRequest) -> Request:
        utterance = self._sequences.find(message.sequence_id, message.owner)
        utterance.check_open()
        try:
            message.options()
        except InputError as error:
            self._requests.cancel(utterance, error)
            raise
        return utterance


def _limits(limits: LimitConfig) -> str:
    """Returns a line about the limits of clients, for the summary that is logged at start-up."""
    return (
        f"limits   {limits.streams} streams, {limits.client_streams} of one client, "
        f"{limits.stream_tokens} tokens in "
        f"each, {limits.sent_voices} voices from clients"
    )


def _prefill(model: Token2Wav, voices: Iterable[Voice]) -> None:
    """Computes the prompts of voices in advance, so that the first listeners need not wait.

    The function stops after 20 s, or when the cache is full.
    """
    deadline = time.monotonic() + _PREFILL_SECONDS
    for voice in voices:
        try:
            model.stream(voice).cancel()
        except LimitError:
            return
        if time.monotonic() > deadline:
            return


def _warn_of_small_cache(model: Token2Wav, config: ServerConfig, workers: int) -> None:
    """Logs a warning if the cache has too few pages for the streams that the limits admit."""
    sizes, capacity = model.config, model.pipeline.usage().capacity
    # One more page is for the last block of the prompt, which is incomplete.
    needs = PageNeeds(math.ceil(_USUAL_SECONDS / sizes.block_seconds) + 1)
    if (window := sizes.window(config.stream)) >= 0:
        needs = page_needs(sizes, window, sizes.hops(config.stream)[1])
    streams = needs.streams(capacity, workers * config.limits.batch_streams)
    if capacity and streams is not None and streams < config.limits.streams:
        log.warning(
            "the cache has pages for %d streams of %g s, and limits.streams admits %d: if more "
            "streams are open than the cache has pages for, the server refuses new streams, or "
            "recomputes open streams without the cache, which slows all streams; change "
            "limits.streams, stream.left_blocks or runtime.cache_storage",
            *(streams, _USUAL_SECONDS, config.limits.streams),
        )


def _warn_of_small_backend(model: Token2Wav, limits: LimitConfig) -> None:
    """Logs a warning if the backend computes fewer chunks together than the limits admit."""
    most_streams = model.backend.most_streams
    if most_streams and most_streams < limits.batch_streams:
        log.warning(
            "limits.batch_streams is %d, but the %s backend computes at most %d chunks together, "
            "so larger batches run in parts, one after another; for more than %d streams set "
            "runtime.backend: torch",
            *(limits.batch_streams, model.backend.name, most_streams, most_streams),
        )


class TritonHandler(logging.Handler):
    """Log handler that writes records to the log of the Triton server."""

    def emit(self, record: logging.LogRecord) -> None:
        level = (
            "error"
            if record.levelno >= logging.ERROR
            else "warn"
            if record.levelno >= logging.WARNING
            else "info"
        )
        try:
            getattr(pb_utils.Logger, f"log_{level}")(" ".join(self.format(record).splitlines()))
        except Exception:
            self.handleError(record)


def log_to_triton() -> None:
    """Writes the log records of this project, from level INFO on, to Triton's log."""
    for name in ("token2wav", "token2wav_server"):
        logger = logging.getLogger(name)
        logger.addHandler(TritonHandler())
        logger.setLevel(logging.INFO)
        logger.propagate = False

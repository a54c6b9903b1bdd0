"""Service of the Triton model `token2wav`: reads Triton requests, and replies to them.

The whole model runs in the process of the service; the ensemble uses three processes.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import Queue
from typing import Any

import triton_python_backend_utils as pb_utils

from token2wav.config import ServerConfig
from token2wav.model import Token2Wav
from token2wav.serving.delivery import attempt
from token2wav.serving.door.service import Service, limits_line
from token2wav_server.metrics import ServerMetrics
from token2wav_server.model_process import (
    SUMMARY,
    check_not_draining,
    end_process,
    is_canary,
    read_environment,
)
from token2wav_server.triton_reply import TritonReply
from token2wav_server.triton_request import read_message

log = logging.getLogger(__name__)

_FINISHERS = 4  # threads that send final responses
_MOST_UNREAD = 256  # Triton requests that wait to be read; Triton keeps further ones in its queue


class TritonService:
    """Service behind the Triton model `token2wav`."""

    def __init__(self, model: Token2Wav, config: ServerConfig) -> None:
        self._service = Service(
            model.pipeline,
            model.backend,
            config,
            ServerMetrics(model),
            check_admission=check_not_draining,
            is_canary=is_canary,
            on_device_lost=end_process,
        )
        self._finishers = ThreadPoolExecutor(_FINISHERS, "finish")
        self._unread: Queue[Any] = Queue(_MOST_UNREAD)  # Triton requests, then None
        self._reader = threading.Thread(target=self._read, name="token2wav-reader", daemon=True)
        self._reader.start()

    @classmethod
    def start(cls) -> TritonService:
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
        for line in (*str(model).splitlines(), limits_line(config.limits)):
            log.info("%s%s", SUMMARY, line)
        return service

    def handle(self, request: Any) -> None:
        """Queues one Triton request, which another thread reads.

        Triton passes the next request only after this method has returned. So a server takes in
        more requests a second if this method does nothing else.
        """
        self._unread.put(request)

    def close(self) -> None:
        """Ends all utterances. All their responses are sent when this method returns."""
        self._unread.put(None)
        self._reader.join()
        self._service.close()
        self._finishers.shutdown()

    def _read(self) -> None:
        while (request := self._unread.get()) is not None:
            attempt(self._take, request)
            # Else the request would keep its shared memory until the next one arrives.
            del request

    def _take(self, request: Any) -> None:
        """Passes on one request. All responses are sent through its response sender."""
        self._service.take(partial(read_message, request), TritonReply(request, self._finishers))


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

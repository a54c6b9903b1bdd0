"""Program `python -m token2wav_server.engine`: runs the model, to which Triton's front connects.

The environment names the model folder (TOKEN2WAV_MODEL), the settings (TOKEN2WAV_CONFIG, optional)
and the Unix socket (TOKEN2WAV_ENGINE). `token2wav serve` starts this program; start it yourself
only beside a tritonserver of your own.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

from prometheus_client import start_http_server

from token2wav.errors import ConfigError, Token2WavError
from token2wav.model import Token2Wav
from token2wav.serving.door.service import Service, limits_line
from token2wav_server.engine.engine import Engine
from token2wav_server.launcher.ports import PORT
from token2wav_server.metrics import ServerMetrics
from token2wav_server.model_process import (
    ENGINE_VARIABLE,
    SUMMARY,
    check_not_draining,
    end_process,
    is_canary,
    read_environment,
)

log = logging.getLogger("token2wav_server.engine")

FAILED = 3
_PARENT_POLL_S = 1.0
# Format of Triton's log, by which the launcher chooses the lines that it shows.
_LOG_FORMAT = (
    '%(levelname).1s%(asctime)s.%(msecs)03d000 %(process)d %(filename)s:%(lineno)d] "%(message)s"'
)


def main() -> NoReturn:
    """Runs the engine until its process is ended, or exits if it cannot start."""
    parser = argparse.ArgumentParser(
        prog="python -m token2wav_server.engine", description=(__doc__ or "").partition("\n\n")[2]
    )
    parser.add_argument(
        "--metrics-port",
        type=PORT,
        metavar="PORT",
        help="serve metrics on this port of the loopback interface (default: no metrics, since "
        "`token2wav serve` has a port for them)",
    )
    parser.add_argument(
        "--parent",
        type=int,
        metavar="PID",
        help="end when this process, the parent, has ended (default: never)",
    )
    options = parser.parse_args()
    _write_log()
    if options.parent is not None:
        _end_with(options.parent)
    try:
        engine, metrics = _loaded()
    except Token2WavError as error:
        log.error("%s", error)
        sys.exit(FAILED)
    if options.metrics_port is not None:
        start_http_server(options.metrics_port, "127.0.0.1", metrics.registry)
    engine.serve()


def _loaded() -> tuple[Engine, ServerMetrics]:
    """Loads the model, and returns its engine and its metrics."""
    folder, config = read_environment()
    path = os.environ.get(ENGINE_VARIABLE)
    if not path:
        raise ConfigError(f"{ENGINE_VARIABLE}: not set; set it to the path of the engine's socket")
    log.info("%sloading %s", SUMMARY, folder)
    model = Token2Wav.load(
        folder, stream=config.stream, runtime=config.runtime, streams=config.limits.streams
    )
    log.info("%swarming up", SUMMARY)
    model.probe()
    metrics = ServerMetrics(model.pipeline)
    service = Service(
        model.pipeline,
        model.summary,
        config,
        metrics,
        check_admission=check_not_draining,
        is_canary=is_canary,
        on_device_lost=end_process,
    )
    for line in (*str(model).splitlines(), limits_line(config.limits)):
        log.info("%s%s", SUMMARY, line)
    return Engine(service, Path(path)), metrics


def _write_log() -> None:
    """Writes the log records of this project, from level INFO on, to stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(_LineFormatter(_LOG_FORMAT, "%m%d %H:%M:%S"))
    for name in ("token2wav", "token2wav_server"):
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False


class _LineFormatter(logging.Formatter):
    """Formatter that writes a record on one line, also if its message or its error has several."""

    def format(self, record: logging.LogRecord) -> str:
        return "\\n".join(super().format(record).splitlines())


def _end_with(parent: int) -> None:
    """Ends this process soon after another one, its parent, has ended."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_POLL_S)
        os._exit(FAILED)

    threading.Thread(target=watch, name="parent", daemon=True).start()


if __name__ == "__main__":
    main()

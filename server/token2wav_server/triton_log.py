"""Python's log records in Triton's log, with its time stamps."""

from __future__ import annotations

import logging

import triton_python_backend_utils as pb_utils


class TritonHandler(logging.Handler):
    """Passes records on to the server that this process belongs to."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            message = " ".join(self.format(record).splitlines())
            if record.levelno >= logging.ERROR:
                pb_utils.Logger.log_error(message)
            elif record.levelno >= logging.WARNING:
                pb_utils.Logger.log_warn(message)
            else:
                pb_utils.Logger.log_info(message)
        except Exception:
            self.handleError(record)


def log_to_triton() -> None:
    """Sends what this project logs, from INFO on, to Triton's log. More than one call does nothing."""
    for name in ("token2wav", "token2wav_server"):
        logger = logging.getLogger(name)
        if not any(isinstance(handler, TritonHandler) for handler in logger.handlers):
            logger.addHandler(TritonHandler())
            logger.setLevel(logging.INFO)
            logger.propagate = False

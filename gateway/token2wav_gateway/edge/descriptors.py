"""File descriptors, each of which is a connection or a file: how many the gateway may open."""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
from contextlib import suppress
from typing import Any

from token2wav_gateway.settings import LimitSettings, SettingsError

log = logging.getLogger(__name__)

_FILES = 64  # files, listeners, voices that are read, and connections of checks
_OF_A_TEXT = 2  # connections to the servers behind the gateway
# Connections beyond those that texts and WebSockets may take, for health checks, short requests,
# and requests that arrive slowly.
_LEAST_EXTRA, _MOST_EXTRA = 16, 256


def most_connections(limits: LimitSettings, others: int = 0) -> int:
    """Raises the limit of descriptors as far as the system allows, and divides them.

    Args:
        others: largest number of descriptors of another server in this process.

    Returns:
        Largest number of client connections.

    Raises:
        SettingsError: there are fewer descriptors than the settings need.
    """
    descriptors, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        descriptors = hard
    text_connections = limits.streams + limits.sockets
    reserved = _OF_A_TEXT * limits.streams + _FILES + others
    if descriptors == resource.RLIM_INFINITY:
        return text_connections + _MOST_EXTRA
    extra = descriptors - reserved - text_connections
    if extra < _LEAST_EXTRA:
        raise SettingsError(
            f"limits: {limits.streams} streams and {limits.sockets} sockets need "
            f"{text_connections + reserved + _LEAST_EXTRA} file descriptors, but the gateway may "
            f"open {descriptors} (ulimit -n)"
        )
    return text_connections + min(extra, _MOST_EXTRA)


def report_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Handles errors of an event loop. Without a free descriptor, asyncio fails hundreds of times
    a second to accept a connection, each time with a traceback.
    """
    error = context.get("exception")
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        log.error("new connections wait, because no file descriptor is left")
    else:
        loop.default_exception_handler(context)

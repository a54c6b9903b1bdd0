"""Delivery of results to clients, shared by the three drivers of requests.

A driver runs the chunks of a request: a worker of a server, a stream of the library, or the
accumulator of the ensemble. If `deliver` raises an error, the driver ends the request with it.

A method of a reply may fail, because its client may have vanished. Such a failure is logged and
affects no other request.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

from token2wav.errors import Token2WavError
from token2wav.serving.request import Reply, Request

log = logging.getLogger(__name__)


class Result(Protocol):
    """Result of a chunk: the properties that the playback clock of the listener needs."""

    @property
    def duration_s(self) -> float:
        """Seconds of audio in the result. A result without audio may still have to be sent."""

    @property
    def sound_s(self) -> float | None:
        """As in `AudioChunk`."""


ResultT = TypeVar("ResultT", bound=Result)


def deliver(
    request: Request,
    result: ResultT | Token2WavError | None,
    send: Callable[[ResultT, float], None],
    lock: AbstractContextManager[object] | None = None,
) -> None:
    """Delivers the result of the next chunk of a request.

    Args:
        result: None if the chunk has no result; an error if its computation failed.
        send: its second argument is the seconds for which the listener had no audio before this
            result. It is called without the lock.
        lock: guards the state of the request; None if no other thread changes it.

    Raises:
        Token2WavError: the result is an error; nothing was sent.
        StreamClosedError: another thread has ended the request meanwhile.
    """
    if isinstance(result, Token2WavError):
        raise result
    lock, heard, late = lock or nullcontext(), False, 0.0
    if result is not None:
        heard = result.duration_s > 0
        with lock:
            request.check_not_over()
            if heard:
                late = request.playback.sent(result.duration_s, result.sound_s)
        send(result, late)
    with lock:
        request.check_not_over()
        request.finish_chunk(heard=heard)
        request.last_progress = request.playback.now()


def finish(replies: Iterable[Reply]) -> None:
    for reply in replies:
        attempt(reply.finish)


def fail(replies: Iterable[Reply], error: Token2WavError) -> None:
    for reply in replies:
        attempt(reply.fail, error)


def is_cancelled(reply: Reply) -> bool:
    try:
        return reply.is_cancelled()
    except Exception:
        log.warning(
            "reading whether a request was cancelled failed; the request counts as cancelled",
            exc_info=True,
        )
        return True


def attempt(call: Callable[..., None], *arguments: Any) -> None:
    """Calls a function of a client or an observer, and logs its exception instead of raising it."""
    try:
        call(*arguments)
    except Exception:
        log.warning("%s failed and is skipped", getattr(call, "__qualname__", call), exc_info=True)

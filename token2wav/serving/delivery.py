"""Calls of replies and observers, which may fail.

A method of a reply may fail, because its client may have vanished. Such a failure is logged and
affects no other request.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from token2wav.errors import Token2WavError
from token2wav.serving.utterance import Reply

log = logging.getLogger(__name__)


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

"""When to try again, how often and how soon: one policy for questions and utterances, with threads and with asyncio."""

from __future__ import annotations

import logging
from typing import Any

from tenacity import RetryCallState, retry_if_exception, stop_after_attempt, wait_exponential, wait_random

from token2wav_client.errors import ClientError

_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 4.0
_JITTER_S = 0.5  # so that clients who lost the same server do not all come back in the same moment

logger = logging.getLogger("token2wav_client")


def policy(retries: int) -> dict[str, Any]:
    """Arguments for tenacity's Retrying or AsyncRetrying.

    Tries again after errors that are `transient`, after 0.5, 1, 2 and then 4 s, and up to half a second more. Each
    time it logs a warning.

    Args:
        retries: attempts after the first one.
    """

    def tell(attempt: RetryCallState) -> None:
        error = attempt.outcome.exception() if attempt.outcome else None
        pause_s = attempt.next_action.sleep if attempt.next_action else 0.0
        logger.warning("%s; retry %d of %d in %.1f s", error, attempt.attempt_number, retries, pause_s)

    return {
        "stop": stop_after_attempt(retries + 1),
        "wait": wait_exponential(_FIRST_PAUSE_S, _LONGEST_PAUSE_S) + wait_random(0, _JITTER_S),
        "retry": retry_if_exception(lambda error: isinstance(error, ClientError) and error.transient),
        "before_sleep": tell,
        "reraise": True,
    }

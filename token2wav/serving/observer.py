"""Interface through which a server measures the workers."""

from __future__ import annotations

from collections.abc import Mapping

from token2wav.config.model_config import StageName
from token2wav.errors import Token2WavError
from token2wav.serving.request import Request


class Observer:
    """Observer of the workers, for example for metrics. Its methods are called from any thread."""

    def changed(self, open_requests: int) -> None:
        """Called after a request was admitted, opened or ended."""

    def on_batch(self, waited: list[float], seconds: Mapping[StageName, float]) -> None:
        """Called after a batch.

        Args:
            waited: for each chunk, the seconds between its readiness and the start of the batch.
            seconds: compute time of each stage.
        """

    def refused(self, error: Token2WavError) -> None:
        """Called when the cache has no room to open an admitted request."""

    def sent(self, request: Request, seconds: float, late: float) -> None:
        """Called after audio was sent.

        Args:
            late: seconds of silence before the audio; 0 if it was in time.
        """

    def delivered(self) -> None:
        """Called after the audio of a batch was sent, once after all calls of `sent`."""

    def ended(self, request: Request, reason: str) -> None:
        """Called when a request is over.

        Args:
            reason: `finished`, the value of an `EndReason`, `cancelled`, or the name of an error
                class such as `IdleError`.
        """

"""Observer of the utterances of a server, for example for metrics."""

from __future__ import annotations

from collections.abc import Mapping

from token2wav.config.model_config import StageName
from token2wav.errors import Token2WavError
from token2wav.serving.utterance import Utterance


class Observer:
    """Base class of observers, with methods that do nothing. Any thread may call a method."""

    def admitted(self, open_utterances: int) -> None:
        """Called after an utterance was admitted."""

    def changed(self, open_utterances: int) -> None:
        """Called soon after utterances were admitted, opened or ended. One call may report several
        changes. Before a call with 0, `ended` was called for every utterance.
        """

    def on_batch(self, waited: list[float], seconds: Mapping[StageName, float]) -> None:
        """Called after a batch. `waited` has for each chunk the seconds between its readiness and
        the start of the batch.
        """

    def refused(self, error: Token2WavError) -> None:
        """Called when the cache has no room to open an admitted utterance, or when a token is
        refused after others.
        """

    def sent(self, utterance: Utterance, seconds: float, late: float) -> None:
        """Called after audio was sent, `late` seconds after the end of the earlier audio; 0 if in
        time.
        """

    def ended(self, utterance: Utterance, reason: str) -> None:
        """Called when an utterance is over. The reason is `finished`, the value of an `EndReason`,
        `cancelled`, or the name of an error class such as `IdleError`.
        """

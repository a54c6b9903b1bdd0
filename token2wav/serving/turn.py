"""Turn of a worker: the utterances that it opens or computes, and what follows from the results.

The scheduler makes every value of this module, except for `Computed`, which the worker makes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from token2wav.config.model_config import StageName
from token2wav.errors import Token2WavError
from token2wav.serving.pipeline import Result
from token2wav.serving.utterance import Reply, Utterance


@dataclass(frozen=True, eq=False)
class Turn:
    """Turn of a worker: one utterance to open, or a batch of the next chunks of several.

    Attributes:
        opens: whether the worker opens the utterance in the stages, instead of computing chunks.
        interrupts: whether the worker takes the turn between two ODE steps of another one.
        interruptible: whether first chunks and openings may interrupt the turn: it is a long batch.
        tokens: tokens of the chunks; 0 for an opening, and for provisional chunks. Provisional
            chunks may have fewer ODE steps, so their time predicts no other chunks.
        waited: seconds between the readiness of each chunk and the start of the turn.
        hangs_after: time, on the clock of `started`, after which the turn counts as hung.
    """

    worker: int
    utterances: Sequence[Utterance]
    opens: bool
    interrupts: bool
    interruptible: bool
    tokens: int
    waited: list[float]
    started: float
    hangs_after: float


class Computed(NamedTuple):
    """Result of a turn.

    Attributes:
        results: audio to send, None, or an error, for each utterance. An opening without an error
            yields None.
        stages: compute time of each stage; empty for an opening, and if the backend failed.
    """

    results: Sequence[Result]
    seconds: float
    stages: Mapping[StageName, float]


class Delivery(NamedTuple):
    """Result of an utterance, and the reply that takes it."""

    utterance: Utterance
    result: Result
    reply: Reply | None = None  # None if nothing is sent
    late: float = 0.0  # seconds for which the listener has had no audio before this result


class Answer(NamedTuple):
    """Replies of an utterance to end.

    Attributes:
        error: error with which the replies fail; None if they are finished.
        ended: reason for the end of the utterance, as in `Observer.ended`; empty if the utterance
            is still open, or if its end was reported before.
    """

    utterance: Utterance
    replies: Sequence[Reply]
    error: Token2WavError | None = None
    ended: str = ""

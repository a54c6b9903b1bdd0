"""Utterance in the scheduler: it holds the requests that came, and what is known of its listener."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from token2wav.errors import Token2WavError
from token2wav.serving.audio_output import AudioOutput
from token2wav.streaming.session import AudioChunk, Session
from token2wav.voice import Voice


class Reply(Protocol):
    """Reply to one request: it takes the answers. Exactly one of `finish` and `fail` is called, once, and last."""

    def send(self, chunk: AudioChunk) -> None:
        """Delivers one chunk."""

    def finish(self) -> None:
        """Says that the request is consumed."""

    def fail(self, error: Token2WavError) -> None:
        """Says that the utterance is lost, and why."""

    def is_cancelled(self) -> bool:
        """Says whether nobody waits for answers any more."""


@dataclass(eq=False)
class Request:
    """Request of a client: tokens of an utterance that arrive together.

    Attributes:
        taken: whether the session has the tokens.
        progress: whether it brings the utterance further, by tokens or its end.
    """

    tokens: NDArray[np.int32]
    end: bool
    reply: Reply
    keep_open: bool
    taken: bool = False

    @property
    def progress(self) -> bool:
        return bool(len(self.tokens)) or self.end


@dataclass(eq=False)
class Utterance:
    """Utterance in the scheduler, from admission to its end; opaque to callers.

    Times are seconds of the scheduler's clock.

    Attributes:
        number: 1, 2, 3 ... in the order of admission, for logs.
        voice: prompt and speaker as the model uses them.
        output: makes of its audio what is sent.
        on_close: is called once when the utterance is over.
        steps: number of its ODE steps.
        client: name of the client it belongs to, or empty.
        admitted: time of its admission.
        last_progress: time at which tokens came, or were consumed.
        session: None until its turn has come to be opened, and when it is closed.
        requests: queue of those that are not consumed yet.
        kept_open: replies that stay unfinished until the end.
        tokens: number of tokens received so far.
        ended: whether no more tokens will come.
        closed: whether it is over for any reason; no more requests are taken.
        why_closed: a sentence for requests that come too late. No exception: it would keep alive all that its traceback
            refers to.
        worker: thread id of the worker it belongs to; then only that one touches or closes its session.
        ready_since: time at which its next chunk had all its tokens; None if it has not.
        heard_since: time at which its first audio was sent.
        sound_since: time at which its listener, who plays at once, hears the first sound; None before that is sent.
        plays_until: time at which its listener runs out of audio.
        seconds_sent: audio sent so far.
        compute_seconds: time of the batches that it was in.
        underruns: number of chunks that came after the audio before them had ended.
    """

    number: int
    voice: Voice
    output: AudioOutput
    on_close: Callable[[], None]
    steps: int
    client: str
    admitted: float
    last_progress: float
    session: Session | None = None
    requests: deque[Request] = field(default_factory=deque)
    kept_open: list[Reply] = field(default_factory=list)
    tokens: int = 0
    ended: bool = False
    closed: bool = False
    why_closed: str = "stream: it has ended; tokens after the end are not taken"
    worker: int | None = None
    ready_since: float | None = None
    heard_since: float | None = None
    sound_since: float | None = None
    plays_until: float | None = None
    seconds_sent: float = 0.0
    compute_seconds: float = 0.0
    underruns: int = 0


class Observer:
    """Observer of a scheduler: it is called from any thread when something happens, and does nothing by itself."""

    def changed(self, open_utterances: int) -> None:
        """Is called when an utterance was admitted, started or ended, with the number of open ones."""

    def computed(self, waited: list[float], flow_seconds: float, vocoder_seconds: float) -> None:
        """Is called when a batch has run.

        Args:
            waited: seconds for which each of its chunks had been ready.
            flow_seconds, vocoder_seconds: time that the stages took.
        """

    def sent(self, utterance: Utterance, seconds: float, late: float) -> None:
        """Is called when a chunk was sent.

        Args:
            utterance: utterance that it belongs to.
            seconds: duration of its audio.
            late: seconds for which the listener heard nothing.
        """

    def ended(self, utterance: Utterance, reason: str) -> None:
        """Is called when an utterance is over: `finished`, `cancelled`, or the name of an error such as `IdleError`."""

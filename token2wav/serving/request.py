"""Request for one utterance, from its admission to its last sample, and the messages that belong to
it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol

from token2wav.errors import StreamClosedError, Token2WavError
from token2wav.serving.audio_output import AudioChunk, AudioOutput
from token2wav.serving.chunking import Chunker
from token2wav.serving.clocks import Playback
from token2wav.voice import Voice

ENDED = "stream: it has ended; tokens after the end are not taken"


class Reply(Protocol):
    """Reply to one message: it takes the answers.

    Exactly one of `finish` and `fail` is called, once, and last.
    """

    def send(self, chunk: AudioChunk) -> None:
        """Delivers one chunk."""

    def finish(self) -> None:
        """Says that the tokens of the message are consumed."""

    def fail(self, error: Token2WavError) -> None:
        """Says that the utterance is lost, and why."""

    def is_cancelled(self) -> bool:
        """Says whether nobody waits for answers any more."""


class Message(NamedTuple):
    """Message of a client: tokens of a request that arrived together."""

    received: int  # position after its last token, as `Chunker.received`
    end: bool  # the utterance ends with it
    reply: Reply  # takes the chunks that its tokens make possible
    keep_open: bool  # `reply` is finished with the request only


class Status(Enum):
    """Status of a request."""

    WAITING = "waiting"  # for tokens
    READY = "ready"  # to be opened in the engines, or to have its next chunk computed
    RUNNING = "running"  # it belongs to a worker
    FINISHED = "finished"
    FAILED = "failed"


@dataclass(eq=False)
class Request:
    """Request for one utterance: all that is known of it.

    Times are seconds of one monotonic clock.
    """

    voice: Voice  # prompt and speaker as the model uses them
    ode_steps: int
    chunker: Chunker  # its tokens, and the chunk that runs next
    playback: Playback  # clock of its listener
    output: AudioOutput  # makes of its audio what is sent
    # one for each stage; None before it is opened, and when it is closed
    handles: tuple[int, ...] | None = None
    number: int = 0  # 1, 2, 3 ... in the order of admission, for logs
    client: str = ""  # name of the client it belongs to, or empty
    on_close: Callable[[], None] = lambda: None  # called once when it is over
    admitted: float = 0.0
    status: Status = Status.WAITING  # what it waits for, or how it ended
    # thread id of the worker it belongs to: only that one touches or releases its handles
    owner: int | None = None
    messages: deque[Message] = field(default_factory=deque)  # those that are not consumed yet
    # replies that stay unfinished until the end
    kept_open: list[Reply] = field(default_factory=list)
    last_progress: float = 0.0  # when tokens came, or audio was sent
    ready_since: float = 0.0
    compute_seconds: float = 0.0  # of the batches that it was in
    # A sentence for messages that come too late. No exception: it would keep alive all that its
    # traceback refers to.
    why_closed: str = ENDED

    @property
    def over(self) -> bool:
        return self.status in (Status.FINISHED, Status.FAILED)

    def check_open(self) -> None:
        """Raises StreamClosedError if it takes no more tokens, saying why."""
        if self.over or self.chunker.ended:
            raise StreamClosedError(self.why_closed)

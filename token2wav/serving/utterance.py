"""Utterance from its admission to its last sample, and its messages."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, Protocol

from numpy.typing import ArrayLike, NDArray

from token2wav.config.model_config import ModelConfig
from token2wav.errors import InputError, StreamClosedError, Token2WavError
from token2wav.serving.audio_output import AudioChunk, AudioOutput
from token2wav.serving.chunking import Chunker
from token2wav.serving.clocks import Playback
from token2wav.serving.delays import DelayPattern
from token2wav.serving.end_limits import EndLimits, EndReason, RepeatLimit
from token2wav.serving.tempo import Tempo
from token2wav.stages.stage import StreamOptions
from token2wav.voice import Voice

ENDED = "stream: it has ended, so it accepts no more tokens"


class Reply(Protocol):
    """Reply to one message: takes the chunks of audio, or an error, for the client.

    Exactly one of `finish` and `fail` is called, once, as the last call.
    """

    def send(self, chunk: AudioChunk) -> None: ...

    def finish(self) -> None:
        """Ends the reply: the tokens of the message are consumed."""

    def fail(self, error: Token2WavError) -> None:
        """Ends the reply with the error that ended the utterance."""

    def is_cancelled(self) -> bool:
        """Returns whether the client has cancelled or vanished."""


class PendingMessage(NamedTuple):
    """Message of a client whose reply is open: tokens of one utterance that arrived together."""

    received: int  # position after the last token of the message
    end: bool
    reply: Reply
    keep_open: bool  # as in `UtterancePool.push`


class Status(Enum):
    """Status of an utterance. Methods of `Utterance` make every transition."""

    UNOPENED = "unopened"  # admitted, and not yet opened in the stages
    WAITING = "waiting"  # opened; the next chunk needs more tokens
    READY = "ready"  # opened; the next chunk can be computed
    RUNNING = "running"  # a worker opens the utterance, or computes the next chunk
    FINISHED = "finished"
    FAILED = "failed"


@dataclass(eq=False)
class Utterance:
    """Utterance of a client. Times are seconds of one monotonic clock.

    Attributes:
        delays: aligns the codes of the client; None if they arrive aligned.
        tempo: stretches the mel of the stream in time; None at speed 1.
        handles: handles in the stages; empty before the utterance is opened, and after it is
            closed.
        number: 1, 2, 3 ... in the order of admission, for logs.
        canary: whether the launcher's test synthesis has sent the utterance. It is served first,
            and no limit on streams refuses it.
        on_close: called with the utterance, once, when it is over.
        owner: worker that has the utterance, from `start` to `release`, also if the utterance fails
            meanwhile; else None. Only the owner may use or release the handles.
        last_progress: time at which tokens last arrived, or audio was last sent.
        compute_seconds: total time of the batches with a chunk of the utterance.
        why_closed: text of the error for messages that arrive after the end. It is not an
            exception, because an exception keeps every object alive that its traceback refers to.
        refusal: error about a token, which follows the audio of the tokens before it; None if no
            token was refused.
        leaves: whether the final chunk was computed, so that the utterance takes no place any more.
    """

    voice: Voice
    stream_options: StreamOptions
    chunker: Chunker
    playback: Playback
    output: AudioOutput
    delays: DelayPattern | None = None
    tempo: Tempo | None = None
    limits: EndLimits = field(default_factory=EndLimits)
    handles: tuple[int, ...] = ()
    number: int = 0
    client: str = ""
    canary: bool = False
    on_close: Callable[[Utterance], None] = lambda _: None
    admitted: float = 0.0
    status: Status = Status.UNOPENED
    owner: int | None = None
    messages: deque[PendingMessage] = field(default_factory=deque)
    kept_open: list[Reply] = field(default_factory=list)
    last_progress: float = 0.0
    ready_since: float = 0.0
    compute_seconds: float = 0.0
    why_closed: str = ENDED
    refusal: InputError | None = None
    leaves: bool = False

    def __post_init__(self) -> None:
        self._repeats = RepeatLimit(self.limits.repeats)

    @property
    def end_reason(self) -> EndReason | None:
        """Limit that has ended the tokens or the audio of the utterance; None if none has. The last
        audio may still have to be computed or sent.
        """
        return self.output.end_reason

    @property
    def drops_tokens(self) -> bool:
        """Whether the end of the utterance is fixed already. Further tokens are then dropped
        without an error, because the client may not have the end yet.
        """
        return self.end_reason is not None or self.refusal is not None

    @property
    def last_error(self) -> InputError | None:
        """Error that follows the last audio: `refusal`, unless a limit has ended the audio before
        the refused token.
        """
        return self.refusal if self.end_reason is None else None

    def checked_tokens(self, tokens: ArrayLike, config: ModelConfig) -> NDArray[Any]:
        """Aligns tokens that arrive in a delay pattern, and checks them. Raises InputError if they
        do not fit the model or the delay pattern.

        Returns:
            (n, *token_shape) tokens; with a delay pattern, the frames that the tokens complete. No
            tokens after a limit or a refused token has ended the utterance.
        """
        if self.drops_tokens:
            return config.tokens.zeros(0)
        return config.tokens.checked(self.delays.frames(tokens) if self.delays else tokens)

    def check_tokens(self, tokens: NDArray[Any]) -> None:
        """Raises InputError if `Chunker.check` refuses the next tokens. Tokens after the end by
        `limits` are not checked, because they are dropped.
        """
        self.chunker.check(tokens[: copy(self._repeats).end(tokens)])

    def refuse(self, error: InputError) -> None:
        """Lets an error about a token end the utterance after the audio of the tokens before it."""
        self.refusal = InputError(*error.__reduce__()[1])  # without its traceback
        self.why_closed = f"stream: it failed: {error}"

    def within_limits(self, tokens: NDArray[Any], *, end: bool) -> tuple[NDArray[Any], bool]:
        """Returns the tokens up to the end by `limits`, and whether they are the last."""
        if (count := self._repeats.end(tokens)) is None:
            return tokens, end
        self.output.end_reason = EndReason.REPEATS
        self.why_closed = self.limits.sentence(EndReason.REPEATS)
        return tokens[:count], True

    def hear(self, result: AudioChunk | None) -> float:
        """Records that the listener gets the result of the next chunk now. Returns the seconds for
        which the listener has had no audio.

        Raises StreamClosedError if another thread has ended the utterance meanwhile.
        """
        self.check_not_over()
        self.leaves = result is not None and result.final
        if result is None or not result.duration_s:
            return 0.0
        return self.playback.sent(result.duration_s, result.sound_s)

    def finish_chunk(self, result: AudioChunk | None) -> None:
        """Records that the next chunk was computed, and its result sent. If silence has ended the
        audio, no more chunks follow. Raises StreamClosedError as `hear`.
        """
        self.check_not_over()
        self.chunker.finish_chunk(heard=result is not None and result.duration_s > 0)
        self.last_progress = self.playback.now()
        if result is not None and result.end_reason is EndReason.SILENCE:
            # Tokens may have reached the other limit since this chunk was computed.
            self.output.end_reason = EndReason.SILENCE
            self.why_closed = self.limits.sentence(EndReason.SILENCE)
            self.chunker.stop()

    @property
    def over(self) -> bool:
        return self.status in (Status.FINISHED, Status.FAILED)

    @property
    def awaits_tokens(self) -> bool:
        if self.status is Status.UNOPENED:
            return not self.messages
        return self.status is Status.WAITING

    def start(self, owner: int) -> None:
        """Gives the utterance to a worker."""
        assert self.owner is None
        assert not self.over
        self.owner, self.status = owner, Status.RUNNING

    def release(self, now: float) -> None:
        """Takes an opened utterance back from its worker, and sets its status to waiting or ready.
        It may have no worker: new tokens or the passage of time may have made it ready.
        """
        self.owner = None
        if self.over:
            return
        if self.chunker.next_chunk is None:
            self.status = Status.WAITING
        elif self.status is not Status.READY:
            self.status, self.ready_since = Status.READY, now

    def finish(self) -> None:
        self.status = Status.FINISHED

    def fail(self, error: Token2WavError) -> None:
        """Ends the utterance with an error, which also answers later messages."""
        self.status = Status.FAILED
        self.why_closed = (
            str(error) if isinstance(error, StreamClosedError) else f"stream: it failed: {error}"
        )

    def check_open(self) -> None:
        """Raises StreamClosedError if the utterance takes no more messages."""
        if self.over or (self.chunker.ended and not self.drops_tokens):
            raise StreamClosedError(self.why_closed)

    def check_not_over(self) -> None:
        if self.over:
            raise StreamClosedError(self.why_closed)

    def next_reply(self) -> Reply:
        """Returns the reply that takes the next chunk: the reply to the oldest waiting message, or
        else the first reply that is kept open. Raises StreamClosedError if the utterance is over.
        """
        self.check_not_over()
        return self.messages[0].reply if self.messages else self.kept_open[0]

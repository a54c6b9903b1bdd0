"""Listener of a simulated utterance: sends its tokens as they arrive, and plays the audio."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from testkit.simulation.server import ChunkWork, Events, SimulatedServer
from token2wav.errors import Token2WavError
from token2wav.serving.audio_output import AudioChunk
from token2wav.serving.clocks import Playback
from token2wav.serving.utterance import Utterance


class Listener:
    """Listener of one utterance. A lost utterance may be sent again, as clients with retries do.

    Args:
        coming: arrival times and numbers of tokens, in order; at least one.
        buffer_s: audio that the player collects before it starts.
        on_over: called when all audio has arrived.

    Attributes:
        playback: playback clock, which goes on when the utterance is sent again.
        silent_s: sum of all silences after the first audio.
        longest_s: longest silence.
        chunks: computed chunks.
        work: computed tokens; tokens of provisional chunks count by their share of the cost.
        provisional: tokens with first audio from provisional chunks.
    """

    def __init__(
        self,
        coming: Sequence[tuple[float, int]],
        events: Events,
        buffer_s: float,
        on_over: Callable[[Listener], None] = lambda _: None,
    ) -> None:
        self.playback = Playback(events, buffer_s)
        self.silent_s = self.longest_s = self.work = 0.0
        self.chunks = self.provisional = self.resent = 0
        self.over = self.refused = False
        self.server: SimulatedServer | None = None
        self.utterance: Utterance | None = None
        self._coming, self._events, self._on_over = coming, events, on_over
        self._next = self._arrived = 0  # next arrival; tokens that have arrived
        self._skip_s = 0.0  # audio of a repeated utterance that was played before

    @property
    def tokens(self) -> int:
        return sum(count for _, count in self._coming)

    @property
    def started(self) -> float | None:
        """Time of the first audio."""
        return self.playback.started

    @property
    def begins(self) -> float:
        """Time of the first token."""
        return self._coming[0][0]

    @property
    def first_s(self) -> float:
        """Seconds from the first token to the first audio."""
        return (self.playback.started or 0.0) - self.begins

    def connect(self, server: SimulatedServer) -> None:
        """Opens the stream, and sends all tokens that have arrived.

        Raises:
            LimitError: the server has too many streams.
        """
        self.utterance, self.server = server.open(self), server
        if self._arrived:
            server.push(self.utterance, self._arrived, end=self._all_arrived)

    def feed(self) -> None:
        """Begins to send tokens at their arrival times."""
        self._events.at(self._coming[self._next][0], self._arrive)

    def lose(self) -> None:
        """The server is gone. The audio is repeated from its start after the next `connect`."""
        self.utterance = self.server = None
        self.resent += 1
        self._skip_s = self.playback.seconds_sent

    def computed(self, chunk: ChunkWork, spoken: int) -> None:
        assert self.server is not None
        self.chunks += 1
        self.work += chunk.tokens * self.server.kind.costs.share(chunk)
        self.provisional += spoken * chunk.provisional

    def send(self, chunk: AudioChunk) -> None:
        skipped = min(self._skip_s, chunk.duration_s)
        self._skip_s -= skipped
        if chunk.duration_s > skipped:
            silent_s = self.playback.sent(chunk.duration_s - skipped)
            self.silent_s += silent_s
            self.longest_s = max(self.longest_s, silent_s)

    def finish(self) -> None:
        """Ends a reply. The listener is done when the utterance is over."""
        if self.utterance is not None and self.utterance.over and not self.over:
            self.over = True
            self._on_over(self)

    def fail(self, error: Token2WavError) -> None:
        raise error  # no simulated chunk fails

    def is_cancelled(self) -> bool:
        return False

    @property
    def _all_arrived(self) -> bool:
        return self._next == len(self._coming)

    def _arrive(self) -> None:
        _, count = self._coming[self._next]
        self._next, self._arrived = self._next + 1, self._arrived + count
        if self.server is not None and self.utterance is not None:
            self.server.push(self.utterance, count, end=self._all_arrived)
        if not self._all_arrived:
            self.feed()

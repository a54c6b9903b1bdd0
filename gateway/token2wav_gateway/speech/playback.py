"""Playback of an utterance: what a player hears that starts with the first audio.

The figures are defined as in the metrics of vLLM-Omni and SGLang-Omni, so that they compare.
"""

from __future__ import annotations

from token2wav_client import AudioChunk
from token2wav_gateway.metrics import CONTINUITY_MS, Metrics


class Playback:
    """Player that starts at once. After a stall its clock moves on.

    Attributes:
        chunks: number of chunks with audio.
        audio_s: seconds of audio.
        last_s: arrival of the last chunk in seconds since the first tokens; 0 without audio.
        underrun_s: longest stall in seconds.
    """

    def __init__(self) -> None:
        self.chunks = 0
        self.audio_s = self.last_s = self.underrun_s = 0.0
        self._played_s = 0.0  # end of the audio that has arrived, on the clock of the player

    def add(self, chunk: AudioChunk) -> None:
        """Plays a chunk, which has arrived when the chunk says, not when a slow client takes it."""
        if not len(chunk.audio):
            return
        if self.chunks:
            self.underrun_s = max(self.underrun_s, chunk.arrival_s - self._played_s)
        self._played_s = max(self._played_s, chunk.arrival_s) + chunk.duration_s
        self.chunks += 1
        self.audio_s += chunk.duration_s
        self.last_s = chunk.arrival_s

    def count(self, metrics: Metrics, seconds: float) -> None:
        """Counts an utterance that is complete.

        Args:
            seconds: time from the text to its last audio.
        """
        if self.audio_s:
            metrics.rtf.observe(seconds / self.audio_s)
        if self.chunks < 2:
            return
        metrics.underrun.observe(self.underrun_s)
        for threshold in CONTINUITY_MS:
            if self.underrun_s <= threshold / 1000:
                metrics.continuity.labels(threshold).inc()

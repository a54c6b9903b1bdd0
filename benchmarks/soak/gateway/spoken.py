"""Audio that a gateway has sent for a line, and the check of its samples."""

from __future__ import annotations

import io
from dataclasses import dataclass, field, replace

import av
import numpy as np

from benchmarks.soak.crowd import WrongAnswerError
from benchmarks.soak.lines import Line


class WrongAudioError(WrongAnswerError):
    """Error for wrong samples. No outage excuses it."""


@dataclass
class Spoken:
    """Answer for a line.

    Attributes:
        audio_format: pcm, wav or flac.
        audio: content of the answer.
        failure: why the audio is not complete; empty if it is complete.
    """

    line: Line
    audio_format: str
    audio: bytearray = field(default_factory=bytearray)
    failure: str = "not spoken"

    def check(self) -> None:
        """Checks the samples. After a failure, samples at the end may be missing.

        Raises:
            WrongAudioError: a sample is wrong, or samples are missing or too many.
        """
        if self.failure and self.audio_format != "pcm":
            return
        if self.audio_format == "pcm":
            samples = np.frombuffer(self.audio[: len(self.audio) // 2 * 2], np.int16)
        else:
            with av.open(io.BytesIO(self.audio)) as file:
                frames = [frame.to_ndarray().ravel() for frame in file.decode(audio=0)]
            samples = np.concatenate(frames)
        line = self.line
        if self.failure:
            line = replace(line, audio=line.audio[: len(samples)])
        if fault := line.fault([samples]):
            raise WrongAudioError(f"'{line.name}' as {self.audio_format}: {fault}")

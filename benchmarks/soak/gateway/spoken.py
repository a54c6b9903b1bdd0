"""Audio that a gateway has sent for a line, and the check of its samples."""

from __future__ import annotations

import io
from dataclasses import dataclass, field

import av
import numpy as np

from benchmarks.soak.crowd import WrongAnswerError
from benchmarks.soak.lines import TOLERANCE, Line

_STEPS = 32767  # of 16 bits


class WrongAudioError(WrongAnswerError):
    """Error for wrong samples. No outage excuses it."""


@dataclass
class Spoken:
    """Answer for a line.

    Attributes:
        line: line.
        audio_format: pcm, wav or flac.
        audio: content of the answer.
        failure: why the audio is not complete; empty if it is complete.
    """

    line: Line
    audio_format: str
    audio: bytearray = field(default_factory=bytearray)
    failure: str = "not spoken"

    def check(self) -> float:
        """Checks the samples, and returns the largest error in steps of 16 bits.

        After a failure, samples at the end may be missing. A sample is rounded to a step.

        Raises:
            WrongAudioError: a sample is wrong, or samples are missing or too many.
        """
        if self.failure and self.audio_format != "pcm":
            return 0.0
        if self.audio_format == "pcm":
            samples = np.frombuffer(self.audio[: len(self.audio) // 2 * 2], np.int16)
        else:
            with av.open(io.BytesIO(self.audio)) as file:
                frames = [frame.to_ndarray().ravel() for frame in file.decode(audio=0)]
            samples = np.concatenate(frames)
        wanted = np.rint(np.clip(self.line.audio, -1, 1) * _STEPS)
        if self.failure:
            wanted = wanted[: len(samples)]
        what = f"'{self.line.name}' as {self.audio_format}"
        if len(samples) != len(wanted):
            raise WrongAudioError(f"{what}: {len(samples)} samples, expected {len(wanted)}")
        errors = np.abs(samples - wanted)
        wrong = errors > _STEPS * TOLERANCE + 0.5
        if wrong.any():
            first = int(np.argmax(wrong))
            raise WrongAudioError(
                f"{what}: {wrong.sum()} of {len(wanted)} samples are wrong; the first, {first}, "
                f"is off by {errors[first]:g} steps, the worst by {errors.max():g}"
            )
        return float(errors.max(initial=0))

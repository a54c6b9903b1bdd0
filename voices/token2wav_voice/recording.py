"""Recording for the models: mixed to one channel, checked for length, silence and clipping."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soundfile
import soxr
from numpy.typing import NDArray

from token2wav_voice.errors import RecordingError
from token2wav_voice.sound import Sound, opened

MIN_RATE_HZ = 16_000  # sample rate of the models' input
MAX_RATE_HZ = 384_000  # the highest rate of common sound cards
FULL_RATE_HZ = 24_000  # a lower rate leaves the upper part of the prompt mel empty
MAX_SECONDS = 30.0  # the public tokenizer was made for at most this duration
MIN_SECONDS = 0.1
# At this level 2 % of the speaker features of speech lie under their floor, float32's epsilon. At
# slightly lower levels the share soon reaches 10 %.
MIN_RMS_DBFS = -60.0
FULL_SCALE = 1 - 2**-15  # the largest 16-bit sample
# Float samples may exceed full scale. Features in float32 overflow far beyond it.
MAX_PEAK_DBFS = 6.0
# The share is 1e-5 for speech that just reaches full scale, and 1e-3 for speech that is 6 dB too
# loud.
MAX_FULL_SCALE_SHARE = 1e-3


@dataclass(frozen=True, eq=False)
class Recording:
    """Recording that passed every check; `load` creates it.

    Attributes:
        samples: (n,) float32, the mean of all channels.
        rate_hz: samples per second.
        channels: channels of the file.
        full_scale_share: share of samples at full scale, 0 to 1, in the channel with the largest
            share.
    """

    path: Path
    samples: NDArray[np.float32]
    rate_hz: int
    channels: int
    full_scale_share: float

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        start_s: float = 0.0,
        end_s: float | None = None,
        min_seconds: float = MIN_SECONDS,
    ) -> Recording:
        """Loads a file or a part of it. Raises RecordingError if the file is unreadable or violates
        a bound; the message names both.

        Args:
            path: WAV, FLAC, OGG, Opus, MP3, AAC, M4A, MP4, WebM or another file of libsndfile.
            start_s: seconds to skip.
            end_s: seconds from the beginning of the file at which to stop; None for its end.
            min_seconds: least duration of the selected part.
        """
        path = Path(path)
        try:
            if not path.is_file():
                raise RecordingError("no such file")
            if not path.stat().st_size:
                raise RecordingError("empty, 0 bytes")
            with opened(path, start_s) as sound:
                samples, share = _read(sound, start_s, end_s, min_seconds)
                recording = cls(path, samples, sound.rate_hz, sound.channels, share)
            recording._check_levels()
        except RecordingError as error:
            raise RecordingError(f"{path}: {error}") from None
        except soundfile.LibsndfileError as error:
            raise RecordingError(
                f"{path}: cannot be read as audio ({error.error_string.rstrip('.')})"
            ) from None
        except (OSError, TypeError) as error:  # soundfile raises TypeError for names ending in .raw
            raise RecordingError(f"{path}: cannot be read as audio ({error})") from None
        return recording

    @property
    def seconds(self) -> float:
        return len(self.samples) / self.rate_hz

    @property
    def rms_dbfs(self) -> float:
        """Level, in decibels of a full-scale square wave."""
        return _decibels(math.sqrt(np.mean(np.square(self.samples, dtype=np.float64))))

    @property
    def peak_dbfs(self) -> float:
        return _decibels(float(np.abs(self.samples).max()))

    @property
    def notes(self) -> list[str]:
        """Notes on properties that a user may not expect, one sentence each."""
        notes = (
            [f"{self.path}: {self.channels} channels were mixed to one"]
            if self.channels > 1
            else []
        )
        if self.rate_hz < FULL_RATE_HZ:
            notes.append(
                f"{self.path}: {self.rate_hz} Hz, so the voice has nothing above "
                f"{self.rate_hz // 2} Hz; "
                f"{FULL_RATE_HZ} Hz or more is better"
            )
        return notes

    def at(self, rate_hz: int) -> NDArray[np.float32]:
        """Resamples the recording to another rate, (n,) float32."""
        if rate_hz == self.rate_hz:
            return self.samples
        return np.asarray(
            soxr.resample(self.samples, self.rate_hz, rate_hz, quality="VHQ"), np.float32
        )

    def _check_levels(self) -> None:
        if not np.isfinite(self.samples).all():
            raise RecordingError("holds samples that are NaN or infinite")
        if self.full_scale_share > MAX_FULL_SCALE_SHARE:
            raise RecordingError(
                f"clipped: {self.full_scale_share:.2%} of the samples are at full scale; at "
                f"most {MAX_FULL_SCALE_SHARE:.1%} is allowed, so record at a lower level"
            )
        if self.peak_dbfs > MAX_PEAK_DBFS:
            raise RecordingError(
                f"the loudest sample is at {self.peak_dbfs:.1f} dBFS; at most "
                f"{MAX_PEAK_DBFS:g} dBFS can be used; floating-point samples must lie "
                "between -1 and 1"
            )
        if self.rms_dbfs < MIN_RMS_DBFS:
            remark = ", channels mixed" if self.channels > 1 else ""
            raise RecordingError(
                f"silent: the level is {self.rms_dbfs:.1f} dBFS (rms{remark}); at least "
                f"{MIN_RMS_DBFS:g} dBFS is needed"
            )


def _read(
    sound: Sound, start_s: float, end_s: float | None, min_seconds: float
) -> tuple[NDArray[np.float32], float]:
    """Reads the mean of all channels, and the largest share of samples at full scale in a channel.

    All bounds are checked before any sample is read, if the header has the length. The samples are
    read in blocks, so many channels need little more memory than one.
    """
    rate = sound.rate_hz
    if rate < MIN_RATE_HZ:
        raise RecordingError(
            f"{rate} Hz; at least {MIN_RATE_HZ} Hz is needed, because frequencies above "
            f"{rate // 2} Hz are missing in the recording"
        )
    if rate > MAX_RATE_HZ:  # a small file could unpack to gigabytes
        raise RecordingError(f"{rate} Hz; at most {MAX_RATE_HZ} Hz can be used")
    first, last = round(start_s * rate), None if end_s is None else round(end_s * rate)
    if sound.frames is not None:
        last = _check_part(sound.frames, rate, start_s, end_s, min_seconds)
    position, count, means = sound.position, 0, [np.zeros(0, np.float32)]
    at_full_scale = np.zeros(sound.channels, np.int64)
    for block in sound.blocks:
        stop = len(block) if last is None else max(0, last - position)
        part = block[max(0, first - position) : stop]
        position += len(block)
        at_full_scale += (np.abs(part) >= FULL_SCALE).sum(axis=0)
        # Samples that are not finite are rejected later, so numpy need not warn.
        with np.errstate(invalid="ignore", over="ignore"):
            means.append(part.mean(axis=1))
        count += len(part)
        if count > MAX_SECONDS * rate:
            raise _too_long(f"more than {MAX_SECONDS:g} s")
        if last is not None and position >= last:
            break
    last = _check_part(sound.frames or position, rate, start_s, end_s, min_seconds)
    samples = np.concatenate(means)
    if len(samples) < last - first:
        raise RecordingError(
            f"cut off: {last - first - len(samples)} samples fewer than the header announces"
        )
    return samples, float(at_full_scale.max()) / len(samples)


def _check_part(
    frames: int, rate: int, start_s: float, end_s: float | None, min_seconds: float
) -> int:
    """Checks a part of a recording of a number of frames. Returns the first frame after it."""
    length = f"the recording is {frames / rate:.2f} s long"
    first = round(start_s * rate)
    if first >= frames:
        raise RecordingError(f"start: {start_s:g} s, but {length}")
    last = frames if end_s is None else round(end_s * rate)
    if last > frames:
        raise RecordingError(f"end: {end_s:g} s, but {length}")
    if last <= first:
        raise RecordingError(f"end: {end_s:g} s, but the start is at {start_s:g} s")
    seconds = (last - first) / rate
    if seconds > MAX_SECONDS:
        raise _too_long(f"{seconds:.2f} s")
    if seconds < min_seconds:
        raise RecordingError(f"too short: {seconds:.2f} s; at least {min_seconds:g} s is needed")
    return last


def _too_long(length: str) -> RecordingError:
    return RecordingError(
        f"too long: {length}; at most {MAX_SECONDS:g} s can be used; choose a part with --start "
        "and --end"
    )


def _decibels(amplitude: float) -> float:
    return 20 * math.log10(amplitude) if amplitude else -math.inf

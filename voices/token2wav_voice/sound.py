"""Sound of a recording: the samples of a file, also if its header does not have their number.

libsndfile reads WAV, FLAC, OGG and MP3. FFmpeg reads further formats, and files whose length
libsndfile does not know, such as a FLAC file that a program has written to a pipe.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import av
import numpy as np
import soundfile
from numpy.typing import NDArray

from token2wav_voice.errors import RecordingError

_BLOCK = 65_536  # samples of a channel
_MOST_FRAMES = 1 << 48  # libsndfile reports more for an unknown length
# Some demuxers of FFmpeg open other files and addresses, and no recording needs a picture.
_DEMUXERS = "aac,flac,matroska,mov,mp3,ogg,wav,webm"
_DECODERS = (
    "aac,alac,flac,libopus,libvorbis,mp3,mp3float,opus,vorbis,"
    "pcm_f32le,pcm_s16be,pcm_s16le,pcm_s24le,pcm_s32le"
)


@dataclass(frozen=True, eq=False)
class Sound:
    """Sound of an open file."""

    rate_hz: int  # samples per second
    channels: int
    frames: int | None  # samples of a channel in the file; None if only reading can tell
    position: int  # samples of a channel before the first block
    blocks: Iterator[NDArray[np.float32]]  # samples (n, channels) float32 up to the end of the file


@contextmanager
def opened(path: Path, start_s: float) -> Iterator[Sound]:
    """Opens a file. Raises RecordingError if the file cannot be read as audio.

    Args:
        start_s: seconds to skip, if they need not be decoded.
    """
    try:
        file = soundfile.SoundFile(path)
    except soundfile.LibsndfileError as error:
        reason = error.error_string.rstrip(".")
    else:
        with file:
            if 0 < file.frames < _MOST_FRAMES:
                position = file.seek(min(round(start_s * file.samplerate), file.frames))
                blocks = file.blocks(_BLOCK, dtype="float32", always_2d=True)
                yield Sound(file.samplerate, file.channels, file.frames, position, blocks)
                return
        reason = "its header does not have its length"
    lists = {"format_whitelist": _DEMUXERS, "codec_whitelist": _DECODERS}
    try:
        container = av.open(str(path), options=lists)
    except av.FFmpegError:
        raise RecordingError(f"cannot be read as audio ({reason})") from None
    with container:
        yield _decoded(container)


def _decoded(container: av.container.InputContainer) -> Sound:
    """Decodes the first audio stream of a file. Raises RecordingError if the file has no audio,
    audio of another codec, or damaged audio.
    """
    if not container.streams.audio:
        raise RecordingError("cannot be read as audio (no audio stream)")
    codec = container.streams.audio[0].codec_context.name
    if codec not in _DECODERS.split(","):
        raise RecordingError(f"cannot be read as audio (codec {codec})")
    # The header may have another rate, and other channels, than the decoder.
    decoded = _samples(container)
    first = next(decoded, None)
    if first is None:
        raise RecordingError("empty, it holds no samples")
    rate_hz, samples = first
    blocks = chain([samples], (block for _, block in decoded))
    return Sound(rate_hz, samples.shape[1], None, 0, blocks)


def _samples(
    container: av.container.InputContainer,
) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """Yields the sample rate and the samples (n, channels) of each frame. Raises RecordingError if
    the audio is damaged, or changes its rate or channels.
    """
    floats = av.AudioResampler(format="flt")
    try:
        for frame in container.decode(audio=0):
            channels = frame.layout.nb_channels
            for part in floats.resample(frame):
                samples = part.to_ndarray().reshape(-1, channels)
                yield part.sample_rate, samples.astype(np.float32, copy=False)
    except (av.FFmpegError, ValueError) as error:
        raise RecordingError(f"cannot be read as audio ({error})") from None

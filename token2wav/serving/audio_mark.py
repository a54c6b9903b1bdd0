"""Marks of synthetic audio, such as watermarks: plugins that change the samples of a stream before
they are encoded.
"""

from __future__ import annotations

import logging
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from token2wav.errors import BackendError, ConfigError, InputError, one_line
from token2wav.plugins import Plugins

log = logging.getLogger(__name__)

MARKS = Plugins("token2wav.audio_marks")


class StreamMark(Protocol):
    """Mark of one stream, with its state. Only one thread at a time uses a stream."""

    def mark(self, audio: NDArray[np.float32], *, last: bool) -> NDArray[np.float32]:
        """Returns the next marked samples.

        It may withhold samples until a later call, and returns them all by the last call. The
        samples of a stream must not depend on its division into calls.

        Args:
            audio: (samples,), or (samples, channels) for several channels. It must not be changed.
                There are no samples in the last call if the earlier ones had them all.
        """


class AudioMark(Protocol):
    """Plugin that marks audio. The entry point is a class or function without arguments, which
    loads the weights. Several threads use the plugin at the same time, for different streams.
    """

    def open(self, sample_rate: int, channels: int) -> StreamMark:
        """Opens a stream. Its state is freed with the last reference to it. Raises ValueError if
        the plugin cannot mark such audio; the request is then refused with its message.
        """


def load_mark(name: str) -> AudioMark:
    """Loads the plugin of the setting `stream.mark`. Raises ConfigError if it is not installed, or
    cannot be loaded.
    """
    make = imported_mark(name)
    try:
        return make()
    except Exception as error:
        raise ConfigError(
            f"stream.mark: {name} cannot be loaded: {type(error).__name__}: {one_line(error)}"
        ) from error


def imported_mark(name: str) -> Any:
    """Imports the plugin of the setting `stream.mark`, which loads no weights. Raises ConfigError
    if it is not installed, or cannot be imported.
    """
    try:
        return MARKS.load(name)
    except (LookupError, ImportError) as error:
        raise ConfigError(f"stream.mark: {one_line(error)}") from error


class Marking:
    """Marking of one stream, which checks the results of the plugin.

    Raises:
        InputError: the plugin does not mark audio of this sample rate or number of channels.
        BackendError: the plugin failed.
    """

    def __init__(self, plugin: AudioMark, sample_rate: int, channels: int) -> None:
        self._stream: StreamMark | None = None
        self._withheld = 0
        try:
            self._stream = plugin.open(sample_rate, channels)
        except ValueError as error:
            raise InputError("sample_rate", f"{sample_rate}: {one_line(error)}") from error
        except Exception as error:
            raise _failure(error) from error

    def take(self, audio: NDArray[np.float32], *, last: bool) -> NDArray[np.float32]:
        """Returns the next marked samples; with `last`, all that are left. Raises BackendError if
        the plugin failed; if its samples have a wrong shape or number, or are not finite; or if the
        stream is closed.
        """
        if self._stream is None:
            raise BackendError("stream.mark: the stream is closed")
        if not len(audio) and not last:
            return audio
        try:
            # A copy, because the plugin may use its array again.
            marked = np.array(self._stream.mark(audio, last=last), np.float32)
        except Exception as error:
            raise _failure(error) from error
        due, shape = self._withheld + len(audio), audio.shape[1:]
        least = due if last else 0
        right_shape = marked.ndim == audio.ndim and marked.shape[1:] == shape
        if not right_shape or not least <= len(marked) <= due:
            raise BackendError(
                f"stream.mark: the plugin returned an array {marked.shape}; expected "
                f"{(due, *shape)}{'' if last else ' or fewer samples'}"
            )
        if not np.isfinite(marked).all():
            raise BackendError("stream.mark: the plugin returned NaN or infinite samples")
        self._withheld = due - len(marked)
        return marked

    def close(self) -> None:
        """Frees the state of the stream. A second call does nothing."""
        self._stream = None


def _failure(error: Exception) -> BackendError:
    log.error("the plugin of stream.mark failed", exc_info=error)
    text = one_line(error)[:300]
    return BackendError(f"stream.mark: the plugin failed: {type(error).__name__}: {text}")

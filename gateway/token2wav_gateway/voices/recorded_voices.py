"""Voices of recordings that come with each request, as in CosyVoice's Triton recipe."""

from __future__ import annotations

import asyncio
import hashlib
import io

import numpy as np
import soundfile
from numpy.typing import NDArray

from token2wav_gateway.errors import RequestError
from token2wav_gateway.settings import VoiceSettings
from token2wav_gateway.voices.listener import Listener
from token2wav_gateway.voices.voice_folder import Voice, VoiceFolder

_RECORDING_HZ = 16_000
_NO_RECORDING = "default"  # name of the voice of requests without a recording


class RecordedVoices:
    """Voices of recordings.

    Args:
        settings: settings of voices, which name a model folder.
    """

    def __init__(self, settings: VoiceSettings) -> None:
        assert settings.model is not None
        self._folder = VoiceFolder(settings)
        self._listener = Listener(settings.model, settings.longest_s)

    async def of(self, recording: NDArray[np.float32] | None, text: str) -> Voice:
        """Returns the voice of a recording.

        Args:
            recording: (samples,) at 16 kHz; None for the voice `default` of the voice folder.
            text: words of the recording.

        Raises:
            RequestError: the recording is unusable, or there is neither a recording nor a default.
        """
        if recording is None:
            voice = self._folder.get(_NO_RECORDING)
            if voice.tensors is None:
                raise RequestError("reference_wav: missing; there is no default voice")
            return voice
        name, file = await asyncio.to_thread(_file_of, recording)
        return Voice(name, text, await self._listener.voice(file, "reference_wav"))


def _file_of(recording: NDArray[np.float32]) -> tuple[str, bytes]:
    """Returns the name of the voice of a recording, and the recording as an audio file."""
    file = io.BytesIO()
    # A WAV file of floats has the time at which it was written, so it is never the same again.
    soundfile.write(file, recording, _RECORDING_HZ, format="AU", subtype="FLOAT")
    return hashlib.sha256(recording.tobytes()).hexdigest()[:12], file.getvalue()

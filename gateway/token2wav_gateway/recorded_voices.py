"""Voices of recordings that come with each request, as in CosyVoice's Triton recipe."""

from __future__ import annotations

import hashlib
import io
from collections import OrderedDict
from functools import partial

import numpy as np
import soundfile
from numpy.typing import NDArray

from token2wav_client import ClientVoice
from token2wav_gateway.errors import RequestError
from token2wav_gateway.listener import Listener
from token2wav_gateway.settings import VoiceSettings
from token2wav_gateway.voices import Voice, VoiceFolder

_RECORDING_HZ = 16_000
_NO_RECORDING = "default"  # name of the voice of requests without a recording
_MOST_VOICES = 256  # that are remembered


class RecordedVoices:
    """Voices of recordings. The latest voices are remembered, by the samples of their recordings.

    Args:
        settings: settings of voices, which name a model folder.
    """

    def __init__(self, settings: VoiceSettings) -> None:
        assert settings.model is not None
        self._folder = VoiceFolder(settings)
        self._listener = Listener(settings.model, settings.longest_s)
        self._known: OrderedDict[str, ClientVoice] = OrderedDict()

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
        key = hashlib.sha256(recording.tobytes()).hexdigest()
        tensors = await self._listener.in_turn(partial(self._remembered, key, recording))
        return Voice(key[:12], text, tensors)

    def _remembered(self, key: str, recording: NDArray[np.float32]) -> ClientVoice:
        """Returns the voice of a recording, which is computed unless it is remembered."""
        if key not in self._known:
            file = io.BytesIO()
            soundfile.write(file, recording, _RECORDING_HZ, format="WAV", subtype="FLOAT")
            self._known[key] = self._listener.voice_of(file.getvalue(), "reference_wav")
            if len(self._known) > _MOST_VOICES:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return self._known[key]

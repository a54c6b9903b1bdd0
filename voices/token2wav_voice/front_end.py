"""Front end of a model: turns a recording into tokens or into a voice."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from token2wav.errors import ConfigError
from token2wav.families import cosyvoice2, cosyvoice3, streamflow
from token2wav.published.registry import read_config
from token2wav_voice.errors import ModelError, OutputError
from token2wav_voice.features import (
    PROMPT_RATE_HZ,
    SPEAKER_RATE_HZ,
    TOKENIZER_RATE_HZ,
    prompt_mel,
    speaker_features,
    tokenizer_features,
)
from token2wav_voice.onnx_models import SpeakerEncoder, SpeechTokenizer
from token2wav_voice.recording import Recording

PUBLIC_VOCABULARY = 6561
STEP_AUDIO2_FILE = "flow.yaml"
MEL_FRAMES_PER_TOKEN = 2
EARLIER_TOP_HZ = 8_000  # upper end of the prompt mel in CosyVoice2 and related models
MIN_VOICE_SECONDS = 1.0  # one attention block of the model


@dataclass(frozen=True, eq=False)
class PromptVoice:
    """Voice prompt from a recording: prompt tokens, prompt mel and speaker embedding.

    `token2wav_client.ClientVoice` and `token2wav.Voice` use the same fields.
    """

    prompt_tokens: NDArray[np.int32]  # (P,) int32
    prompt_mel: NDArray[np.float32]  # (2 * P, 80) float32
    speaker_embedding: NDArray[np.float32]  # (192,) float32

    def save(self, path: str | Path) -> None:
        """Writes a `.safetensors` file, completely or not at all; raises OutputError on failure."""
        arrays = {name: np.ascontiguousarray(array) for name, array in vars(self).items()}
        write(Path(path), save(arrays))


def write(path: Path, content: bytes) -> None:
    """Writes a file and replaces an older one; an OutputError leaves the older file in place."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        try:
            draft.write_bytes(content)
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({error.strerror})") from None


class FrontEnd:
    """Front end of a model folder. Each ONNX file is loaded when it is first needed. Raises
    ModelError if the folder does not exist, is of MOSS-Speech, or has an invalid configuration.
    Methods raise it if an ONNX file is missing, has another interface, or failed.

    Args:
        folder: model folder in CosyVoice3's format. Its `cosyvoice3.yaml` or `streamflow.yaml`, if
            present, gives the size of the vocabulary.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        if not self._folder.is_dir():
            raise ModelError(f"{folder}: no such folder")
        if any(self._folder.glob(cosyvoice2.CHUNK_WEIGHTS)):
            raise ModelError(
                f"{folder}: the speech tokenizer of MOSS-Speech is no ONNX file, but a network "
                "that this command does not have; make tokens and voices with the public code of "
                "the model"
            )
        self._vocabulary = PUBLIC_VOCABULARY
        if self._has(*cosyvoice3.FILES, *streamflow.FILES):
            try:
                self._vocabulary = read_config(self._folder).tokens.codebook_sizes[0]
            except ConfigError as error:
                raise ModelError(str(error)) from None

    @cached_property
    def _tokenizer(self) -> SpeechTokenizer:
        return SpeechTokenizer(self._folder, self._vocabulary)

    @cached_property
    def _speaker_encoder(self) -> SpeakerEncoder:
        return SpeakerEncoder(self._folder)

    def tokens(self, recording: Recording) -> NDArray[np.int32]:
        """Computes speech tokens (n,), 25 a second."""
        return self._tokenizer(tokenizer_features(recording.at(TOKENIZER_RATE_HZ)))

    def voice(self, recording: Recording) -> PromptVoice:
        """Computes the voice of a recording's speaker.

        Raises:
            ModelError: see the class; or the folder is of StreamFlow.
        """
        if self._has(*streamflow.FILES):
            raise ModelError(
                f"{self._folder}: the weights and the mel of StreamFlow's speaker encoder, an "
                "ECAPA-TDNN, are not published; compute an embedding with the encoder of your "
                "training, and save it as a voice with an empty prompt (docs/voices.md)"
            )
        # The tokenizer takes seconds. The smaller speaker encoder runs first, so its errors appear
        # at once.
        embedding = self._speaker_encoder(speaker_features(recording.at(SPEAKER_RATE_HZ)))
        tokens = self.tokens(recording)
        top = EARLIER_TOP_HZ if self._tokenizer.earlier else PROMPT_RATE_HZ // 2
        mel = prompt_mel(recording.at(PROMPT_RATE_HZ), top)
        if self._has(STEP_AUDIO2_FILE):
            # The public code of Step-Audio2 keeps all tokens. It repeats the last frame where the
            # mel is shorter than the tokens.
            missing = max(0, MEL_FRAMES_PER_TOKEN * len(tokens) - len(mel))
            mel = np.pad(mel, ((0, missing), (0, 0)), mode="edge")
        count = min(len(tokens), len(mel) // MEL_FRAMES_PER_TOKEN)
        return PromptVoice(tokens[:count], mel[: MEL_FRAMES_PER_TOKEN * count], embedding)

    def _has(self, *files: str) -> bool:
        return any((self._folder / file).is_file() for file in files)

"""Voice of an utterance: loads it from a file, checks it, and computes its id."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load

from token2wav_client.errors import TokenError, VoiceError
from token2wav_client.input_file import UNREADABLE, arrays_in_npz, content_of, reason
from token2wav_client.tokens import TokenArray, as_tokens, plain_array

# Sizes for models in CosyVoice3's format. Other models have other sizes, which their servers check.
MEL_BINS = 80
SPEAKER_SIZE = 192
_ID = re.compile("[0-9a-f]{64}")
_LONGEST_NAME = 255
FIELDS = ("prompt_tokens", "prompt_mel", "speaker_embedding")


@dataclass(frozen=True, eq=False)
class ClientVoice:
    """Voice prompt of a speaker: prompt tokens, prompt mel and speaker embedding.

    The prompt is a recording of the speaker. The constructor checks and converts the fields.

    Attributes:
        prompt_tokens: speech tokens of the prompt, int32, shape (P,), or (P, codebooks) for models
            with several codes per token; P = 0 for a voice without a prompt.
        prompt_mel: mel of the prompt, float32, shape (frames, bands); (2 * P, 80) for CosyVoice3.
            The server checks whether the frames fit the tokens.
        speaker_embedding: float32, shape (size,); (192,) for CosyVoice3.

    Raises:
        VoiceError: a field is invalid; the message names the field and the violated bound.
    """

    prompt_tokens: TokenArray
    prompt_mel: npt.NDArray[np.float32]
    speaker_embedding: npt.NDArray[np.float32]

    def __post_init__(self) -> None:
        try:
            tokens = as_tokens(self.prompt_tokens)
        except TokenError as error:
            raise VoiceError(f"prompt_{error}") from None
        object.__setattr__(self, "prompt_tokens", tokens)
        mel = _floats("prompt_mel", self.prompt_mel, 2)
        if (len(mel) == 0) != (len(tokens) == 0):
            raise VoiceError(
                f"prompt_mel: shape {mel.shape}, expected frames for {len(tokens)} tokens"
            )
        object.__setattr__(self, "prompt_mel", mel)
        object.__setattr__(
            self, "speaker_embedding", _floats("speaker_embedding", self.speaker_embedding, 1)
        )

    @cached_property
    def id(self) -> str:
        """Id by which requests can name this voice once a server has received it.

        The id is the SHA-256 of the voice's content, as 64 hexadecimal digits.
        """
        digest = hashlib.sha256(b"token2wav voice 1\n")
        digest.update(len(self.prompt_tokens).to_bytes(8, "little"))
        digest.update(self.prompt_tokens.astype("<i4").tobytes())
        digest.update(self.prompt_mel.astype("<f4").tobytes())
        digest.update(self.speaker_embedding.astype("<f4").tobytes())
        return digest.hexdigest()

    @classmethod
    def load(cls, path: str | Path) -> ClientVoice:
        """Loads a voice from a `.npz` or `.safetensors` file with the three fields by name. Raises
        VoiceError if the file cannot be read, a field is missing, or a field is invalid.
        """
        path = Path(path)
        if path.suffix not in (".npz", ".safetensors"):
            raise VoiceError(f"{path}: the name of a voice file must end in .npz or .safetensors")
        try:
            content = content_of(path)
            arrays = arrays_in_npz(content, FIELDS) if path.suffix == ".npz" else load(content)
            missing = [field for field in FIELDS if field not in arrays]
            if missing:
                raise VoiceError(f"{missing[0]}: missing, expected the fields {', '.join(FIELDS)}")
            return cls(**{field: arrays[field] for field in FIELDS})
        except VoiceError as error:
            raise VoiceError(f"{path}: {error}") from None
        except UNREADABLE as error:
            raise VoiceError(f"{path}: cannot read the voice ({reason(error)})") from None


def is_voice_id(text: str) -> bool:
    """Returns whether a text is the id of a voice: 64 hexadecimal digits."""
    return _ID.fullmatch(text) is not None


def check_known_voice(text: str) -> None:
    """Checks that a text may be the id or the name of a voice on a server. Raises VoiceError if the
    text can be neither.
    """
    if text.endswith((".npz", ".safetensors")):
        raise VoiceError(
            f"voice: {text!r} is a file, not a name; load it with ClientVoice.load or --voice"
        )
    if not 0 < len(text) <= _LONGEST_NAME or not text.isprintable():
        raise VoiceError(
            f"voice: {text[:_LONGEST_NAME]!r} is neither a voice id nor a valid voice name"
        )


def _floats(field: str, values: npt.ArrayLike, dimensions: int) -> npt.NDArray[np.float32]:
    array = plain_array(values)
    if array.dtype.kind != "f":
        raise VoiceError(f"{field}: dtype {array.dtype}, expected float32")
    if array.ndim != dimensions or not array.shape[-1]:
        raise VoiceError(
            f"{field}: shape {array.shape}, expected {dimensions} dimension{'s' * (dimensions > 1)}"
        )
    with np.errstate(over="ignore"):
        array = np.array(array, np.float32, order="C")
    if not np.isfinite(array).all():
        raise VoiceError(f"{field}: holds values that are not finite in float32")
    array.flags.writeable = False  # the id is a hash of the content, so it must not change
    return array

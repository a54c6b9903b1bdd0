"""Voice prompt of a speaker: prompt tokens, prompt mel and speaker embedding, with their checks."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from token2wav.config.arrays import float_array, token_array
from token2wav.config.model_config import ModelConfig
from token2wav.errors import CheckpointError, InputError, one_line

if TYPE_CHECKING:
    import torch

FIELDS = ("prompt_tokens", "prompt_mel", "speaker_embedding")
MOST_PROMPT_TOKENS = 750  # 30 s of CosyVoice3

# Largest magnitudes of values. Both bounds lie far above real values, and far below values that
# would overflow in a network. A log-mel is the natural logarithm of magnitudes of at least 1e-5, so
# it ranges from -11.5 to about 5. A log-mel in decibels is within the bound as well. Values of
# speaker embeddings of the public encoder have magnitudes up to about 10. Embeddings are normalised
# before use.
MEL_BOUND = 100.0
EMBEDDING_BOUND = 1000.0


NO_VOICE = "given, but this model takes no voice; send the codes alone"


@dataclass(frozen=True, eq=False)
class Voice:
    """Voice prompt of an utterance. The arrays are read-only copies of the arguments.

    Attributes:
        prompt_tokens: (P,) int32, or (P, codebooks), speech tokens of the prompt, which is a
            recording of the speaker; P = 0 for a voice without a prompt.
        prompt_mel: (token_mel_ratio * P, bands) float32, log-mel of the prompt; (2 * P, 80) for
            CosyVoice3. `ModelConfig.prompt_frames` gives the frames of models without this ratio.
        speaker_embedding: (size,) float32; (192,) for CosyVoice3.

    Raises:
        InputError: an array has a wrong number of dimensions, a token is not an integer, or a
            number is out of its bound or not finite.
    """

    prompt_tokens: NDArray[np.int32]
    prompt_mel: NDArray[np.float32]
    speaker_embedding: NDArray[np.float32]

    def __init__(
        self, prompt_tokens: ArrayLike, prompt_mel: ArrayLike, speaker_embedding: ArrayLike
    ) -> None:
        tokens, mel, embedding = FIELDS
        for field, array in (
            (tokens, token_array(tokens, prompt_tokens, None)),
            (mel, float_array(mel, prompt_mel, 2, MEL_BOUND)),
            (embedding, float_array(embedding, speaker_embedding, 1, EMBEDDING_BOUND)),
        ):
            array.flags.writeable = False
            object.__setattr__(self, field, array)

    @classmethod
    def load(cls, path: str | Path) -> Voice:
        """Reads a voice from a `.safetensors` file, which `token2wav voice create` makes, or from a
        `conds.pt` of Chatterbox.

        Raises:
            InputError: the file cannot be read, lacks a field, or has a wrong field. The message
                names the file.
        """
        from safetensors import SafetensorError  # imported here, because only files need it
        from safetensors.torch import load_file  # NumPy has no bfloat16

        try:
            arrays = _conditionals(Path(path)) if Path(path).suffix == ".pt" else load_file(path)
            if missing := [name for name in FIELDS if name not in arrays]:
                raise InputError(missing[0], f"missing; a voice has {', '.join(FIELDS)}")
            return cls(*(arrays[name] for name in FIELDS))
        except InputError as error:
            raise InputError(str(path), str(error)) from error
        except CheckpointError as error:
            raise InputError(str(path), str(error).removeprefix(f"{path}: ")) from error
        except (OSError, KeyError, SafetensorError) as error:
            raise InputError(str(path), f"cannot be read as a voice ({one_line(error)})") from error

    @cached_property
    def content_hash(self) -> str:
        """SHA-256 of the arrays, 64 hexadecimal digits (docs/wire.md lists the bytes).

        Voices with equal arrays have equal hashes, even if their names differ.
        """
        digest = hashlib.sha256(b"token2wav voice 1\n")
        digest.update(len(self.prompt_tokens).to_bytes(8, "little"))
        digest.update(self.prompt_tokens.astype("<i4").tobytes())
        digest.update(self.prompt_mel.astype("<f4").tobytes())
        digest.update(self.speaker_embedding.astype("<f4").tobytes())
        return digest.hexdigest()

    @property
    def nbytes(self) -> int:
        return self.prompt_tokens.nbytes + self.prompt_mel.nbytes + self.speaker_embedding.nbytes

    def check(self, config: ModelConfig) -> None:
        """Raises InputError if this voice does not fit the model of `config`."""
        if (count := len(self.prompt_tokens)) > MOST_PROMPT_TOKENS:
            raise InputError(
                "prompt_tokens", f"{count} tokens; at most {MOST_PROMPT_TOKENS} are allowed"
            )
        config.tokens.check_prompt(self.prompt_tokens)
        if not config.takes_prompt and len(self.prompt_tokens):
            raise InputError(
                "prompt_tokens",
                f"{len(self.prompt_tokens)} tokens, expected 0; this model uses a speaker "
                "embedding and no prompt",
            )
        tokens, bands = len(self.prompt_tokens), config.mel_bands
        frames = config.prompt_frames(tokens)
        if self.prompt_mel.shape not in [(count, bands) for count in frames]:
            expected = f"{frames[0]}" if len(frames) == 1 else f"{frames[0]} to {frames[-1]}"
            raise InputError(
                "prompt_mel",
                f"shape {self.prompt_mel.shape}, expected {expected} frames of {bands} bands for "
                f"{tokens} prompt tokens",
            )
        if self.speaker_embedding.shape != (config.speaker_size,):
            raise InputError(
                "speaker_embedding",
                f"shape {self.speaker_embedding.shape}, expected ({config.speaker_size},)",
            )
        if not self.speaker_embedding.any():
            raise InputError(
                "speaker_embedding", "all values are 0, so it is no vector of a speaker"
            )


def voice_for(config: ModelConfig, voice: Voice | None) -> Voice:
    """Returns the voice of an utterance, checked. A model without voices gets an empty voice.
    Raises InputError if the voice does not fit the model, is missing, or is given to a model
    without voices.
    """
    if config.takes_voice:
        if voice is None:
            raise InputError("voice", "missing; this model needs a voice")
        voice.check(config)
        return voice
    if voice is not None:
        raise InputError("voice", NO_VOICE)
    return Voice(
        config.tokens.zeros(0),
        np.zeros((0, config.mel_bands), np.float32),
        np.zeros(0, np.float32),
    )


def _conditionals(path: Path) -> dict[str, torch.Tensor]:
    """Reads the tensors of a voice from a `conds.pt` of Chatterbox, by the names of `FIELDS`. No
    code in the file is executed.
    """
    import torch  # imported here, because only files need it

    from token2wav.networks.weights import read_state

    section, names = read_state(path).get("gen"), ("prompt_token", "prompt_feat", "embedding")
    if not isinstance(section, dict) or not {*names} <= section.keys():
        raise InputError("gen", "missing, or without prompt_token, prompt_feat and embedding")
    for name in names:
        value = section[name]
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            raise InputError("gen", f"{name} is no dense tensor")
    tokens, mel, embedding = (section[name].detach() for name in names)
    tokens, embedding = tokens.reshape(-1), embedding.reshape(-1)
    mel = torch.atleast_1d(mel.squeeze(0))
    count = min(len(tokens), len(mel) // 2)  # the public code cuts tokens to the mel as well
    return dict(zip(FIELDS, (tokens[:count], mel[: 2 * count], embedding), strict=True))


def check_steps(steps: int, allowed: tuple[int, ...]) -> None:
    """Raises InputError if `steps` is not an allowed number of ODE steps; 0 means the default."""
    if steps and steps not in allowed:
        raise InputError("steps", f"{steps} is not one of {', '.join(map(str, allowed))}")

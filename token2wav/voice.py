"""Voice prompt of a speaker: prompt tokens, prompt mel and speaker embedding, with their checks."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from token2wav.config.model_config import ModelConfig
from token2wav.errors import CheckpointError, InputError

FIELDS = ("prompt_tokens", "prompt_mel", "speaker_embedding")
MOST_PROMPT_TOKENS = 750  # 30 s of CosyVoice3

# Largest magnitudes of values. Both bounds lie far above real values, and far below values that
# would overflow in a network. A log-mel is the natural logarithm of magnitudes of at least 1e-5, so
# it ranges from -11.5 to about 5. A log-mel in decibels is within the bound as well. Values of
# speaker embeddings of the public encoder have magnitudes up to about 10. Embeddings are normalised
# before use.
MEL_BOUND = 100.0
LATENT_BOUND = 1e4  # the numbers inside of a network stay finite
EMBEDDING_BOUND = 1000.0


NO_VOICE = "given, but this model takes no voice; send the codes alone"


@dataclass(frozen=True, eq=False)
class Voice:
    """Voice prompt of an utterance. The arrays are read-only copies of the arguments.

    Attributes:
        prompt_tokens: (P,) int32, or (P, codebooks), speech tokens of the prompt, which is a
            recording of the speaker; P = 0 for a voice without a prompt.
        prompt_mel: (token_mel_ratio * P, bands) float32, log-mel of the prompt; (2 * P, 80) for
            CosyVoice3.
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
        """Reads a voice from a `.safetensors` file, or from a `conds.pt` of Chatterbox.

        `token2wav voice create` makes a `.safetensors` file from a recording.

        Raises:
            InputError: the file cannot be read, lacks a field, or has a wrong field. The message
                names the file.
        """
        from safetensors import SafetensorError  # imported here, because only files need it
        from safetensors.numpy import load_file

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
            raise InputError(
                str(path), f"cannot be read as a voice ({_one_line(error)})"
            ) from error

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
        if self.prompt_tokens.shape[1:] != config.token_shape:
            raise InputError(
                "prompt_tokens", _shape_problem(self.prompt_tokens.shape, config.token_shape)
            )
        check_vocabulary("prompt_tokens", self.prompt_tokens, config.vocabulary)
        if not config.takes_prompt and len(self.prompt_tokens):
            raise InputError(
                "prompt_tokens",
                f"{len(self.prompt_tokens)} tokens, expected 0; this model uses a speaker "
                "embedding and no prompt",
            )
        ratio, bands = config.token_mel_ratio, config.mel_bands
        frames = ratio * len(self.prompt_tokens)
        if self.prompt_mel.shape != (frames, bands):
            raise InputError(
                "prompt_mel",
                f"shape {self.prompt_mel.shape}, expected {(frames, bands)}: {ratio} frames of "
                f"{bands} bands for each of {len(self.prompt_tokens)} prompt tokens",
            )
        if self.speaker_embedding.shape != (config.speaker_size,):
            raise InputError(
                "speaker_embedding",
                f"shape {self.speaker_embedding.shape}, expected ({config.speaker_size},)",
            )
        if not self.speaker_embedding.any():
            raise InputError(
                "speaker_embedding", "all values are 0, so the vector cannot be normalised"
            )


def voice_for(config: ModelConfig, voice: Voice | None) -> Voice:
    """Returns the voice of an utterance, checked. A model without voices gets an empty voice.

    Raises:
        InputError: the voice does not fit the model, is missing, or is given to a model without
            voices.
    """
    if config.takes_voice:
        if voice is None:
            raise InputError("voice", "missing; this model needs a voice")
        voice.check(config)
        return voice
    if voice is not None:
        raise InputError("voice", NO_VOICE)
    return Voice(
        np.zeros((0, *config.token_shape), np.int32),
        np.zeros((0, config.mel_bands), np.float32),
        np.zeros(0, np.float32),
    )


def _conditionals(path: Path) -> dict[str, NDArray[np.generic]]:
    """Reads the arrays of a voice from a `conds.pt` of Chatterbox, by the names of `FIELDS`.

    No code in the file is executed.

    Raises:
        CheckpointError: the file cannot be read.
        InputError: the file lacks one of the arrays.
    """
    from token2wav.networks.weights import read_state  # needs torch; other voices do not

    section = read_state(path).get("gen")
    if (
        not isinstance(section, dict)
        or not {"prompt_token", "prompt_feat", "embedding"} <= section.keys()
    ):
        raise InputError("gen", "missing, or without prompt_token, prompt_feat and embedding")
    tokens, mel = (
        section["prompt_token"].reshape(-1).numpy(),
        section["prompt_feat"].squeeze(0).float().numpy(),
    )
    count = min(len(tokens), len(mel) // 2)  # the public code cuts tokens to the mel as well
    return dict(
        zip(
            FIELDS,
            (tokens[:count], mel[: 2 * count], section["embedding"].reshape(-1).float().numpy()),
            strict=True,
        )
    )


def token_array(
    field: str, tokens: ArrayLike, token_shape: tuple[int, ...] | None = ()
) -> NDArray[np.int32]:
    """Converts the tokens of a call to (n, *token_shape) int32.

    Args:
        field: name of the argument for messages.
        tokens: array to convert; an empty one-dimensional array fits every token shape.
        token_shape: shape of one token: () for a number, (codebooks,) for several codes; None
            accepts numbers, and codes of any number of codebooks.

    Raises:
        InputError: the array has another shape, or its values are not integers, or are out of the
            range of int32.
    """
    try:
        array = np.asarray(tokens)
    # Raised for ragged lists, and for torch tensors that are not on the CPU.
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(field, _no_array("an array", error)) from error
    if token_shape is None:
        if array.ndim not in (1, 2):
            raise InputError(field, f"shape {array.shape}, expected one or two dimensions")
        token_shape = array.shape[1:]
    if not array.ndim or (array.shape[1:] != token_shape and (array.size or array.ndim != 1)):
        raise InputError(field, _shape_problem(array.shape, token_shape))
    if not array.size:
        return np.zeros((0, *token_shape), np.int32)
    # NumPy keeps integers of more than 64 bits as Python objects.
    beyond_64_bits = array.dtype == object and all(type(value) is int for value in array.flat)
    if not np.issubdtype(array.dtype, np.integer) and not beyond_64_bits:
        raise InputError(field, f"type {array.dtype}, expected integers")
    if array.dtype != np.int32:
        limits = np.iinfo(np.int32)
        if array.min() < limits.min or array.max() > limits.max:
            value_range = f"{array.min()} to {array.max()}"
            raise InputError(field, f"values do not fit 32 bits; found {value_range}")
    return array.astype(np.int32)


def latent_array(latents: ArrayLike, size: int) -> NDArray[np.float32]:
    """Converts the latents of a call to (n, size) float32.

    Raises:
        InputError: the array has another shape, or its values are not numbers, not finite, or of a
            larger magnitude than `LATENT_BOUND`.
    """
    array = float_array("latents", latents, None, LATENT_BOUND)
    if array.shape == (0,):
        return array.reshape(0, size)
    if array.ndim != 2 or array.shape[1] != size:
        raise InputError("latents", f"shape {array.shape}, expected (latents, {size})")
    return array


def check_vocabulary(
    field: str, tokens: NDArray[np.int32], vocabulary: int | tuple[int, ...]
) -> None:
    """Raises InputError if a token, or a code of a token, is outside 0 to vocabulary - 1.

    Args:
        vocabulary: different tokens or codes; a number for each codebook if they differ.
    """
    outside = (tokens < 0) | (tokens >= np.asarray(vocabulary))
    if outside.any():
        index = tuple(np.argwhere(outside)[0].tolist())
        label = str(index[0]) if len(index) == 1 else f"{index[0]}, codebook {index[1]},"
        size = vocabulary[index[1]] if isinstance(vocabulary, tuple) else vocabulary
        raise InputError(
            field,
            f"{tokens[index]} at index {label} is outside the vocabulary 0 to {size - 1}",
        )


def _shape_problem(shape: tuple[int, ...], token_shape: tuple[int, ...]) -> str:
    expected = (
        f"(tokens, {token_shape[0]}), {token_shape[0]} codes for each"
        if token_shape
        else "one dimension"
    )
    return f"shape {shape}, expected {expected}"


def check_steps(steps: int, allowed: tuple[int, ...]) -> None:
    """Raises InputError if `steps` is not an allowed number of ODE steps; 0 means the default."""
    if steps and steps not in allowed:
        raise InputError("steps", f"{steps} is not one of {', '.join(map(str, allowed))}")


def float_array(
    field: str, values: ArrayLike, dimensions: int | None, bound: float = np.inf
) -> NDArray[np.float32]:
    """Copies an array to float32, and checks it.

    Args:
        field: name of the argument for messages.
        dimensions: required number of dimensions; None for any.
        bound: largest magnitude of a value.

    Raises:
        InputError: the values are not numbers, the number of dimensions is not `dimensions`, or a
            value is not finite or has a larger magnitude than `bound`.
    """
    try:
        with np.errstate(over="ignore"):
            array = np.asarray(values, dtype=np.float32).copy()
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(field, _no_array("an array of numbers", error)) from error
    if dimensions is not None and array.ndim != dimensions:
        raise InputError(
            field, f"shape {array.shape}, expected {dimensions} dimension{'s' * (dimensions > 1)}"
        )
    if not np.isfinite(array).all():
        raise InputError(field, "holds NaN or infinite values")
    if array.size and max(-array.min(), array.max()) > bound:
        index = tuple(np.argwhere(np.abs(array) > bound)[0].tolist())
        label = ", ".join(map(str, index))
        raise InputError(
            field, f"{array[index]:g} at index {label} is outside {-bound:g} to {bound:g}"
        )
    return array


def _no_array(expected: str, error: Exception) -> str:
    uneven = "inhomogeneous" in str(error)  # NumPy's word for a list of lists of different lengths
    return "rows of different lengths" if uneven else f"not {expected}: {_one_line(error)}"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())

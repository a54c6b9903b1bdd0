"""ONNX models of the front end: they are opened as data, and their interface and answers are checked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from token2wav_voice.errors import ModelError
from token2wav_voice.features import SPEAKER_BANDS, TOKENIZER_BANDS, Features

TOKENIZER_FILE = "speech_tokenizer_v3.onnx"
EARLIER_TOKENIZER_FILES = ("speech_tokenizer_v2.onnx", "speech_tokenizer_v2_25hz.onnx")  # CosyVoice2 and its relatives
SPEAKER_FILE = "campplus.onnx"

FRAMES_PER_TOKEN = 4  # 100 frames of features and 25 tokens a second
TOKEN_SLACK = 2  # how many tokens more or less than that a tokenizer may give, for how it treats the end
SPEAKER_SIZE = 192


class Tensor(NamedTuple):
    """Tensor that a graph must take or give.

    Attributes:
        types: element types that will do, as ONNX Runtime names them.
        shape: sizes; None where any must do.
    """

    types: tuple[str, ...]
    shape: tuple[int | None, ...]

    def fits(self, value: Any) -> bool:
        """Says whether a graph's input is this, as far as the graph tells: it may leave sizes open."""
        return (
            _type(value) in self.types
            and len(value.shape) == len(self.shape)
            and all(
                not isinstance(found, int) or found == size for found, size in zip(value.shape, self.shape, strict=True)
            )
        )

    def __str__(self) -> str:
        return f"{' or '.join(self.types)} ({_sizes(self.shape)})"


class _Graph:
    """ONNX graph with one output that matters, the first. Inputs go by position, as in the public code.

    Raises:
        ModelError: the file is missing, cannot be loaded, or has another interface.
    """

    def __init__(self, path: Path, inputs: Sequence[Tensor], output: Tensor) -> None:
        if not path.is_file():
            raise ModelError(f"{path}: no such file; a published model folder has one, from which voices are made")
        self.path = path
        self._output = output
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4  # what matters is raised
        try:
            # No library of custom operators is registered, so a graph can only compute.
            self._session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # its errors have no base of their own
            raise ModelError(f"{path}: cannot be loaded as an ONNX model ({_one_line(error)})") from None
        self._inputs = self._session.get_inputs()
        outputs = self._session.get_outputs()[:1]
        if (
            len(self._inputs) != len(inputs)
            or not all(wanted.fits(found) for wanted, found in zip(inputs, self._inputs, strict=True))
            or _type(outputs[0]) not in output.types  # its shape is known when it is there
        ):
            raise ModelError(
                f"{path}: has the inputs {_described(self._inputs)} and the output {_described(outputs)}, "
                f"expected the inputs {', '.join(map(str, inputs))} and the output {output}"
            )

    def run(self, *arrays: NDArray[Any]) -> NDArray[Any]:
        """Runs the graph, and returns the first output as (n,), whatever dimensions of size 1 it has."""
        feed = {value.name: array for value, array in zip(self._inputs, arrays, strict=True)}
        try:
            found = np.asarray(self._session.run(None, feed)[0])
        except Exception as error:
            shapes = " and ".join(str(array.shape) for array in arrays)
            raise ModelError(f"{self.path}: failed on inputs of shape {shapes} ({_one_line(error)})") from None
        if found.size != max(found.shape, default=0):
            raise ModelError(f"{self.path}: gave an output of shape {found.shape}, expected {self._output}")
        return found.ravel()


class SpeechTokenizer(_Graph):
    """Tokenizer of speech in a model folder, which turns features into tokens below the size of the vocabulary.

    Attributes:
        earlier: whether it belongs to CosyVoice2 or its relatives, whose prompts end at 8 kHz.
    """

    def __init__(self, folder: Path, vocabulary: int) -> None:
        earlier = [name for name in EARLIER_TOKENIZER_FILES if (folder / name).is_file()]
        self.earlier = bool(earlier) and not (folder / TOKENIZER_FILE).is_file()
        super().__init__(
            folder / (earlier[0] if self.earlier else TOKENIZER_FILE),
            inputs=[Tensor(("float",), (1, TOKENIZER_BANDS, None)), Tensor(("int32",), (1,))],
            output=Tensor(("int32", "int64"), (1, None)),
        )
        self._vocabulary = vocabulary

    def __call__(self, features: Features) -> NDArray[np.int32]:
        """Computes tokens (n,) of features (128, frames); raises ModelError if it gives what cannot be tokens."""
        frames = features.shape[1]
        tokens = self.run(features[np.newaxis], np.array([frames], np.int32))
        if abs(len(tokens) - frames / FRAMES_PER_TOKEN) > TOKEN_SLACK:
            raise ModelError(f"{self.path}: gave {len(tokens)} tokens for {frames / 100:.2f} s, expected 25 a second")
        wrong = np.flatnonzero((tokens < 0) | (tokens >= self._vocabulary))
        if wrong.size:
            raise ModelError(
                f"{self.path}: token {tokens[wrong[0]]} at position {wrong[0]} is outside the vocabulary "
                f"0 to {self._vocabulary - 1}"
            )
        return tokens.astype(np.int32)


class SpeakerEncoder(_Graph):
    """Encoder of speakers in a model folder, which turns features into an embedding."""

    def __init__(self, folder: Path) -> None:
        bank = Tensor(("float",), (1, None, SPEAKER_BANDS))
        super().__init__(folder / SPEAKER_FILE, inputs=[bank], output=Tensor(("float",), (1, SPEAKER_SIZE)))

    def __call__(self, features: Features) -> NDArray[np.float32]:
        """Computes the embedding (192,) of features (frames, 80); raises ModelError if it cannot be one."""
        embedding = self.run(features[np.newaxis])
        if len(embedding) != SPEAKER_SIZE:
            raise ModelError(f"{self.path}: gave an embedding of {len(embedding)} numbers, not {SPEAKER_SIZE}")
        if not np.isfinite(embedding).all():
            raise ModelError(f"{self.path}: gave an embedding with NaN or infinite values")
        if not embedding.any():
            raise ModelError(f"{self.path}: gave an embedding of zeros, which has no direction")
        return embedding


def _type(value: Any) -> str:
    """Returns `float` of `tensor(float)`."""
    return str(value.type).removeprefix("tensor(").removesuffix(")")


def _described(values: Sequence[Any]) -> str:
    return ", ".join(f"{value.name} {_type(value)} ({_sizes(value.shape)})" for value in values)


def _sizes(shape: Sequence[int | str | None]) -> str:
    return ", ".join("any" if size is None else str(size) for size in shape)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())

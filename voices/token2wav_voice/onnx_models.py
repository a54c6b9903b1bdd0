"""ONNX models of the front end: loaded as pure computation, with checks of their outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from token2wav_voice.errors import ModelError
from token2wav_voice.features import Features

TOKENIZER_FILE = "speech_tokenizer_v3.onnx"
# Tokenizers of CosyVoice2 and related models.
EARLIER_TOKENIZER_FILES = ("speech_tokenizer_v2.onnx", "speech_tokenizer_v2_25hz.onnx")
SPEAKER_FILE = "campplus.onnx"

FRAMES_PER_TOKEN = 4  # 100 frames of features and 25 tokens a second
# Tokens by which a tokenizer may differ from this ratio, because of its treatment of the end.
TOKEN_SLACK = 2
SPEAKER_SIZE = 192


class _Graph:
    """ONNX graph of which only the first output is used.

    Inputs are matched by position, as in the public code. Raises ModelError if the file is missing
    or cannot be loaded.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            for nested_file in sorted(path.parent.glob(f"*/{path.name}")):
                raise ModelError(
                    f"{path}: no such file, but {nested_file} exists; use {nested_file.parent}"
                )
            raise ModelError(
                f"{path}: no such file; voices need this model from the published model folder"
            )
        self.path = path
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4  # errors that matter are raised
        try:
            # No library of custom operators is registered, so a graph can only compute.
            self._session = onnxruntime.InferenceSession(
                path, options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # the errors of ONNX Runtime have no common base class
            raise ModelError(
                f"{path}: cannot be loaded as an ONNX model ({_one_line(error)})"
            ) from None

    def run(self, expected: type[Any], *arrays: NDArray[Any]) -> NDArray[Any]:
        """Runs the graph and returns the first output as (n,), without dimensions of size 1.

        Raises:
            ModelError: ONNX Runtime rejects the types, ranks or sizes of the inputs, or fails; or
                the output has another type or several rows.
        """
        names = [value.name for value in self._session.get_inputs()]
        if len(names) != len(arrays):
            raise ModelError(f"{self.path}: has {len(names)} inputs, expected {len(arrays)}")
        try:
            output = np.asarray(self._session.run(None, dict(zip(names, arrays, strict=True)))[0])
        except Exception as error:
            shapes = " and ".join(str(array.shape) for array in arrays)
            raise ModelError(
                f"{self.path}: failed on inputs of shape {shapes} ({_one_line(error)})"
            ) from None
        if output.size != max(output.shape, default=0) or not np.issubdtype(output.dtype, expected):
            tensor_type = f"{expected.__name__} (1, any)"
            raise ModelError(
                f"{self.path}: returned an output {output.dtype} {output.shape}, expected "
                f"{tensor_type}"
            )
        return output.ravel()


class SpeechTokenizer(_Graph):
    """Speech tokenizer of a model folder: turns features into tokens within the vocabulary.

    Attributes:
        earlier: True for a tokenizer of CosyVoice2 or a related model, whose prompt mel ends at 8
            kHz.
    """

    def __init__(self, folder: Path, vocabulary: int) -> None:
        earlier = [name for name in EARLIER_TOKENIZER_FILES if (folder / name).is_file()]
        self.earlier = bool(earlier) and not (folder / TOKENIZER_FILE).is_file()
        super().__init__(folder / (earlier[0] if self.earlier else TOKENIZER_FILE))
        self._vocabulary = vocabulary

    def __call__(self, features: Features) -> NDArray[np.int32]:
        """Computes tokens (n,) from features (128, frames). Raises ModelError if the graph fails,
        or its output has a wrong length or leaves the vocabulary.
        """
        frames = features.shape[1]
        tokens = self.run(np.integer, features[np.newaxis], np.array([frames], np.int32))
        if abs(len(tokens) - frames / FRAMES_PER_TOKEN) > TOKEN_SLACK:
            raise ModelError(
                f"{self.path}: returned {len(tokens)} tokens for {frames / 100:.2f} s, "
                "expected 25 per second"
            )
        positions = np.flatnonzero((tokens < 0) | (tokens >= self._vocabulary))
        if positions.size:
            raise ModelError(
                f"{self.path}: token {tokens[positions[0]]} at position {positions[0]} is "
                f"outside the vocabulary 0 to {self._vocabulary - 1}"
            )
        return tokens.astype(np.int32)


class SpeakerEncoder(_Graph):
    """Speaker encoder of a model folder: turns features into an embedding."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / SPEAKER_FILE)

    def __call__(self, features: Features) -> NDArray[np.float32]:
        """Computes the embedding (192,) from features (frames, 80). Raises ModelError if the graph
        fails, or its output has another size, is not finite or is zero.
        """
        embedding = self.run(np.float32, features[np.newaxis])
        if len(embedding) != SPEAKER_SIZE:
            raise ModelError(
                f"{self.path}: returned an embedding of {len(embedding)} values, expected "
                f"{SPEAKER_SIZE}"
            )
        if not np.isfinite(embedding).all():
            raise ModelError(f"{self.path}: returned an embedding with NaN or infinite values")
        if not embedding.any():
            raise ModelError(f"{self.path}: returned an embedding of zeros, which has no direction")
        return embedding


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())

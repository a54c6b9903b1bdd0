"""Small ONNX graphs with the public interface. Tests can compute their outputs from the inputs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx.parser
from numpy.typing import NDArray

TOKENIZER, SPEAKER = "speech_tokenizer_v3.onnx", "campplus.onnx"

# One token for every 4 frames, up to the given length: 50 times the index of the loudest band plus
# 10 times its loudness.
_TOKENIZER = """
<ir_version: 9, opset_import: ["": 17]>
graph (float[1, 128, T] feats, int32[1] feats_length) => (int64[1, N] indices)
<int64[1] zero = {0}, int64[1] time = {2}, float ten = {10}, int64 fifty = {50}, int64 add = {0}> {
    ends = Cast <to = 7> (feats_length)
    heard = Slice (feats, zero, ends, time)
    pooled = AveragePool <kernel_shape = [4], strides = [4], ceil_mode = 1> (heard)
    band = ArgMax <axis = 1, keepdims = 0> (pooled)
    level = ReduceMax <axes = [1], keepdims = 0> (pooled)
    tens = Mul (level, ten)
    floored = Floor (tens)
    steps = Cast <to = 7> (floored)
    coarse = Mul (band, fifty)
    sum = Add (coarse, steps)
    whole = Add (sum, add)
    indices = Cast <to = 7> (whole)
}
"""
# Maximum and minimum of each band, and the mean squares of the first bands.
_SPEAKER = """
<ir_version: 9, opset_import: ["": 17]>
graph (float[B, T, 80] input) => (float[B, 192] output)
<int64[1] zero = {0}, int64[1] one = {1}, int64[1] left = {32}, float scale = {1}> {
    largest = ReduceMax <axes = [1], keepdims = 0> (input)
    smallest = ReduceMin <axes = [1], keepdims = 0> (input)
    squares = Mul (input, input)
    energies = ReduceMean <axes = [1], keepdims = 0> (squares)
    some = Slice (energies, zero, left, one)
    all = Concat <axis = 1> (largest, smallest, some)
    output = Mul (all, scale)
}
"""


def tokenizer(*edits: tuple[str, str]) -> onnx.ModelProto:
    """Returns the graph of tokens, with parts of its text replaced."""
    return _edited(_TOKENIZER, edits)


def tokens_of(features: NDArray[np.floating]) -> NDArray[np.int64]:
    """Computes the output of `tokenizer` for features (128, frames)."""
    pooled = np.stack(
        [features[:, start : start + 4].mean(axis=1) for start in range(0, features.shape[1], 4)],
        axis=1,
    )
    return 50 * pooled.argmax(axis=0) + np.floor(10 * pooled.max(axis=0)).astype(np.int64)


def speaker(*edits: tuple[str, str]) -> onnx.ModelProto:
    """Returns the graph of an embedding, with parts of its text replaced."""
    return _edited(_SPEAKER, edits)


def embedding_of(features: NDArray[np.floating]) -> NDArray[np.floating]:
    """Computes the output of `speaker` for features (frames, 80)."""
    energies = np.square(features).mean(axis=0)
    return np.concatenate([features.max(axis=0), features.min(axis=0), energies[:32]])


def save(model: onnx.ModelProto, path: Path) -> Path:
    path.write_bytes(model.SerializeToString())
    return path


def _edited(text: str, edits: tuple[tuple[str, str], ...]) -> onnx.ModelProto:
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    return onnx.parser.parse_model(text)

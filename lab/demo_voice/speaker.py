"""Speaker embedding: a fixed random projection of the variance and the peak of each mel band.

It is not trained, because the corpus has one voice only. The graph exists because every command
expects its file. Recordings of different rooms and speakers have different embeddings.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from token2wav_voice.features import SPEAKER_BANDS
from token2wav_voice.onnx_models import SPEAKER_SIZE


def save(path: Path) -> None:
    """Writes the graph `campplus.onnx`.

    Its input is a filter bank (1, T, 80) without its mean. Its output is a unit vector (1, 192).
    """
    projection = (
        np.random.default_rng(0)
        .standard_normal((2 * SPEAKER_BANDS, SPEAKER_SIZE))
        .astype(np.float32)
    )
    constants = {
        "time": np.array([1]),
        "projection": projection / np.sqrt(2 * SPEAKER_BANDS).astype(np.float32),
        "floor": np.array(1e-6, np.float32),
    }
    nodes = [
        helper.make_node("Mul", ["input", "input"], ["squares"]),
        helper.make_node("ReduceMean", ["squares", "time"], ["variances"], keepdims=0),
        helper.make_node("ReduceMax", ["squares", "time"], ["peaks"], keepdims=0),
        helper.make_node("Concat", ["variances", "peaks"], ["statistics"], axis=1),
        helper.make_node("Add", ["statistics", "floor"], ["positive"]),
        helper.make_node("Log", ["positive"], ["levels"]),
        helper.make_node("MatMul", ["levels", "projection"], ["projected"]),
        helper.make_node("LpNormalization", ["projected"], ["output"], axis=1, p=2),
    ]
    graph = helper.make_graph(
        nodes,
        "speaker",
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, ["B", "T", SPEAKER_BANDS])],
        [helper.make_tensor_value_info("output", TensorProto.FLOAT, ["B", SPEAKER_SIZE])],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.checker.check_model(model)
    path.write_bytes(model.SerializeToString())

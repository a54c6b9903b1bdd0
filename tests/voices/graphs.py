"""Small ONNX graphs with the public interface. Tests can compute their outputs from the inputs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

TOKENIZER, SPEAKER = "speech_tokenizer_v3.onnx", "campplus.onnx"
OPSET = helper.make_opsetid("", 17)

Shape = list[int | str]


def tokenizer(
    *,
    bands: int = 128,
    rank: int = 3,
    length_type: int = TensorProto.INT32,
    output_type: int = TensorProto.INT64,
    stride: int = 4,
    add: int = 0,
    domain: str = "",
) -> onnx.ModelProto:
    """Returns a graph that computes one token for every 4 frames, up to the given length.

    The token is 50 times the index of the loudest band plus 10 times its loudness.
    """
    shape: Shape = [1, bands, "T"] if rank == 3 else [bands, "T"]
    nodes = [
        helper.make_node("Cast", ["feats_length"], ["ends"], to=TensorProto.INT64),
        helper.make_node("Unsqueeze", ["feats", "zero"], ["batch"])
        if rank == 2
        else _renamed("feats", "batch"),
        helper.make_node("Slice", ["batch", "zero", "ends", "time"], ["heard"]),
        helper.make_node(
            "AveragePool",
            ["heard"],
            ["pooled"],
            kernel_shape=[stride],
            strides=[stride],
            ceil_mode=1,
        ),
        helper.make_node("ArgMax", ["pooled"], ["band"], axis=1, keepdims=0),
        helper.make_node("ReduceMax", ["pooled"], ["level"], axes=[1], keepdims=0),
        helper.make_node("Mul", ["level", "ten"], ["tens"]),
        helper.make_node("Floor", ["tens"], ["floored"]),
        helper.make_node("Cast", ["floored"], ["steps"], to=TensorProto.INT64),
        helper.make_node("Mul", ["band", "fifty"], ["coarse"]),
        helper.make_node("Add", ["coarse", "steps"], ["sum"]),
        helper.make_node("Add", ["sum", "add"], ["whole"]),
        helper.make_node("Cast", ["whole"], ["indices"], to=output_type, domain=domain),
    ]
    return _model(
        nodes,
        inputs={"feats": (TensorProto.FLOAT, shape), "feats_length": (length_type, [1])},
        outputs={"indices": (output_type, [1, "N"])},
        constants={
            "zero": np.array([0]),
            "time": np.array([2]),
            "ten": np.array(10, np.float32),
            "fifty": np.array(50),
            "add": np.array(add),
        },
        domains=[domain] if domain else [],
    )


def tokens_of(features: NDArray[np.floating]) -> NDArray[np.int64]:
    """Computes the output of `tokenizer` for features (128, frames)."""
    pooled = np.stack(
        [features[:, start : start + 4].mean(axis=1) for start in range(0, features.shape[1], 4)],
        axis=1,
    )
    return 50 * pooled.argmax(axis=0) + np.floor(10 * pooled.max(axis=0)).astype(np.int64)


def speaker(*, bands: int = 80, size: int = 192, scale: float = 1.0) -> onnx.ModelProto:
    """Returns a graph that outputs the maximum and minimum of each band, and mean squares.

    The mean squares of the first bands fill the rest of the embedding.
    """
    nodes = [
        helper.make_node("ReduceMax", ["input"], ["largest"], axes=[1], keepdims=0),
        helper.make_node("ReduceMin", ["input"], ["smallest"], axes=[1], keepdims=0),
        helper.make_node("Mul", ["input", "input"], ["squares"]),
        helper.make_node("ReduceMean", ["squares"], ["energies"], axes=[1], keepdims=0),
        helper.make_node("Slice", ["energies", "zero", "left", "one"], ["some"]),
        helper.make_node("Concat", ["largest", "smallest", "some"], ["all"], axis=1),
        helper.make_node("Mul", ["all", "scale"], ["output"]),
    ]
    return _model(
        nodes,
        inputs={"input": (TensorProto.FLOAT, ["B", "T", bands])},
        outputs={"output": (TensorProto.FLOAT, ["B", size])},
        constants={
            "zero": np.array([0]),
            "one": np.array([1]),
            "left": np.array([size - 2 * bands]),
            "scale": np.array(scale, np.float32),
        },
    )


def embedding_of(features: NDArray[np.floating]) -> NDArray[np.floating]:
    """Computes the output of `speaker` for features (frames, 80)."""
    energies = np.square(features).mean(axis=0)
    return np.concatenate([features.max(axis=0), features.min(axis=0), energies[:32]])


def save(model: onnx.ModelProto, path: Path) -> Path:
    path.write_bytes(model.SerializeToString())
    return path


def _renamed(old: str, new: str) -> onnx.NodeProto:
    return helper.make_node("Identity", [old], [new])


def _model(
    nodes: list[onnx.NodeProto],
    inputs: dict[str, tuple[int, Shape]],
    outputs: dict[str, tuple[int, Shape]],
    constants: dict[str, NDArray[np.generic]],
    domains: list[str] | None = None,
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "graph",
        [
            helper.make_tensor_value_info(name, kind, shape)
            for name, (kind, shape) in inputs.items()
        ],
        [
            helper.make_tensor_value_info(name, kind, shape)
            for name, (kind, shape) in outputs.items()
        ],
        [
            onnx.numpy_helper.from_array(np.asarray(value), name)
            for name, value in constants.items()
        ],
    )
    imports = [OPSET, *(helper.make_opsetid(domain, 1) for domain in domains or [])]
    return helper.make_model(graph, opset_imports=imports, ir_version=9)

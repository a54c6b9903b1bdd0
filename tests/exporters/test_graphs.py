"""Exported graphs equal torch at sizes that neither tracing nor the check of an export uses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch

from tests.exporters.rig import Export
from token2wav.assembly import Exportable, exportable
from token2wav.networks.dit import DiT
from token2wav.networks.estimator import CachedStep
from token2wav.published.artifacts import (
    GRAPH_VERSION,
    EngineFolder,
    GraphName,
    Precision,
    fingerprint,
    stage_of,
)
from token2wav_export import ExportError
from token2wav_export.modules import load_module, run_module, sample_inputs
from token2wav_export.onnx_file import bound, check_parity, disagreement, run_onnx
from token2wav_export.signatures import signature

CASES: list[Any] = [
    ("tiny", "step", "float32"),
    ("tiny", "step", "float16"),
    ("tiny", "estimator-streaming", "float32"),
    ("tiny", "vocoder", "float32"),
    pytest.param("tiny", "vocoder-whole", "float32", marks=pytest.mark.slow),
    pytest.param("wide", "step", "float32", marks=pytest.mark.slow),
    pytest.param("wide", "estimator-full", "float32", marks=pytest.mark.slow),
]
SIZES = [(2, 50, 0), (4, 20, 50), (2, 33, 301), (6, 1, 3), (2, 200, 1500)]  # rows, frames, past


@pytest.mark.parametrize(("model", "graph", "precision"), CASES)
def test_a_graph_agrees_with_torch_at_any_size(
    export: Export, models: dict[str, Path], model: str, graph: GraphName, precision: Precision
) -> None:
    path, networks = export(model, graph, precision), exportable(models[model])
    tensors = signature(graph, precision, networks)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    reference = load_module(graph, "float32", networks)
    for seed, (rows, frames, past) in enumerate(SIZES):
        sizes = {"rows": rows, "frames": frames, "past": past}
        inputs = sample_inputs(reference, tensors, sizes, seed)
        outputs = run_onnx(session, inputs)
        assert {name: value.shape for name, value in outputs.items()} == {
            s.name: s.of(sizes) for s in tensors.outputs
        }
        assert [value.dtype.name for value in outputs.values()] == [
            spec.dtype for spec in tensors.outputs
        ]
        assert disagreement(outputs, run_module(reference, inputs), precision) <= bound(
            graph, precision
        ), sizes


def test_a_file_has_metadata_and_named_dimensions(
    export: Export, models: dict[str, Path], engine_folders: dict[str, EngineFolder]
) -> None:
    path = export("tiny", "step", "float32")
    file = engine_folders["tiny"].find("step", "float32", "onnx")
    assert file == path
    model = onnx.load(path, load_external_data=False)
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    assert metadata["graph"] == "step"
    assert metadata["precision"] == "float32"
    assert metadata["graph_version"] == str(GRAPH_VERSION)
    assert metadata["fingerprint"] == fingerprint(models["tiny"], stage_of("step"))
    assert (metadata["opset"], metadata["steps"], metadata["guidance"]) == ("20", "10", "0.7")
    assert model.opset_import[0].version == 20
    shapes = {
        v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim]
        for v in model.graph.input
    }
    assert shapes["x"] == ["rows", 80, "frames"]
    assert shapes["bias"] == ["rows", 1, "frames", "past+frames"]
    assert shapes["past_key_1"] == ["rows", "past", 64]
    assert {"If", "Loop", "NonZero"} & {node.op_type for node in model.graph.node} == set()


def test_a_graph_that_computes_something_else_is_refused(
    export: Export, networks: Exportable
) -> None:
    path = export("tiny", "step", "float32")
    other = load_module("step", "float32", networks)
    assert isinstance(other, CachedStep)
    assert isinstance(other.estimator, DiT)
    other.estimator.proj_out.bias.add_(1e-3)
    with pytest.raises(
        ExportError, match=r"step in float32: ONNX Runtime and torch differ by \d.\de-04"
    ):
        check_parity(path, "step", "float32", signature("step", "float32", networks), other)


def test_outputs_that_are_not_finite_never_agree() -> None:
    nan = torch.full((3,), float("nan"))
    for precision in ("float32", "float16"):
        assert disagreement({"x": nan.numpy()}, {"x": torch.ones(3)}, precision) == float("inf")


def test_convolutions_in_float16_are_40_db_from_float32(networks: Exportable) -> None:
    full, half = (
        load_module("vocoder", precision, networks) for precision in ("float32", "float16")
    )
    inputs = sample_inputs(
        full, signature("vocoder", "float16", networks), {"rows": 2, "frames": 100}
    )
    outputs = {name: output.numpy() for name, output in run_module(half, inputs).items()}
    assert disagreement(outputs, run_module(full, inputs), "float16") < 1e-2

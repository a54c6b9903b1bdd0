"""ONNX file of a module: written from a signature, and compared with torch."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch
from numpy.typing import NDArray
from torch import nn
from torch.export import Dim

from token2wav.published.artifacts import GraphName, Precision, stage_of
from token2wav_export import ExportError
from token2wav_export.modules import Tensors, run_module, sample_inputs
from token2wav_export.signatures import Axis, Signature, Sizes, TensorSpec

Arrays = dict[str, NDArray[np.generic]]  # outputs of a graph, by name

# Sizes of the free dimensions for tracing and for the check. They differ from each other, and none
# is 0 or 1, because torch would treat 0 and 1 as constants.
_TRACED: Sizes = {"rows": 4, "frames": 100, "past": 150}
_CHECKED: Sizes = {"rows": 2, "frames": 60, "past": 110}

# float32: largest error, relative to the largest value or 1. The vocoder has a larger bound,
# because its phases are sines of large numbers. float16: root mean square of the error against
# float32, relative to the root mean square of the values.
FLOAT32_BOUND, VOCODER_FLOAT32_BOUND, FLOAT16_BOUND = 2e-5, 1e-4, 1e-2


def write_onnx(
    module: nn.Module, signature: Signature, path: Path, *, opset: int, metadata: Mapping[str, str]
) -> None:
    """Traces a module into `path` and `path.data`, and checks the result. Raises ExportError if
    torch cannot trace the module with these free dimensions, or the file is not valid.

    Args:
        module: module on the CPU.
        metadata: entries that are kept in the file.
    """
    dynamic_axes = {
        spec.name: {
            index: Dim.DYNAMIC for index, axis in enumerate(spec.shape) if isinstance(axis, Axis)
        }
        or None
        for spec in signature.inputs
    }
    try:
        with torch.no_grad(), _quiet():
            program = torch.onnx.export(
                module,
                kwargs={"inputs": sample_inputs(module, signature, _TRACED)},
                input_names=[spec.name for spec in signature.inputs],
                output_names=[spec.name for spec in signature.outputs],
                dynamic_shapes={"inputs": dynamic_axes},
                opset_version=opset,
                dynamo=True,
                optimize=True,
                verbose=False,
            )
        assert program is not None  # only exports without dynamo return None
        program.save(path, external_data=True)
        _describe(path, signature, metadata)
        onnx.checker.check_model(path, full_check=True)
    except (
        RuntimeError,
        onnx.checker.ValidationError,
        onnx.shape_inference.InferenceError,
    ) as error:
        raise ExportError(
            f"{path.name}: not a valid graph: {' '.join(str(error).split())[:500]}"
        ) from error


def _describe(path: Path, signature: Signature, metadata: Mapping[str, str]) -> None:
    """Names the free dimensions of the file, and adds the metadata. Raises ExportError if the file
    has other dimensions than the signature.
    """
    model = onnx.load(path, load_external_data=False)
    graph = model.graph
    for specs, values in ((signature.inputs, graph.input), (signature.outputs, graph.output)):
        for spec, value in zip(specs, values, strict=True):
            _name_axes(spec, value)
    del graph.value_info[:]  # it has torch's names of dimensions and is not needed
    onnx.helper.set_model_props(model, dict(metadata))
    onnx.save(model, path)


def _name_axes(spec: TensorSpec, value: onnx.ValueInfoProto) -> None:
    dimensions = value.type.tensor_type.shape.dim
    expected = [None if isinstance(axis, Axis) else axis for axis in spec.shape]
    shape = [
        dimension.dim_value if dimension.HasField("dim_value") else None for dimension in dimensions
    ]
    if value.name != spec.name or shape != expected:
        raise ExportError(
            f"output {value.name} has shape {shape}, expected {spec.name} with {expected}"
        )
    for axis, dimension in zip(spec.shape, dimensions, strict=True):
        if isinstance(axis, Axis):
            dimension.dim_param = str(axis)


@contextmanager
def _quiet() -> Iterator[None]:
    """Context that silences torch's messages about packages that the export does not need."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def bound(graph: GraphName, precision: Precision) -> float:
    """Returns the largest accepted `disagreement` of a graph."""
    if precision == "float16":
        return FLOAT16_BOUND
    return FLOAT32_BOUND if stage_of(graph) == "flow" else VOCODER_FLOAT32_BOUND


def disagreement(outputs: Arrays, references: Tensors, precision: Precision) -> float:
    """Returns the largest error of all outputs: the largest relative error for float32, and the
    relative root mean square for float16. Returns infinity if an output is not finite.
    """
    worst = 0.0
    for name, reference in references.items():
        value, expected = outputs[name].astype(np.float64), reference.double().numpy()
        error = np.abs(value - expected)
        if precision == "float16":
            relative = np.sqrt(np.square(error).mean() / np.square(expected).mean())
        else:
            relative = error.max() / max(1.0, np.abs(expected).max())
        worst = max(worst, float(relative) if np.isfinite(relative) else np.inf)
    return worst


def run_onnx(session: onnxruntime.InferenceSession, inputs: Tensors) -> Arrays:
    """Runs a graph and returns its outputs by name."""
    names = [value.name for value in session.get_outputs()]
    outputs = session.run(names, {name: value.numpy() for name, value in inputs.items()})
    return dict(zip(names, outputs, strict=True))


def check_parity(
    path: Path, graph: GraphName, precision: Precision, signature: Signature, reference: nn.Module
) -> float:
    """Compares a graph in ONNX Runtime with its float32 module in torch. Raises ExportError if the
    disagreement is beyond the bound.

    Returns:
        The `disagreement` of the two.
    """
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    inputs = sample_inputs(reference, signature, _CHECKED)
    outputs = run_onnx(session, inputs)
    difference, limit = (
        disagreement(outputs, run_module(reference, inputs), precision),
        bound(graph, precision),
    )
    if difference > limit:
        raise ExportError(
            f"{graph} in {precision}: ONNX Runtime and torch differ by {difference:.1e}, more "
            f"than the bound {limit:.0e}; no artefact was written"
        )
    return difference

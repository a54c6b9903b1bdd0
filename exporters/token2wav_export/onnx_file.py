"""ONNX file of a module: it has the names and free dimensions of a signature, and its weights beside it."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import onnx
import torch
from torch import nn
from torch.export import Dim

from token2wav_export.errors import ExportError
from token2wav_export.modules import sample_inputs
from token2wav_export.signatures import Axis, Signature, Sizes, TensorSpec

# Distinct sizes other than 0 and 1, which torch would take for constants.
_TRACED: Sizes = {"rows": 4, "frames": 100, "past": 150}


def write_onnx(module: nn.Module, signature: Signature, path: Path, *, opset: int, metadata: Mapping[str, str]) -> None:
    """Traces a module into `path` and `path.data`, and checks the result.

    Args:
        module: module on the CPU.
        signature: inputs and outputs of the graph.
        path: file to write.
        opset: version of the ONNX operators.
        metadata: entries that are kept in the file.

    Raises:
        ExportError: torch cannot trace the module with these free dimensions, or the file is not valid.
    """
    free = {
        spec.name: {place: Dim.DYNAMIC for place, axis in enumerate(spec.shape) if isinstance(axis, Axis)} or None
        for spec in signature.inputs
    }
    try:
        with torch.no_grad(), _quiet():
            program = torch.onnx.export(
                module,
                kwargs={"inputs": sample_inputs(module, signature, _TRACED)},
                input_names=[spec.name for spec in signature.inputs],
                output_names=[spec.name for spec in signature.outputs],
                dynamic_shapes={"inputs": free},
                opset_version=opset,
                dynamo=True,
                optimize=True,
                verbose=False,
            )
        assert program is not None  # it is None without dynamo only
        program.save(path, external_data=True)
        _describe(path, signature, metadata)
        onnx.checker.check_model(path, full_check=True)
    except (RuntimeError, onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise ExportError(f"{path.name}: no valid graph: {' '.join(str(error).split())[:500]}") from error


def _describe(path: Path, signature: Signature, metadata: Mapping[str, str]) -> None:
    """Gives free dimensions their names, after a look that no other dimension is free, and adds the metadata."""
    model = onnx.load(path, load_external_data=False)
    graph = model.graph
    for specs, values in ((signature.inputs, graph.input), (signature.outputs, graph.output)):
        for spec, value in zip(specs, values, strict=True):
            _name_axes(spec, value)
    del graph.value_info[:]  # in torch's names for dimensions; nobody needs it
    onnx.helper.set_model_props(model, dict(metadata))
    onnx.save(model, path)


def _name_axes(spec: TensorSpec, value: onnx.ValueInfoProto) -> None:
    dimensions = value.type.tensor_type.shape.dim
    wanted = [None if isinstance(axis, Axis) else axis for axis in spec.shape]
    found = [dimension.dim_value if dimension.HasField("dim_value") else None for dimension in dimensions]
    if value.name != spec.name or found != wanted:
        raise ExportError(f"{value.name} came out with shape {found}, expected {spec.name} with {wanted}")
    for axis, dimension in zip(spec.shape, dimensions, strict=True):
        if isinstance(axis, Axis):
            dimension.dim_param = str(axis)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences torch's remarks on packages that are not needed here."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)

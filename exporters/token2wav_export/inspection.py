"""Inspection of an engine folder: lists its artefacts as text or JSON."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import asdict, dataclass
from typing import TypeVar

import onnx

from token2wav.errors import BackendUnavailableError
from token2wav.published.artifacts import Artifact, EngineFolder
from token2wav_export.engines import own_target, version_of

_Shape = TypeVar("_Shape")
_SHOWN_OPERATORS = 8
_HEAD = (
    f"{'graph':20} {'precision':9} {'backend':12} {'nodes':>6} {'weights MB':>10} {'size MB':>8} "
    f"{'target':21} "
    f"{'created, UTC':16}  state"
)


@dataclass(frozen=True)
class Inspected:
    """Artefact with its contents, and the reason why this machine cannot use it, if any.

    Attributes:
        problem: reason why it cannot be used on this machine; None if it can.
        nodes, operators, inputs, outputs: contents of an ONNX graph; None for engines, which can
            only be opened on their GPU.
        weights: size of an ONNX graph's weights in bytes.
    """

    artifact: Artifact
    problem: str | None
    nodes: int | None = None
    operators: dict[str, int] | None = None
    inputs: dict[str, list[int | str]] | None = None
    outputs: dict[str, list[int | str]] | None = None
    weights: int | None = None


def inspect_folder(engines: EngineFolder) -> list[Inspected]:
    """Inspects all artefacts of a folder.

    Raises:
        ArtifactError: a description is damaged.
        ConfigError, CheckpointError: the model folder cannot be used.
    """
    return [_inspected(engines, artifact) for artifact in engines.artifacts()]


def _inspected(engines: EngineFolder, artifact: Artifact) -> Inspected:
    versions, target, missing = dict[str, str](), dict[str, str](), None
    if artifact.backend != "onnx":
        target = own_target()
        try:
            versions[artifact.backend] = version_of(artifact.backend)
        except BackendUnavailableError as error:
            missing = str(error)
    problem = engines.problem(artifact, versions=versions, target=target) or missing
    path = engines.path / artifact.file
    if artifact.backend != "onnx" or not path.is_file():
        return Inspected(artifact, problem)
    try:
        model = onnx.load(path, load_external_data=False)
    except Exception as error:  # protobuf's classes of errors differ between its implementations
        return Inspected(
            artifact,
            problem or f"{artifact.file} is not an ONNX graph: {' '.join(str(error).split())}",
        )
    return Inspected(
        artifact,
        problem,
        nodes=len(model.graph.node),
        operators=dict(Counter(node.op_type for node in model.graph.node).most_common()),
        inputs={value.name: _shape(value) for value in model.graph.input},
        outputs={value.name: _shape(value) for value in model.graph.output},
        weights=sum(map(_bytes, model.graph.initializer)),
    )


def _shape(value: onnx.ValueInfoProto) -> list[int | str]:
    return [axis.dim_param or axis.dim_value for axis in value.type.tensor_type.shape.dim]


def _bytes(weight: onnx.TensorProto) -> int:
    return math.prod(weight.dims) * onnx.helper.tensor_dtype_to_np_dtype(weight.data_type).itemsize


def as_json(inspections: list[Inspected]) -> str:
    """Formats a JSON list with one object per artefact: the fields of `Inspected`."""
    return json.dumps([asdict(inspection) for inspection in inspections], indent=1)


def as_text(inspections: list[Inspected]) -> str:
    """Formats a table of all artefacts, followed by the contents of each artefact."""
    return "\n".join([_HEAD, *map(_row, inspections), *map(_details, inspections)])


def _row(inspection: Inspected) -> str:
    artifact = inspection.artifact
    target = ",".join(artifact.target.get("compute_capability", ("any",)))
    nodes, weights = (
        ("-", "-")
        if inspection.weights is None
        else (inspection.nodes, f"{inspection.weights / 1e6:.1f}")
    )
    return (
        f"{artifact.graph:20} {artifact.precision:9} {artifact.backend:12} {nodes:>6} "
        f"{weights:>10} "
        f"{artifact.size / 1e6:>8.1f} {target:21} {artifact.created[:16]:16}  "
        f"{'usable' if inspection.problem is None else f'stale: {inspection.problem}'}"
    )


def _details(inspection: Inspected) -> str:
    lines = ["", inspection.artifact.file]
    if inspection.operators is not None:
        shown = [
            f"{count} {name}"
            for name, count in list(inspection.operators.items())[:_SHOWN_OPERATORS]
        ]
        lines.append(f"  operators  {', '.join(shown)}")
    for title, tensors in (("inputs", inspection.inputs), ("outputs", inspection.outputs)):
        for name, shape in _summarised(tensors or {}).items():
            lines.append(f"  {title:10} {name} ({', '.join(map(str, shape))})")
            title = ""
    for number, profile in enumerate(inspection.artifact.profiles):
        lines.append(f"  profile {number}")
        lines += [
            f"    {name:14} {' .. '.join(map(str, shapes))}"
            for name, shapes in _summarised(profile).items()
        ]
    return "\n".join(lines)


def _summarised(tensors: dict[str, _Shape]) -> dict[str, _Shape]:
    """Shortens a list of tensors: layer 0 stands for all layers, because their shapes are equal.

    The same applies to numbered states of a vocoder.
    """
    last = sum(name.rstrip("0123456789").endswith("key_") for name in tensors) - 1
    first = {
        name: shape
        for name, shape in tensors.items()
        if not name[-1].isdigit() or name.endswith("_0")
    }
    return {
        f"{name}..{last}" if name.endswith("_0") and last else name: shape
        for name, shape in first.items()
    }

"""Helpers for the tests of exporters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from testkit.models.golden import TINY
from token2wav.published.artifacts import Artifact, EngineFolder, GraphName, Precision, fingerprint

# Name of a model, name of a graph and precision to the path of the ONNX file.
Export = Callable[[str, GraphName, Precision], Path]

ARTIFACT = Artifact(
    file="graph.onnx",
    graph="step",
    precision="float32",
    backend="onnx",
    fingerprint=fingerprint(TINY, "flow"),
    opset=20,
    schedule={"steps": 10.0, "guidance": 0.7},
    versions={"torch": "2.13.0"},
    target={},
    flags=(),
    profiles=({"x": ((2, 80, 1), (2, 80, 50), (8, 80, 50))},),
    created="2026-01-31T12:00:00+00:00",
    seconds=1.5,
    command="token2wav export onnx --model m",
)


def add(engines: EngineFolder, artifact: Artifact = ARTIFACT, content: bytes = b"graph") -> Path:
    """Adds an artefact with a graph and weights of a few bytes."""
    with engines.staging() as staged:
        (staged / artifact.file).write_bytes(content)
        (staged / f"{artifact.file}.data").write_bytes(b"weights")
        return engines.add(staged, artifact)


def engine(capability: str, version: str = "1.7.1") -> Artifact:
    """Returns an engine for one kind of GPU."""
    return dataclasses.replace(
        ARTIFACT,
        backend="tensorrt_rtx",
        versions={"tensorrt_rtx": version},
        target={"compute_capability": (capability,)},
    )

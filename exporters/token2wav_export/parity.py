"""Parity of a graph with torch: both run once on the CPU, and their outputs are compared."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from torch import nn

from token2wav.execution.artifacts import Graph, Precision
from token2wav_export.errors import ExportError
from token2wav_export.modules import Tensors, run_module, sample_inputs
from token2wav_export.signatures import Signature, Sizes

Arrays = dict[str, NDArray[np.generic]]  # outputs of a graph, by name

# float32: largest error, relative to the largest value or 1. The vocoder's phases are sines of large numbers.
# float16: root mean square of the error against float32, relative to that of the values.
FLOAT32_BOUND, VOCODER_FLOAT32_BOUND, FLOAT16_BOUND = 2e-5, 1e-4, 1e-2
_CHECKED: Sizes = {"rows": 2, "frames": 60, "past": 110}


def bound(graph: Graph, precision: Precision) -> float:
    """Returns the most that `disagreement` may be."""
    if precision == "float16":
        return FLOAT16_BOUND
    return VOCODER_FLOAT32_BOUND if graph.startswith("vocoder") else FLOAT32_BOUND


def disagreement(outputs: Arrays, references: Tensors, precision: Precision) -> float:
    """Measures the worst of all outputs, in the measure of the precision; infinite where something is not finite."""
    worst = 0.0
    for name, reference in references.items():
        value, wanted = outputs[name].astype(np.float64), reference.double().numpy()
        error = np.abs(value - wanted)
        if precision == "float16":
            relative = np.sqrt(np.square(error).mean() / np.square(wanted).mean())
        else:
            relative = error.max() / max(1.0, np.abs(wanted).max())
        worst = max(worst, float(relative) if np.isfinite(relative) else np.inf)
    return worst


def run_onnx(session: onnxruntime.InferenceSession, inputs: Tensors) -> Arrays:
    """Runs a graph."""
    names = [value.name for value in session.get_outputs()]
    found = session.run(names, {name: value.numpy() for name, value in inputs.items()})
    return dict(zip(names, found, strict=True))


def check_parity(path: Path, graph: Graph, precision: Precision, signature: Signature, reference: nn.Module) -> float:
    """Runs a graph with ONNX Runtime and its module in float32 with torch.

    Returns:
        Their disagreement.

    Raises:
        ExportError: it is beyond the bound.
    """
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    inputs = sample_inputs(reference, signature, _CHECKED)
    outputs = run_onnx(session, inputs)
    found, allowed = disagreement(outputs, run_module(reference, inputs), precision), bound(graph, precision)
    if found > allowed:
        raise ExportError(
            f"{graph} in {precision}: ONNX Runtime and torch disagree by {found:.1e}, allowed is {allowed:.0e}; "
            "nothing was added"
        )
    return found

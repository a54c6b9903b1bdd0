"""Export of a model of the public full size: it measures time, memory and disk, with random weights and no GPU.

Every export runs in a process of its own, so that its peak memory is its own. Everything is made in a temporary folder
of about 4 GB (TMPDIR chooses where). Prints a line for each; writes JSON.

    .venv/bin/python -m benchmarks.export_full
"""

from __future__ import annotations

import multiprocessing
import resource
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.environment import describe, save
from benchmarks.models import model_folder
from token2wav.config import StreamConfig
from token2wav.execution.artifacts import Backend, EngineFolder, Graph, Precision
from token2wav_export.inspection import inspect_folder
from token2wav_export.making import Maker
from token2wav_export.packages import load_package
from token2wav_export.profiles import Load

Job = tuple[Graph, Precision, Backend]
JOBS: list[Job] = [
    ("step", "float32", "onnx"),
    ("step", "float16", "onnx"),
    ("estimator-streaming", "float16", "onnx"),
    ("vocoder", "float32", "onnx"),
    ("step", "float16", "tensorrt_rtx"),
]


def run_job(folder: Path, job: Job) -> dict[str, Any]:
    """Makes one artefact and reports time and memory."""
    graph, precision, backend = job
    engines = EngineFolder.of(folder)
    maker = Maker(folder, engines, ["benchmarks.export_full"])
    if backend == "onnx":
        maker.onnx(graph, precision)
    else:
        maker.tensorrt(graph, precision, load_package("tensorrt_rtx"), Load(StreamConfig(), 4, 32.0), [])
    made = inspect_folder(engines, folder)[-1]
    return {
        "graph": graph,
        "precision": precision,
        "backend": backend,
        "seconds": made.artifact.seconds,
        "peak_memory_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "size_mb": round(made.artifact.size / 1e6, 1),
        "nodes": made.nodes,
        "profiles": len(made.artifact.profiles),
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as parent:
        folder, results = model_folder(Path(parent), "full"), []
        with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
            for job in JOBS:
                results.append(pool.apply(run_job, (folder, job)))
                print(results[-1], flush=True)
    environment = describe("onnx", "onnxscript", "onnxruntime", "tensorrt_rtx_cu13")
    save("export_full", {"environment": environment, "exports": results})


if __name__ == "__main__":
    main()

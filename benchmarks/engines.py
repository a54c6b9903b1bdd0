"""Comparison of all engines of this host on the same chunks: error against torch, and time.

The reference is torch in float32. Each engine runs in its own process, one after the other, so that
no engine takes cores or memory from another. For an engine that cannot run, the reason is printed.
Prints a line for each measurement; writes JSON.

    .venv/bin/python -m benchmarks.engines
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.chunk_batch import chunk
from benchmarks.environment import describe, save
from benchmarks.gpu.settings import LeftOut
from testkit.models.sized import SIZES, model_folder
from token2wav import RuntimeConfig, StreamConfig, Token2Wav
from token2wav.errors import Token2WavError
from token2wav.execution.cuda_graphs import SWITCH
from token2wav.exported.artifacts import EngineFolder
from token2wav_export.engines import load_package
from token2wav_export.making import Maker
from token2wav_export.profiles import Load
from token2wav_export.verify import verify

HOPS = (25, 100)
LOAD = Load(StreamConfig(), max_streams=4, history_seconds=32.0)
REPEATS = 7


@dataclass(frozen=True)
class Case:
    """Case to measure: an engine, its precision, and whether it uses CUDA graphs."""

    engine: str
    precision: str
    graphs: bool = True

    @property
    def label(self) -> str:
        return f"{self.engine} {self.precision}{'' if self.graphs else ', no graphs'}"


CPU_CASES = [Case("torch", "float32"), Case("onnx", "float32")]
CUDA_CASES = [
    Case("torch", "float32", graphs=False),
    Case("torch", "float16", graphs=False),
    Case("torch", "float32"),
    Case("torch", "float16"),
    Case("onnx", "float16"),
    Case("tensorrt", "float16", graphs=False),
    Case("tensorrt", "float16"),
]


@dataclass
class Result:
    """Results of one case on one model; `problem` is the reason if there are none."""

    model: str
    case: Case
    rows: list[dict[str, Any]] = field(default_factory=list)
    verification: dict[str, Any] | None = None
    problem: str | None = None


def run_case(job: tuple[Path, str, Case, str, list[int], list[float]]) -> Result:
    """Exports the engines of a case and measures the case."""
    folder, size, case, device, batches, histories = job
    os.environ[SWITCH] = "1" if case.graphs else "0"
    result = Result(size, case)
    runtime = RuntimeConfig(device=device, backend=case.engine, precision=case.precision)  # type: ignore[arg-type]
    try:
        export(folder, case)
        result.verification = asdict(verify(folder, runtime, seconds=6.0))
        release(device)
        model = Token2Wav.load(folder, runtime=runtime)
        for streams, spoken_s in product(batches, histories):
            for hop in HOPS if spoken_s else HOPS[:1]:
                result.rows.append(chunk(model, REPEATS, streams, hop, spoken_s))
    except (LeftOut, Token2WavError, RuntimeError) as error:
        result.problem = " ".join(str(error).split())[:300]
    return result


def release(device: str) -> None:
    """Frees the GPU memory of deleted models.

    The size of the next model's cache is a share of the free memory.
    """
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()


def export(folder: Path, case: Case) -> None:
    maker = Maker(folder, EngineFolder.of(folder), ["benchmarks.engines"])
    made = {
        (artifact.graph, artifact.precision, artifact.backend)
        for artifact in EngineFolder.of(folder).artifacts()
    }
    if case.engine == "onnx":
        for graph, precision in (("step", case.precision), ("vocoder", "float32")):
            if (graph, precision, "onnx") not in made:
                maker.onnx(graph, precision)  # type: ignore[arg-type]
    if case.engine == "tensorrt" and not any(
        backend.startswith("tensorrt") for _, _, backend in made
    ):
        maker.tensorrt("step", case.precision, load_package("auto"), LOAD, [])  # type: ignore[arg-type]


def lines(result: Result) -> Iterator[str]:
    name = f"{result.model:6} {result.case.label:27}"
    if result.problem:
        yield f"{name} did not run: {result.problem}"
    if result.verification:
        verdict = "; ".join(result.verification["failures"]) or "within all bounds"
        yield f"{name} mel {result.verification['mel_db']:.0f} dB from torch in float32: {verdict}"
    for row in result.rows:
        yield (
            f"{name} {row['history_s']:5g} s {row['hop_tokens']:4} tokens {row['streams']:3} "
            f"streams "
            f"flow {row['flow_ms'][0]:8.1f} ms  vocoder {row['vocoder_ms'][0]:8.1f} ms"
        )


def run(device: str, sizes: list[str], batches: list[int], histories: list[float]) -> list[Result]:
    """Measures every case of a device, and prints each result at once."""
    cases = CUDA_CASES if device.startswith("cuda") else CPU_CASES
    results = []
    with tempfile.TemporaryDirectory() as temporary:
        folders = {size: model_folder(Path(temporary), size) for size in sizes}
        jobs = [
            (folders[size], size, case, device, batches, histories)
            for size in sizes
            for case in cases
        ]
        with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as processes:
            for result in processes.imap(run_case, jobs):
                results.append(result)
                print(*lines(result), sep="\n", flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--sizes", nargs="+", choices=[*SIZES, "full"], default=list(SIZES))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4])
    parser.add_argument(
        "--histories",
        type=float,
        nargs="+",
        default=[0, 10, 30],
        help="seconds of audio before the measured chunk",
    )
    parser.add_argument("--name", default="engines", help="name of the result files")
    options = parser.parse_args()
    results = run(options.device, options.sizes, options.batches, options.histories)
    save(
        options.name, {**describe("onnxruntime"), "results": [asdict(result) for result in results]}
    )


if __name__ == "__main__":
    main()

"""Section engines: ONNX graphs and TensorRT engines made, compared with torch, captured and timed.

`make tensorrt-check` runs this section alone, in a container of NVIDIA with TensorRT. TensorRT-RTX
also builds on a machine without a GPU; all that runs an engine is left out there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Literal
from unittest.mock import patch

from benchmarks.chunk_batch import chunk, chunk_key
from benchmarks.gpu.chunks import load
from benchmarks.gpu.settings import LeftOut, Row, Rows, Settings
from token2wav import StreamConfig, Token2Wav
from token2wav.errors import BackendUnavailableError
from token2wav.execution.cuda_graphs import SWITCH
from token2wav.published.artifacts import EngineFolder, Precision
from token2wav_export.engines import load_package, version_of
from token2wav_export.making import Maker
from token2wav_export.profiles import ProfileLoad
from token2wav_export.verify import verify

_LOAD = ProfileLoad(StreamConfig(), max_streams=4, history_seconds=36.0)  # of a TensorRT engine
_STREAMS = (1, 4)
_VERIFIED_S = 6.0


@dataclass(frozen=True)
class Case:
    """A backend in a precision, with or without CUDA graphs."""

    backend: Literal["torch", "onnx", "tensorrt"]
    precision: Precision
    graphs: bool = True

    @property
    def label(self) -> str:
        return f"{self.backend} {self.precision}{'' if self.graphs else ' without graphs'}"


_CPU_CASES = [Case("torch", "float32"), Case("onnx", "float32"), Case("tensorrt", "float16")]
_GPU_CASES = [
    Case("torch", "float32", graphs=False),
    Case("torch", "float16"),
    Case("onnx", "float16"),
    Case("tensorrt", "float16", graphs=False),
    Case("tensorrt", "float16"),
]


def engines(folder: Path, settings: Settings) -> Rows:
    """Makes graphs and engines, then verifies and times each case."""
    cases = _GPU_CASES if settings.on_gpu else _CPU_CASES
    maker = Maker(EngineFolder(folder), ["benchmarks.gpu.engines"])
    precision = next(case.precision for case in cases if case.backend == "onnx")
    graphs = {f"ONNX step {precision}": partial(maker.onnx, "step", precision)}
    graphs["ONNX vocoder float32"] = partial(maker.onnx, "vocoder", "float32")
    for name, make in graphs.items():
        yield name, partial(_made, make)
    yield "TensorRT step float16", partial(_built, maker)
    for case in cases:
        models = list[Token2Wav]()
        yield f"{case.label}: verified", partial(_verified, folder, settings, case)
        load_model = partial(_loaded, folder, settings, case, models)
        loaded = yield f"{case.label}: the model", load_model
        for streams, spoken_s, hop in product(_STREAMS, settings.histories, settings.hops):
            yield (
                f"{case.label}: {chunk_key(streams, hop, spoken_s)}",
                partial(_timed, models, load_model, loaded, settings, streams, hop, spoken_s),
            )


def _made(make: Callable[[], Path]) -> Row:
    files = list(make().parent.iterdir())
    return {"mib": round(sum(path.stat().st_size for path in files) / 2**20, 1)}


def _built(maker: Maker) -> Row:
    try:
        package = load_package("auto")
    except BackendUnavailableError as error:
        raise LeftOut(str(error)) from None
    row = _made(partial(maker.tensorrt, "step", "float16", package, _LOAD, []))
    return {"package": package, "version": version_of(package)} | row


def _verified(folder: Path, settings: Settings, case: Case) -> Row:
    """Compares streams with torch in float32; errors beyond the bounds are problems."""
    _check_device(settings, case)
    with patch.dict(os.environ, {SWITCH: str(int(case.graphs))}):
        runtime = settings.runtime(backend=case.backend, precision=case.precision)
        report = verify(folder, runtime, _VERIFIED_S)
    figures = json.loads(report.as_json())
    problem = "; ".join(report.failures) or None
    return {name: figures[name] for name in ("mel_db", "vocoder_max")} | {"problem": problem}


def _loaded(folder: Path, settings: Settings, case: Case, models: list[Token2Wav]) -> Row:
    _check_device(settings, case)
    with patch.dict(os.environ, {SWITCH: str(int(case.graphs))}):
        model, row = load(folder, settings, backend=case.backend, precision=case.precision)
    models.append(model)
    return row


def _timed(
    models: list[Token2Wav],
    load_model: Callable[[], Row],
    loaded: Row,
    settings: Settings,
    streams: int,
    hop: int,
    spoken_s: float,
) -> Row:
    if "load_s" not in loaded:
        raise LeftOut("the model was not loaded")
    if not models:  # another process, which has ended, measured the row of the model
        load_model()
    return chunk(models[0], settings.repeats, streams, hop, spoken_s, settings.repeat_s)


def _check_device(settings: Settings, case: Case) -> None:
    if case.backend == "tensorrt" and not settings.on_gpu:
        raise LeftOut("TensorRT runs engines only on a GPU")

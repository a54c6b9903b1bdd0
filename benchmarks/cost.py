"""Cost of computing audio on this machine, without a server.

    stream      time of each chunk by its position in a stream: from the cache, from the cache with
                a window, and with the whole history recomputed
    engines     time of a batch of chunks on each engine of this host, and its error against torch
    throughput  seconds of audio that a second computes, for flows of their published sizes

    .venv/bin/python -m benchmarks.cost stream --models small --seconds 10 120
    .venv/bin/python -m benchmarks.cost engines --device cuda
    .venv/bin/python -m benchmarks.cost throughput --families CosyVoice3

Each command prints a line for each measurement, and writes JSON into benchmarks/results.
`benchmarks.family_table` reads the throughput.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.chunk_batch import chunk
from benchmarks.environment import describe, run_command, save, saved_runs
from benchmarks.gpu.settings import LeftOut
from benchmarks.load.subject import CHOICES, model_folder
from testkit.models.random_weights import fill
from testkit.models.sized import SIZES, a_voice, public_configs
from testkit.models.sized import model_folder as sized_folder
from token2wav import RuntimeConfig, StreamConfig, Token2Wav
from token2wav.assembly import Assembly, family_for
from token2wav.backends import LoadContext
from token2wav.config.model_config import ModelConfig, StageName
from token2wav.errors import Token2WavError
from token2wav.execution.cuda_graphs import SWITCH
from token2wav.layers.streaming import WaveformNetwork
from token2wav.published.artifacts import EngineFolder

# A stream

MODES: dict[str, StreamConfig] = {
    "incremental": StreamConfig(first_tokens=0),
    "incremental, left_blocks=8": StreamConfig(first_tokens=0, left_blocks=8),
    "recompute": StreamConfig(reference=True),
}
_WARM_UP_TOKENS = 128  # have every length of a chunk


@dataclass
class Run:
    """Run of one stream.

    Attributes:
        position_s: end of every chunk in the utterance.
        flow_s, vocoder_s: time of every chunk in the flow and in the vocoder.
        rss_mib: memory of the process after every chunk, without the loaded model.
        peak_mib: largest memory, also within chunks.
    """

    model: str
    mode: str
    seconds: int
    position_s: list[float] = field(default_factory=list)
    flow_s: list[float] = field(default_factory=list)
    vocoder_s: list[float] = field(default_factory=list)
    rss_mib: list[float] = field(default_factory=list)
    peak_mib: float = 0.0

    def __str__(self) -> str:
        last_ms = 1000 * (self.flow_s[-2] + self.vocoder_s[-2])  # the last chunk is shorter
        return (
            f"{self.model:13} {self.mode:27} {self.seconds:5} s of audio: flow "
            f"{sum(self.flow_s):.2f} s, vocoder {sum(self.vocoder_s):.2f} s, last chunk "
            f"{last_ms:.0f} ms, peak {self.peak_mib:.0f} MiB"
        )


def run_stream(job: tuple[Path, str, str, int]) -> Run:
    """Synthesizes random tokens, pushed one second at a time, in a process of its own."""
    folder, name, mode, seconds = job
    model = Token2Wav.load(folder, stream=MODES[mode])
    voice, rate = a_voice(model.config), model.config.token_frame_rate
    tokens = model.config.tokens.draw(round(rate * seconds), np.random.default_rng(0))
    model.synthesize(tokens[:_WARM_UP_TOKENS], voice)  # also caches the prompt
    before, run, samples = rss_mib(), Run(name, mode, seconds), 0
    flow_s, vocoder_s = timed(model.pipeline.flow), timed(model.pipeline.vocoder)
    with model.stream(voice) as stream:
        for batch in [*np.array_split(tokens, seconds), None]:
            for part in stream.finish() if batch is None else stream.push(batch):
                samples += len(part.audio)
                run.position_s.append(round(samples / model.config.sample_rate, 2))
                run.rss_mib.append(round(rss_mib() - before, 1))
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    run.peak_mib = round(peak_mib - before, 1)
    run.flow_s = [round(value, 5) for value in flow_s]
    run.vocoder_s = [round(value, 5) for value in vocoder_s]
    return run


def rss_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def timed(engine: Any) -> list[float]:
    """Returns a list to which every later call of the engine's `advance` adds its seconds."""
    seconds, advance = list[float](), engine.advance

    def measured(batch: Any) -> Any:
        start = time.perf_counter()
        result = advance(batch)
        seconds.append(time.perf_counter() - start)
        return result

    engine.advance = measured
    return seconds


def in_processes(function: Any, jobs: list[Any]) -> Iterator[Any]:
    """Runs jobs one after the other, each in a process of its own.

    So the peak memory is of one job alone, and no job takes cores or memory from another.
    """
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as processes:
        for result in processes.imap(function, jobs):
            print(result, flush=True)
            yield result


def add_stream_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", default=list(SIZES), help=CHOICES)
    parser.add_argument(
        "--seconds",
        type=int,
        nargs="+",
        default=[10, 30, 60, 120],
        help="seconds of audio of each stream",
    )
    parser.add_argument(
        "--modes", nargs="+", choices=MODES, default=list(MODES), metavar="MODE", help=str([*MODES])
    )


def stream(options: argparse.Namespace) -> None:
    if min(options.seconds) < 1:
        raise ValueError("--seconds: must be at least 1 second")
    with tempfile.TemporaryDirectory() as temporary:
        folders = {name: model_folder(name, Path(temporary)) for name in options.models}
        jobs = [
            (folders[name], name, mode, seconds)
            for name, seconds, mode in product(folders, options.seconds, options.modes)
        ]
        runs = [asdict(run) for run in in_processes(run_stream, jobs)]
    save(options.name, {"environment": describe(), "runs": runs})


# Engines

HOPS = (25, 100)
MAX_STREAMS, HISTORY_S = 4, 32.0  # of a TensorRT engine
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

    def __str__(self) -> str:
        name, lines = f"{self.model:6} {self.case.label:27}", list[str]()
        if self.problem:
            lines.append(f"{name} did not run: {self.problem}")
        if self.verification:
            verdict = "; ".join(self.verification["failures"]) or "within all bounds"
            mel_db = self.verification["mel_db"]
            lines.append(f"{name} mel {mel_db:.0f} dB from torch in float32: {verdict}")
        lines += [
            f"{name} {row['history_s']:5g} s {row['hop_tokens']:4} tokens {row['streams']:3} "
            f"streams flow {row['flow_ms'][0]:8.1f} ms  vocoder {row['vocoder_ms'][0]:8.1f} ms"
            for row in self.rows
        ]
        return "\n".join(lines)


def run_case(job: tuple[Path, str, Case, str, list[int], list[float]]) -> Result:
    """Exports the engines of a case, verifies them against torch in float32, and times chunks."""
    from token2wav_export.verify import verify  # needs packages that the other commands do not

    folder, size, case, device, batches, histories = job
    os.environ[SWITCH] = "1" if case.graphs else "0"
    result = Result(size, case)
    runtime = RuntimeConfig(device=device, backend=case.engine, precision=case.precision)  # type: ignore[arg-type]
    try:
        export(folder, case)
        result.verification = json.loads(verify(folder, runtime, seconds=6.0).as_json())
        if device.startswith("cuda"):  # the next cache takes a share of the free memory
            torch.cuda.empty_cache()
        model = Token2Wav.load(folder, runtime=runtime)
        for streams, spoken_s in product(batches, histories):
            for hop in HOPS if spoken_s else HOPS[:1]:
                result.rows.append(chunk(model, REPEATS, streams, hop, spoken_s))
    except (LeftOut, Token2WavError, RuntimeError) as error:
        result.problem = " ".join(str(error).split())[:300]
    return result


def export(folder: Path, case: Case) -> None:
    """Makes the graphs and engines of a case that the folder has not yet."""
    from token2wav_export.engines import load_package
    from token2wav_export.making import Maker
    from token2wav_export.profiles import ProfileLoad

    maker = Maker(folder, EngineFolder.of(folder), ["benchmarks.cost"])
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
        load = ProfileLoad(StreamConfig(), max_streams=MAX_STREAMS, history_seconds=HISTORY_S)
        maker.tensorrt("step", case.precision, load_package("auto"), load, [])  # type: ignore[arg-type]


def add_engine_options(parser: argparse.ArgumentParser) -> None:
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


def engines(options: argparse.Namespace) -> None:
    cases = CUDA_CASES if options.device.startswith("cuda") else CPU_CASES
    with tempfile.TemporaryDirectory() as temporary:
        folders = {size: sized_folder(Path(temporary), size) for size in options.sizes}
        jobs = [
            (folders[size], size, case, options.device, options.batches, options.histories)
            for size, case in product(folders, cases)
        ]
        results = [asdict(result) for result in in_processes(run_case, jobs)]
    save(options.name, {**describe("onnxruntime"), "results": results})


# Throughput

_STREAMS = (1, 4)
_REPEATS, _LONGEST_S = 3, 60


def random_network(folder: Path, config: ModelConfig, stage: StageName) -> Any:
    """Makes the network of a stage with random weights, in place of `load_network`."""
    network: Any = fill(family_for(config).network(config, stage))
    if isinstance(network, WaveformNetwork):
        network.freeze()
    return network.eval().requires_grad_(False)


def random_model(config: ModelConfig) -> Token2Wav:
    """Makes a model with random weights on the CPU. Its chunks have about a second of audio."""
    block = config.block_tokens
    hop = block * max(1, round(config.token_frame_rate / block))
    streams = StreamConfig(first_tokens=0, max_hop_tokens=max(hop, config.hops(StreamConfig())[0]))
    context = LoadContext(Path("no folder"), RuntimeConfig("cpu", "torch"), torch.device("cpu"))
    with patch("token2wav.assembly.load_network", random_network):
        return Token2Wav(config, Assembly(context, config, streams).stages(), streams)


@torch.inference_mode()
def throughput_of(model: Token2Wav, streams: int) -> dict[str, Any]:
    """Times chunks of streams of one voice in one batch; the first chunk does not count."""
    config, pipeline = model.config, model.pipeline
    voice, random = a_voice(config), np.random.default_rng(0)
    requests = [pipeline.utterance(voice) for _ in range(streams)]
    for request in requests:
        pipeline.open(request)
    rates: list[float] = []
    end = time.perf_counter() + _LONGEST_S
    while len(rates) < 2 or (len(rates) <= _REPEATS and time.perf_counter() < end):
        while requests[0].chunker.next_chunk is None:
            tokens = config.tokens.draw(1, random)
            for request in requests:
                request.chunker.push(tokens)
        seconds = requests[0].chunker.next_tokens / config.token_frame_rate
        begin = time.perf_counter()
        for part in pipeline.advance(requests):
            if isinstance(part, Exception):
                raise part
        rates.append(streams * seconds / (time.perf_counter() - begin))
        for request in requests:
            request.chunker.finish_chunk()
    for request in requests:
        pipeline.close(request)
    figures = (statistics.median(rates[1:]), min(rates[1:]), max(rates[1:]))
    return {
        "streams": streams,
        "chunk_seconds": round(seconds, 2),
        "audio_seconds_per_second": [round(rate, 3) for rate in figures],
    }


def add_throughput_options(parser: argparse.ArgumentParser) -> None:
    families = list(public_configs())
    parser.add_argument(
        "--families",
        nargs="+",
        choices=families,
        default=families,
        metavar="NAME",
        help=str(families),
    )


def throughput(options: argparse.Namespace) -> None:
    configs, runs = public_configs(), saved_runs(options.name)
    for family in options.families:
        model = random_model(configs[family])
        rows = [throughput_of(model, streams) for streams in _STREAMS]
        print(family, rows, flush=True)
        runs = [run for run in runs if run["family"] != family]
        runs.append({"family": family, "environment": describe(), "rows": rows})
        save(options.name, {"runs": runs})


# Options, function and result of each command.
COMMANDS = {
    "stream": (add_stream_options, stream, "streaming_cost"),
    "engines": (add_engine_options, engines, "engines"),
    "throughput": (add_throughput_options, throughput, "flow_throughput"),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.cost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run_command(parser, COMMANDS)


if __name__ == "__main__":
    main()

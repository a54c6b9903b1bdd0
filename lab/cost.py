"""Cost of computing audio on this machine, without a server.

    stream      time of each chunk by its position in a stream: from the cache, from the cache with
                a window, and with the whole history recomputed
    throughput  seconds of audio that a second computes, for flows of their published sizes

    .venv/bin/python -m lab.cost stream --models small --seconds 10 120
    .venv/bin/python -m lab.cost throughput --families CosyVoice3

Each command prints a line for each measurement, and writes JSON into benchmarks/results.
`scripts.family_table` reads the throughput.
"""

from __future__ import annotations

import argparse
import multiprocessing
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

from benchmarks.chunk_batch import next_audio, requests_in
from benchmarks.environment import describe, run_command, save, saved_runs
from benchmarks.load.subject import CHOICES, model_folder
from testkit.models.random_weights import fill
from testkit.models.sized import SIZES, a_voice, public_configs
from token2wav import RuntimeConfig, StreamConfig, Token2Wav
from token2wav.assembly import Assembly, family_for
from token2wav.backends import LoadContext
from token2wav.config.model_config import ModelConfig, StageName
from token2wav.execution.device import keep_freed_memory
from token2wav.networks.waveform_network import WaveformNetwork

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
    device = torch.device("cpu")
    context = LoadContext(Path("no folder"), RuntimeConfig("cpu", "torch"), device)
    with patch("token2wav.assembly.load_network", random_network):
        stages = Assembly(context, config, streams).stages()
    keep_freed_memory(device)  # as in a server
    return Token2Wav(config, stages, streams)


@torch.inference_mode()
def throughput_of(model: Token2Wav, streams: int) -> dict[str, Any]:
    """Times chunks of streams of one voice in one batch; the first chunk does not count."""
    config, random = model.config, np.random.default_rng(0)
    rates: list[float] = []
    end = time.perf_counter() + _LONGEST_S
    with requests_in(model, a_voice(config), streams) as requests:
        while len(rates) < 2 or (len(rates) <= _REPEATS and time.perf_counter() < end):
            while requests[0].chunker.next_chunk is None:
                tokens = config.tokens.draw(1, random)
                for request in requests:
                    request.chunker.push(tokens)
            seconds = requests[0].chunker.next_tokens / config.token_frame_rate
            begin = time.perf_counter()
            next_audio(model, requests)
            rates.append(streams * seconds / (time.perf_counter() - begin))
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


def main() -> None:
    # Options, function and result of each command.
    run_command(
        {
            "stream": (add_stream_options, stream, "streaming_cost"),
            "throughput": (add_throughput_options, throughput, "flow_throughput"),
        }
    )


if __name__ == "__main__":
    main()

"""Gain of batches and workers: first audio, gaps and throughput of a server, by batching mode.

Starts real tritonservers on the same model, one after the other: with batching, without, with one
worker, and the ensemble. Each server gets the same loads: N clients in a closed loop, which send
tokens at the pace of a language model (25 a second) or as fast as the server accepts them. First
audio counts from the request that made the first chunk possible, so it is the time of the server
alone. `token2wav bench` measures a single server.

Prints a line for each load; writes JSON and a plot.

    .venv/bin/python -m benchmarks.serving_load
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import yaml

from benchmarks.environment import RESULTS, ROOT, describe, save, save_picture
from benchmarks.gpu.settings import PACE
from testkit.models.sized import SIZES, chosen_model
from token2wav_client import Client, ClientError, ClientVoice, token_source
from token2wav_client.audio import SAMPLE_RATE
from token2wav_client.listening import stalls
from token2wav_client.listening import summary as quantiles
from token2wav_client.stats import ChunkTiming
from token2wav_server import Ports, TritonServer

mpl.use("Agg")
from matplotlib import pyplot as plt

DEMO = ROOT / "tests" / "data" / "demo"

# Changes of the server's settings, and the name of the served model.
MODES: dict[str, tuple[dict[str, dict[str, int]], str]] = {
    "batching": ({}, "token2wav"),
    "batching, one lane": ({"runtime": {"workers": 1}}, "token2wav"),
    "no batching": ({"limits": {"batch_streams": 1}}, "token2wav"),
    "no batching, one lane": (
        {"limits": {"batch_streams": 1}, "runtime": {"workers": 1}},
        "token2wav",
    ),
    "ensemble": ({}, "token2wav_ensemble"),
}
GAPS_S = (0.05, 0.1, 0.2)
AT_ONCE = 1e6
CLIENTS_PER_PROCESS = 64  # a quarter of a core: a client takes 3 to 6 ms of CPU time a second


@dataclass(frozen=True)
class Load:
    """Load that clients generate in a closed loop."""

    clients: int
    rate: float  # tokens per second
    starts_s: float = 1.0  # seconds in which the clients begin, one after the other

    @property
    def label(self) -> str:
        return f"{self.clients} clients, {'25 tokens/s' if self.rate == PACE else 'unpaced'}"


@dataclass(frozen=True)
class Heard:
    """Utterance as heard: first audio, longest gap and audio in seconds, and the error if any."""

    first_s: float
    gap_s: float
    audio_s: float
    error: str | None = None


@dataclass(frozen=True)
class Utterances:
    """Utterances to synthesize, all alike: the demo's tokens in its voice."""

    seconds: float  # duration of each utterance
    tokens_per_request: int
    buffer_s: float  # seconds of audio that a player buffers before it starts
    model: str = "token2wav"

    def speak(self, url: str, rate: float) -> Heard:
        voice = ClientVoice.load(DEMO / "voice.safetensors")
        tokens = np.resize(np.load(DEMO / "tokens.npy"), round(PACE * self.seconds))
        try:
            with Client(url, model=self.model) as client:
                portions = token_source.batches([tokens.tolist()], self.tokens_per_request)
                spoken = client.synthesize(token_source.paced(portions, rate), voice)
                chunks = [ChunkTiming.of(chunk) for chunk in spoken]
        except ClientError as error:
            return Heard(0.0, 0.0, 0.0, str(error))
        audio_s = sum(chunk.samples for chunk in chunks) / SAMPLE_RATE
        gap_s = max(
            stalls(
                [chunk.arrival_s for chunk in chunks],
                [chunk.duration_s for chunk in chunks],
                self.buffer_s,
            ),
            default=0.0,
        )
        return Heard(chunks[0].latency_s, gap_s, audio_s)


def run_load(
    url: str, load: Load, utterances: Utterances, seconds: float
) -> tuple[list[Heard], float]:
    """Runs a load. Many clients are spread over processes, because threads share one core.

    Returns:
        All utterances as heard, and the time until the last one ended.
    """
    delays = np.linspace(0, load.starts_s, load.clients, endpoint=False)
    count = -(-load.clients // CLIENTS_PER_PROCESS)
    parts = [delays[part::count] for part in range(count)]
    if count == 1:
        start = time.monotonic()
        heard = _run_clients(url, load.rate, utterances, seconds, start, delays)
        return heard, time.monotonic() - start
    # gRPC does not work in a process that was forked. All processes read the same clock.
    context = get_context("spawn")
    with ProcessPoolExecutor(count, context, _begin, (context.Barrier(count),)) as pool:
        list(pool.map(time.sleep, [0.0] * count))  # ends when all processes have begun
        start = time.monotonic() + 0.5
        run = partial(_run_clients, url, load.rate, utterances, seconds, start)
        heard = [utterance for part in pool.map(run, parts) for utterance in part]
        return heard, time.monotonic() - start


def _begin(barrier: Barrier) -> None:
    """Waits until all processes of the pool have begun, because a late one would begin its clients
    late.
    """
    barrier.wait()


def _run_clients(
    url: str,
    rate: float,
    utterances: Utterances,
    seconds: float,
    start: float,
    delays: np.ndarray,
) -> list[Heard]:
    """Runs the clients of one process, which begin at `start` and a delay each, in seconds."""

    def client(delay: float) -> list[Heard]:
        heard: list[Heard] = []
        time.sleep(max(0.0, start + delay - time.monotonic()))
        while time.monotonic() < start + seconds:
            heard.append(utterances.speak(url, rate))
        return heard

    with ThreadPoolExecutor(len(delays)) as pool:
        return [utterance for heard in pool.map(client, delays) for utterance in heard]


def batch_sizes(metrics: str) -> dict[str, float]:
    """Reads the histogram of batch sizes: counts by upper bound, and their sum.

    For an ensemble, the histogram is of the flow model.
    """
    counts = {
        bound: float(value)
        for bound, value in re.findall(
            r'token2wav_batch_streams_bucket\{(?:model="flow",)?le="([^"]+)"\} (\S+)', metrics
        )
    }
    for name in ("sum", "count"):
        values = re.findall(
            rf'token2wav_batch_streams_{name}(?:\{{model="flow"\}})? (\S+)', metrics
        )
        counts[name] = sum(map(float, values))
    return counts


def row(
    mode: str, load: Load, heard: list[Heard], seconds: float, batches: dict[str, float]
) -> dict[str, Any]:
    good = [utterance for utterance in heard if utterance.error is None]
    return {
        "mode": mode,
        "load": load.label,
        **asdict(load),
        "utterances": len(good),
        "failed": sorted({utterance.error for utterance in heard if utterance.error}),
        "first_audio_ms": quantiles(
            [1000 * utterance.first_s for utterance in good] or [float("nan")]
        ),
        "share_without_gaps": {f"{gap:g} s": share(good, gap) for gap in GAPS_S},
        "audio_seconds_per_second": round(
            sum(utterance.audio_s for utterance in good) / seconds, 2
        ),
        "mean_batch": round(batches["sum"] / batches["count"], 2) if batches["count"] else None,
        "batches": batches,
    }


def share(heard: list[Heard], gap: float) -> float:
    return round(sum(utterance.gap_s <= gap for utterance in heard) / max(1, len(heard)), 3)


def as_line(result: dict[str, Any]) -> str:
    first, gaps = result["first_audio_ms"], result["share_without_gaps"]
    return (
        f"{result['mode']:21} {result['load']:28} {result['utterances']:4} utterances, first audio "
        f"{first['p50']:6.0f} {first['p90']:6.0f} {first['p99']:6.0f} ms, without gaps "
        f"{gaps['0.1 s']:5.0%}, "
        f"{result['audio_seconds_per_second']:5.1f} s/s, batches of {result['mean_batch']}"
    )


def measure(
    folder: Path,
    mode: str,
    loads: Iterable[Load],
    options: argparse.Namespace,
    common: Mapping[str, Mapping[str, Any]] | None = None,
) -> Iterator[dict[str, Any]]:
    """Yields a row for each load on one server; a load starts when its row is requested.

    Args:
        mode: key of `MODES`. The server's settings of the mode override `common`.
        options: command-line options of utterances and time.
        common: settings of the server in all modes.
    """
    changes, model = MODES[mode]
    limits = {"player_buffer_seconds": options.buffer_seconds}
    layers: list[Mapping[str, Mapping[str, Any]]] = [{"limits": limits}, common or {}, changes]
    parts = dict.fromkeys(part for layer in layers for part in layer)
    settings = {
        part: {key: value for layer in layers for key, value in layer.get(part, {}).items()}
        for part in parts
    }
    utterances = Utterances(
        options.utterance_seconds, options.tokens_per_request, options.buffer_seconds, model
    )
    with tempfile.TemporaryDirectory() as temporary:
        config = Path(temporary) / "server.yaml"
        config.write_text(yaml.safe_dump(settings))
        with TritonServer(
            folder,
            config=config,
            models=[model],
            ports=Ports.free(),
            verbose=False,
        ) as server:
            utterances.speak(server.grpc_url, AT_ONCE)  # caches the prompt of the voice
            for load in loads:
                before = batch_sizes(scrape(server.metrics_url))
                heard, seconds = run_load(server.grpc_url, load, utterances, options.seconds)
                after = batch_sizes(scrape(server.metrics_url))
                batches = {name: count - before.get(name, 0.0) for name, count in after.items()}
                yield row(mode, load, heard, seconds, batches)


def scrape(url: str) -> str:
    with urllib.request.urlopen(f"http://{url}/metrics", timeout=5) as response:
        text: str = response.read().decode()
    return text


def plot(rows: list[dict[str, Any]], path: Path, title: str) -> None:
    """Draws first audio, throughput and continuity over the number of clients.

    The upper row is for paced tokens, the lower row for unpaced tokens.
    """
    figure, axes = plt.subplots(2, 3, figsize=(14, 7), layout="constrained", sharex=True)
    paces = {PACE: "25 tokens/s", AT_ONCE: "unpaced"}
    for (rate, pace), (first, audio, continuity) in zip(paces.items(), axes, strict=True):
        for mode in dict.fromkeys(row["mode"] for row in rows):
            mode_rows = [row for row in rows if row["mode"] == mode and row["rate"] == rate]
            clients = [row["clients"] for row in mode_rows]
            [line] = first.plot(
                clients, [row["first_audio_ms"]["p50"] for row in mode_rows], marker="o", label=mode
            )
            first.plot(
                clients,
                [row["first_audio_ms"]["p99"] for row in mode_rows],
                "--",
                marker="^",
                color=line.get_color(),
            )
            audio.plot(clients, [row["audio_seconds_per_second"] for row in mode_rows], marker="o")
            continuity.plot(
                clients, [row["share_without_gaps"]["0.1 s"] for row in mode_rows], marker="o"
            )
        first.set_yscale("log")
        first.set_ylabel(f"{pace}\nfirst audio after its tokens (ms)\nsolid p50, dashed p99")
        audio.set_ylabel("audio per second (s)")
        continuity.set_ylabel("utterances without a gap over 0.1 s")
        for axis in (audio, continuity):
            axis.set_ylim(bottom=0)
    for axis in axes[-1]:
        axis.set_xlabel("clients")
    figure.legend(
        *axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=9
    )
    figure.suptitle(title, fontsize=10)
    save_picture(figure, path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model",
        default="tiny",
        help=f"model folder, or a size for a model with random weights: {', '.join(SIZES)}",
    )
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), metavar="MODE")
    parser.add_argument(
        "--clients",
        type=int,
        nargs="+",
        default=[1, 2, 4, 8, 16, 32],
        help="numbers of clients",
    )
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="seconds in which a load starts utterances"
    )
    parser.add_argument("--utterance-seconds", type=float, default=8.0)
    parser.add_argument("--tokens-per-request", type=int, default=5)
    parser.add_argument(
        "--buffer-seconds",
        type=float,
        default=0.5,
        help="seconds that a player waits after the first audio",
    )
    parser.add_argument("--name", default="serving_load", help="name of the result files")
    options = parser.parse_args()
    rates = (PACE, AT_ONCE)
    loads = [Load(clients, rate) for rate in rates for clients in options.clients]
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = chosen_model(Path(temporary), options.model)
        for mode in options.modes:
            for result in measure(folder, mode, loads, options):
                rows.append(result)
                print(as_line(result), flush=True)
    facts = describe()
    save(options.name, {**facts, "model": options.model, "rows": rows})
    plot(rows, RESULTS / f"{options.name}.png", f"{options.model} model, {facts['cpus']} CPU cores")


if __name__ == "__main__":
    main()

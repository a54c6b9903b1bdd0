"""Latency of the server under concurrent streams, as their listeners see it.

Starts a real tritonserver, opens N streams at once that send tokens at the pace of a language model, and measures every
chunk at the client. Prints JSON and draws a plot; both go to benchmarks/results/.

    .venv/bin/python -m benchmarks.streams --streams 1 2 4 8
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from numpy.typing import NDArray

from benchmarks.environment import RESULTS, ROOT, describe, save
from token2wav_client import Client, ClientVoice
from token2wav_client.stats import ChunkTiming, UtteranceStats, summarize
from token2wav_server import Ports, TritonServer

mpl.use("Agg")
from matplotlib import pyplot as plt

DEMO = ROOT / "tests" / "data" / "demo"


def paced(tokens: NDArray[np.int32], rate: float, per_request: int) -> Iterator[NDArray[np.int32]]:
    """Tokens as a language model emits them: batch k is there once all its tokens are."""
    start = time.monotonic()
    for at in range(0, len(tokens), per_request):
        batch = tokens[at : at + per_request]
        time.sleep(max(0.0, start + (at + len(batch)) / rate - time.monotonic()))
        yield batch


def one_stream(url: str, voice: ClientVoice, tokens: NDArray[np.int32], options: argparse.Namespace) -> UtteranceStats:
    with Client(url) as client:
        batches = paced(tokens, options.rate, options.tokens_per_request)
        return summarize([ChunkTiming.of(chunk) for chunk in client.synthesize(batches, voice)])


def measure(url: str, streams: int, options: argparse.Namespace) -> dict[str, Any]:
    """`rounds` times, `streams` utterances at once, their starts spread over one second."""
    voice, tokens = ClientVoice.load(DEMO / "voice.safetensors"), np.load(DEMO / "tokens.npy")

    def delayed(delay: float) -> UtteranceStats:
        time.sleep(delay)
        return one_stream(url, voice, tokens, options)

    results: list[UtteranceStats] = []
    with ThreadPoolExecutor(streams) as pool:
        for _ in range(options.rounds):
            results += pool.map(delayed, np.linspace(0, 1, streams, endpoint=False))
    return {
        "streams": streams,
        "utterances": len(results),
        "first_chunk_latency_ms": percentiles([stats.chunks[0].latency_s for stats in results]),
        "chunk_latency_ms": percentiles([chunk.latency_s for stats in results for chunk in stats.chunks]),
        "utterances_with_underruns": sum(stats.underruns > 0 for stats in results),
    }


def percentiles(seconds: list[float]) -> dict[str, float]:
    return {f"p{q}": round(float(np.percentile(seconds, q)) * 1000, 1) for q in (5, 50, 95, 99)}


def plot(rows: list[dict[str, Any]], path: Path, title: str) -> None:
    """Median and 5th to 95th percentile of both latencies over the number of streams."""
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    streams = [row["streams"] for row in rows]
    for key, label in (("first_chunk_latency_ms", "first chunk"), ("chunk_latency_ms", "all chunks")):
        axes.plot(streams, [row[key]["p50"] for row in rows], marker="o", label=f"{label}, median")
        axes.fill_between(
            streams, [row[key]["p5"] for row in rows], [row[key]["p95"] for row in rows], alpha=0.2, label="p5 to p95"
        )
    axes.set_xlabel("concurrent streams")
    axes.set_xticks(streams)
    axes.set_ylabel("latency at the client (ms)")
    axes.set_ylim(bottom=0)
    axes.set_title(title, fontsize=10)
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "tests" / "data" / "tiny", help="model folder to serve")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--rounds", type=int, default=5, help="utterances of each stream")
    parser.add_argument("--rate", type=float, default=25.0, help="tokens per second")
    parser.add_argument("--tokens-per-request", type=int, default=1)
    parser.add_argument("--name", default="streams", help="of the result files")
    options = parser.parse_args()
    with TritonServer(options.model, ports=Ports.free(), verbose=False) as server:
        measure(server.grpc_url, 1, argparse.Namespace(**(vars(options) | {"rounds": 1, "rate": 1e6})))  # warm-up
        rows = [measure(server.grpc_url, streams, options) for streams in options.streams]
    facts = describe() | {"model": options.model.name}
    save(options.name, {"environment": facts, "rows": rows})
    title = f"{facts['model']} model, {facts['cpus']} CPU cores, {options.rate:g} tokens/s a stream"
    plot(rows, RESULTS / f"{options.name}.png", title)
    print(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()

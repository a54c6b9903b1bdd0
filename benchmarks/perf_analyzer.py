"""Load test with NVIDIA's perf_analyzer, beside our own benchmark under the same loads.

Starts a real tritonserver, or uses a running one. The real perf_analyzer sends whole utterances
over streaming gRPC at several concurrencies, and at several request rates, evenly spaced and at
random (Poisson). The figures of listeners are computed from its profile export. Then the client of
serving_load runs the same loads, except for evenly spaced ones. Prints the estimated duration, the
load in progress and a line of figures for each load; writes JSON. docs/benchmarking.md explains the
figures.

    .venv/bin/python -m benchmarks.perf_analyzer
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.environment import ROOT, describe
from benchmarks.models import SIZES, chosen_model
from benchmarks.perf_export import ExportError, read_export, stripped, summary
from benchmarks.serving_load import AT_ONCE, DEMO, Load, Utterances, run_load
from token2wav.config import load_server_config
from token2wav_client import cli
from token2wav_client.listening import summary as quantiles
from token2wav_server import Ports, ServerError, TritonServer

PERF_ANALYZER = ROOT / "scripts" / "perf_analyzer.sh"
OUT = ROOT / "out" / "perf"
_WHOLE = 1 << 30  # tokens in a request: more than any utterance has
_START_S = 60.0
QUICK: dict[str, Any] = {
    "concurrency": [1, 4],
    "rates": [1.0],
    "distributions": ["poisson"],
    "requests": 6,
    "seconds": 3.0,
}


class PerfError(Exception):
    """Failure of perf_analyzer under a load."""


@dataclass(frozen=True)
class PerfLoad:
    """Load that perf_analyzer generates: a number of open requests, or of requests per second."""

    concurrency: int = 0
    rate: float = 0.0  # requests per second
    distribution: str = ""  # distribution of the times between requests

    @property
    def label(self) -> str:
        return (
            f"{self.concurrency} at once"
            if self.concurrency
            else f"{self.rate:g} per second, {self.distribution}"
        )

    @property
    def options(self) -> list[str]:
        """Returns the options for a run with one load.

        Each load has its own run, because perf_analyzer's exports are large, and a failed request
        ends a run.
        """
        if self.concurrency:
            return ["--concurrency-range", str(self.concurrency)]
        # Without an end, perf_analyzer takes 1 as the end of a range that starts below 1.
        return [
            "--request-rate-range",
            f"{self.rate:g}:{self.rate:g}",
            "--request-distribution",
            self.distribution,
        ]

    @property
    def own(self) -> Load | None:
        """Returns the same load for serving_load's client, or None for an evenly spaced load."""
        return (
            None if self.distribution == "constant" else Load(self.concurrency, self.rate, AT_ONCE)
        )

    def seconds(self, requests: int, alone_s: float) -> float:
        """Estimates the time of one load for both clients together, in seconds.

        Args:
            alone_s: time of one utterance without other load.
        """
        once = requests / self.rate if self.rate else requests * alone_s
        return once * (1 if self.own is None else 2)


def run_perf_analyzer(
    url: str, data: Path, load: PerfLoad, requests: int, patience_s: float
) -> tuple[bytes, dict[str, Any]]:
    """Runs perf_analyzer under one load, on data of `token2wav perf-data`.

    Returns:
        The profile export without the values of tensors, and the figures of perf_analyzer's own
            report.

    Raises:
        PerfError: perf_analyzer failed, or was not done after `patience_s`.
    """
    with tempfile.TemporaryDirectory() as temporary:
        export, report = Path(temporary) / "export.json", Path(temporary) / "report.csv"
        command: list[str | Path] = [
            PERF_ANALYZER,
            *f"-m token2wav -u {url} -i grpc --async --streaming".split(),
        ]
        # perf_analyzer rejects a request count smaller than the requests of one second.
        count = max(requests, math.ceil(load.rate))
        command += ["--input-data", data, *load.options, "--request-count", str(count)]
        command += ["--profile-export-file", export, "-f", report]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=patience_s, check=False
            )
        except subprocess.TimeoutExpired:
            # perf_analyzer waits without end for a server that died.
            raise PerfError(
                f"{load.label}: perf_analyzer did not finish within {patience_s:.0f} s"
            ) from None
        if done.returncode:
            raise PerfError(
                f"{load.label}: perf_analyzer ended with {done.returncode}: {_reason(done.stderr)}"
            )
        return stripped(export), own_figures(report)


def _reason(output: str) -> str:
    """Returns the error message in the output of perf_analyzer.

    After a wrong option, hundreds of lines of help come before the message.
    """
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line.lower()[:25]), " ".join(lines[-3:]))


def own_figures(report: Path) -> dict[str, Any]:
    """Reads perf_analyzer's CSV: latencies in ms, requests per second."""
    with report.open(newline="") as file:
        [row] = csv.DictReader(file)
    latency = {f"p{q}": round(float(row[f"p{q} latency"]) / 1000, 1) for q in (50, 90, 99)}
    return {"latency_ms": latency, "requests_per_second": round(float(row["Inferences/Second"]), 3)}


def run_own(url: str, load: Load, utterances: Utterances, seconds: float) -> dict[str, Any]:
    """Measures the same figures with serving_load's client, as far as the client has them."""
    heard, took_s = run_load(url, load, utterances, seconds)
    good = [utterance for utterance in heard if utterance.error is None]
    return {
        "utterances": len(good),
        "failed": sorted({utterance.error for utterance in heard if utterance.error}),
        "first_audio_ms": quantiles([1000 * utterance.first_s for utterance in good]),
        "share_without_underrun": round(
            sum(utterance.gap_s == 0 for utterance in good) / max(1, len(good)), 3
        ),
        "audio_seconds_per_second": round(sum(utterance.audio_s for utterance in good) / took_s, 2),
    }


def measure(
    url: str,
    load: PerfLoad,
    options: argparse.Namespace,
    buffer_s: float,
    data: Path,
    alone_s: float,
) -> dict[str, Any]:
    """Runs perf_analyzer and then our own client under one load.

    `alone_s` is the time of one utterance without other load.
    """
    row: dict[str, Any] = {"load": load.label, **asdict(load), "failed": None}
    patience_s = _START_S + 5 * options.requests * max(alone_s, 1 / load.rate if load.rate else 0.0)
    try:
        export, figures = run_perf_analyzer(url, data, load, options.requests, patience_s)
        path = OUT / "exports" / f"{load.label.replace(', ', '_').replace(' ', '_')}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(export)
        heard = read_export(path)
    except (PerfError, ExportError) as error:
        return {**row, "failed": str(error)}
    row |= {"perf_analyzer": figures, "heard": summary(heard, buffer_s), "own": {}}
    if load.own is not None:
        last = heard[-1]
        # The time to the last request, because run_own also waits for open utterances at its end.
        seconds = last.sent_s - heard[0].sent_s
        row["own"] = run_own(
            url, load.own, Utterances(options.seconds, _WHOLE, buffer_s), max(seconds, 1.0)
        )
    return row


def as_line(row: dict[str, Any]) -> str:
    if row["failed"]:
        return row["failed"]
    heard, client = row["heard"], row["own"]
    line = (
        f"{row['load']:24} {heard['utterances']:4} utterances, first audio "
        f"{_three(heard['first_audio_ms'])} ms, "
        f"gaps {_three(heard['gap_ms'])} ms, {heard['underruns']} underruns, "
        f"real-time factor {heard['real_time_factor']['p50']:.3f}, "
        f"{heard['audio_seconds_per_second']:.1f} s/s"
    )
    if not client:
        return line
    shares = (
        f"{client['share_without_underrun']:.0%} without underruns, "
        f"{client['audio_seconds_per_second']:.1f} s/s"
    )
    ours = (
        f"{client['utterances']:4} utterances, "
        f"first audio {_three(client['first_audio_ms'])} ms, {shares}"
    )
    return f"{line}\n{'  our client':24} {ours}"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} minutes"


def _three(values: dict[str, float] | None) -> str:
    return (
        "-" if values is None else "/".join(f"{values[name]:.0f}" for name in ("p50", "p90", "p99"))
    )


@contextlib.contextmanager
def server(options: argparse.Namespace) -> Iterator[str]:
    """Yields host:port of the server to measure."""
    if options.url:
        yield options.url
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = chosen_model(Path(temporary), options.model)
        OUT.mkdir(parents=True, exist_ok=True)
        log = OUT / "server.log"
        with TritonServer(
            folder, config=options.config, ports=Ports.free(), log_file=log
        ) as started:
            yield started.grpc_url


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--url",
        metavar="HOST:PORT",
        help="gRPC address of a running server; a server is started if this is absent",
    )
    where.add_argument(
        "--model",
        default="tests/data/tiny",
        help=f"model folder, or a size for a model with random weights: {', '.join(SIZES)}",
    )
    parser.add_argument(
        "--config",
        help="settings file of the server, which also sets the player's buffer; give it for a "
        "running server too",
    )
    parser.add_argument("--concurrency", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument(
        "--rates", type=float, nargs="*", default=[0.5, 1.0], help="requests per second"
    )
    parser.add_argument(
        "--distributions",
        nargs="+",
        choices=("constant", "poisson"),
        default=["constant", "poisson"],
    )
    parser.add_argument(
        "--requests",
        type=int,
        default=30,
        help="number of utterances of each load (default: %(default)s)",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=8.0,
        help="seconds of audio in each utterance (default: %(default)g)",
    )
    parser.add_argument(
        "--out", type=Path, default=OUT, help="folder of the reports (default: out/perf)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="run fewer loads and utterances, for about a minute"
    )
    options = parser.parse_args()
    if options.quick:
        parser.set_defaults(**QUICK)  # given options override the defaults of --quick
        options = parser.parse_args()
    buffer_s = load_server_config(
        Path(options.config) if options.config else None
    ).limits.player_buffer_seconds
    loads = [PerfLoad(concurrency=concurrency) for concurrency in options.concurrency]
    loads += [
        PerfLoad(rate=rate, distribution=kind)
        for kind in options.distributions
        for rate in options.rates
    ]
    rows = []
    try:
        with server(options) as url, tempfile.TemporaryDirectory() as temporary:
            data = Path(temporary) / "data.json"
            files = [
                "--tokens",
                str(DEMO / "tokens.npy"),
                "--voice",
                str(DEMO / "voice.safetensors"),
            ]
            if status := cli.perf_data(
                [*files, "--out", str(data), "--seconds", str(options.seconds)]
            ):
                return status
            for _ in range(2):  # the first utterance registers the voice and computes its prompt
                began = time.monotonic()
                first = Utterances(options.seconds, _WHOLE, buffer_s).speak(url, AT_ONCE)
                alone_s = time.monotonic() - began
                if first.error:
                    raise PerfError(f"the first utterance failed: {first.error}")
            expected_s = [load.seconds(options.requests, alone_s) for load in loads]
            many = f"{len(loads)} loads of {options.requests} utterances of {options.seconds:g} s"
            print(f"{many}, about {_duration(sum(expected_s))}", flush=True)
            for number, (load, seconds) in enumerate(zip(loads, expected_s, strict=True), start=1):
                print(
                    f"[{number}/{len(loads)}] {load.label}, about {_duration(seconds)}", flush=True
                )
                rows.append(measure(url, load, options, buffer_s, data, alone_s))
                print(as_line(rows[-1]), flush=True)
    except (ServerError, PerfError) as error:
        print(f"perf_analyzer: {error}", file=sys.stderr)
        return 1
    facts = {
        **describe(),
        "model": options.url or options.model,
        "seconds": options.seconds,
        "buffer_s": buffer_s,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    written = options.out / "perf_analyzer.json"
    written.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")
    print(written)
    return 1 if any(row["failed"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())

"""Closed loop: each of N clients begins its next utterance when the last one has ended.

Clients send tokens at the pace of a language model, or as fast as the server accepts them. Modes
change the settings of the server, so that you see the gain of batches and workers.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Generator, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml

from benchmarks.environment import describe, save
from benchmarks.load.listener import Heard, from_server, hear, milliseconds, quantiles
from benchmarks.load.subject import CHOICES, Subject, model_folder
from testkit.rigs.metrics import scrape
from token2wav.config import LimitConfig
from token2wav_client import AsyncClient
from token2wav_client.listening import stalls
from token2wav_server import Ports, TritonServer

Settings = Mapping[str, Mapping[str, Any]]

# Changes of the server's settings, and the name of the served model.
MODES: dict[str, tuple[Settings, str]] = {
    "batching": ({}, "token2wav"),
    "batching, one worker": ({"runtime": {"workers": 1}}, "token2wav"),
    "no batching": ({"limits": {"batch_streams": 1}}, "token2wav"),
    "no batching, one worker": (
        {"limits": {"batch_streams": 1}, "runtime": {"workers": 1}},
        "token2wav",
    ),
    "ensemble": ({}, "token2wav_ensemble"),
}
GAPS_S = (0.05, 0.1, 0.2)
CLIENTS_PER_PROCESS = 64  # a quarter of a core: a client takes 3 to 6 ms of CPU time a second


@dataclass(frozen=True)
class Load:
    """Load that clients generate."""

    clients: int
    rate: float  # tokens per second of each client; 0 sends all tokens of an utterance at once
    starts_s: float = 1.0  # seconds in which the clients begin, one after the other
    seconds: float = 20.0  # time in which clients begin utterances
    portion: int = 5  # tokens of a message
    buffer_s: float = 0.5  # seconds of audio that a player collects before it starts

    @property
    def label(self) -> str:
        return f"{self.clients} clients, {f'{self.rate:g} tokens/s' if self.rate else 'unpaced'}"


@dataclass(frozen=True)
class Target:
    """Model on a running server, and the utterance of all clients."""

    url: str
    model: str
    subject: Subject

    async def speak(self, load: Load) -> Heard:
        async with AsyncClient(self.url, model=self.model) as client:
            say = partial(from_server, client, self.subject, load.portion, load.rate)
            return await hear(say, self.subject.audio_s)


def run_load(target: Target, load: Load) -> tuple[list[Heard], float]:
    """Runs a load. Many clients are spread over processes, because a process uses one core.

    Returns:
        All utterances as heard, and the time until the last one ended.
    """
    delays = np.linspace(0, load.starts_s, load.clients, endpoint=False)
    count = -(-load.clients // CLIENTS_PER_PROCESS)
    parts = [delays[part::count] for part in range(count)]
    # gRPC does not work in a process that was forked. All processes read the same clock.
    context = get_context("spawn")
    with ProcessPoolExecutor(count, context, _begin, (context.Barrier(count),)) as pool:
        list(pool.map(time.sleep, [0.0] * count))  # ends when all processes have begun
        start = time.monotonic() + 0.5
        run = partial(_run_clients, target, load, start)
        heard = [utterance for part in pool.map(run, parts) for utterance in part]
        return heard, time.monotonic() - start


def _begin(barrier: Barrier) -> None:
    """Waits until all processes of the pool have begun, and have imported this module, because a
    late one would begin its clients late.
    """
    barrier.wait()


def _run_clients(
    target: Target, load: Load, start: float, delays: npt.NDArray[np.float64]
) -> list[Heard]:
    """Runs the clients of one process, which begin at `start` and a delay each, in seconds."""

    async def client(delay: float) -> list[Heard]:
        heard: list[Heard] = []
        await asyncio.sleep(start + delay - time.monotonic())
        while time.monotonic() < start + load.seconds:
            heard.append(await target.speak(load))
        return heard

    async def clients() -> list[list[Heard]]:
        return await asyncio.gather(*map(client, delays.tolist()))

    return [utterance for heard in asyncio.run(clients()) for utterance in heard]


def batch_sizes(url: str) -> dict[str, float]:
    """Reads the sum and the number of batch sizes. For an ensemble, they are of the flow model."""
    metrics = scrape(url)
    return {
        name: sum(
            metrics.get(f"token2wav_batch_streams_{name}{model}", 0.0)
            for model in ("", '{model="flow"}')
        )
        for name in ("sum", "count")
    }


def row(
    mode: str, load: Load, heard: list[Heard], seconds: float, batches: dict[str, float]
) -> dict[str, Any]:
    recordings = [utterance.recording for utterance in heard]
    complete = [recording for recording in recordings if recording.complete]
    gaps_s = [
        max(stalls(recording.arrivals_s, recording.durations_s, load.buffer_s), default=0.0)
        for recording in complete
    ]
    shares = {
        f"{gap_s:g} s": round(sum(gap <= gap_s for gap in gaps_s) / max(1, len(gaps_s)), 3)
        for gap_s in GAPS_S
    }
    errors = {
        recording.error or "incomplete audio" for recording in recordings if not recording.complete
    }
    return {
        "mode": mode,
        "load": load.label,
        **asdict(load),
        "utterances": len(complete),
        "failed": sorted(errors),
        "first_audio_ms": milliseconds(utterance.after_tokens_s for utterance in heard),
        "first_playable_ms": milliseconds(recording.first_playable_s for recording in complete),
        "share_without_gaps": shares,
        "audio_seconds_per_second": round(
            sum(recording.audio_s for recording in complete) / seconds, 2
        ),
        "mean_batch": round(batches["sum"] / batches["count"], 2) if batches["count"] else None,
    }


def as_line(result: dict[str, Any]) -> str:
    first = quantiles(result["first_audio_ms"], "p50", "p90", "p99")
    return (
        f"{result['mode']:23} {result['load']:28} {result['utterances']:4} utterances, first audio "
        f"after its tokens {first} ms, without gaps {result['share_without_gaps']['0.1 s']:5.0%}, "
        f"{result['audio_seconds_per_second']:5.1f} s/s, batches of {result['mean_batch']}"
    )


def measure(
    folder: Path, mode: str, loads: Iterable[Load], subject: Subject, settings: Settings
) -> Generator[dict[str, Any], None, None]:
    """Yields a row for each load on one server; a load starts when its row is requested.

    Args:
        mode: key of `MODES`. The settings of the mode replace the same ones in `settings`.
    """
    changes, model = MODES[mode]
    merged: dict[str, dict[str, Any]] = {}
    for part, values in (*settings.items(), *changes.items()):
        merged[part] = {**merged.get(part, {}), **values}
    with tempfile.TemporaryDirectory() as temporary:
        config = Path(temporary) / "server.yaml"
        config.write_text(yaml.safe_dump(merged))
        with TritonServer(
            folder, config=config, models=[model], ports=Ports.free(), verbose=False
        ) as server:
            target = Target(server.grpc_url, model, subject)
            asyncio.run(target.speak(Load(1, 0.0)))  # caches the prompt of the voice
            for load in loads:
                before = batch_sizes(server.metrics_url)
                heard, seconds = run_load(target, load)
                after = batch_sizes(server.metrics_url)
                batches = {name: count - before[name] for name, count in after.items()}
                yield row(mode, load, heard, seconds, batches)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="tiny", help=CHOICES)
    parser.add_argument(
        "--modes",
        nargs="+",
        choices=MODES,
        default=["batching"],
        metavar="MODE",
        help=str([*MODES]),
    )
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument(
        "--speeds",
        type=float,
        nargs="+",
        default=[1.0, 0.0],
        help="paces of the tokens, as multiples of speech; 0 sends all tokens at once",
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="in which utterances start")
    parser.add_argument("--utterance-seconds", type=float, default=8.0)
    parser.add_argument("--portion-seconds", type=float, default=0.2, help="audio of a message")
    parser.add_argument(
        "--buffer-seconds",
        type=float,
        default=0.5,
        help="seconds that a player waits after the first audio",
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings of the server")


def main(options: argparse.Namespace) -> None:
    settings = yaml.safe_load(options.config.read_text()) if options.config else {}
    # The health checks of the launcher need streams too.
    streams = max(LimitConfig().streams, max(options.clients) + 8)
    limits = {"player_buffer_seconds": options.buffer_seconds, "streams": streams}
    settings["limits"] = {**limits, **settings.get("limits", {})}
    facts, rows = describe(), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as temporary:
        folder = model_folder(options.model, Path(temporary))
        subject = Subject.of(folder, options.utterance_seconds)
        loads = [
            Load(
                clients,
                speed * subject.config.token_frame_rate,
                seconds=options.seconds,
                portion=subject.portion_tokens(options.portion_seconds),
                buffer_s=options.buffer_seconds,
            )
            for speed in options.speeds
            for clients in options.clients
        ]
        for mode in options.modes:
            for result in measure(folder, mode, loads, subject, settings):
                rows.append(result)
                print(as_line(result), flush=True)
    save(options.name, {**facts, "model": options.model, "rows": rows})

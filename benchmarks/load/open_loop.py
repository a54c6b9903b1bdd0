"""Open loop: utterances start at random times (Poisson), even if the server falls behind.

Their tokens arrive faster than speech, as a language model sends them. With a gateway, clients send
text, and a language model server answers the gateway with stored tokens. All programs share the
cores. The rate rises until an utterance has a gap or is incomplete.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.environment import describe, save
from benchmarks.load.gateway import gateway
from benchmarks.load.listener import (
    Heard,
    Speak,
    from_gateway,
    from_server,
    hear,
    milliseconds,
    quantiles,
)
from benchmarks.load.subject import LABELS, Subject, model_folder
from token2wav_client import AsyncClient
from token2wav_client.listening import THRESHOLDS_MS, buffered, continuity
from token2wav_server import Ports, TritonServer

_LEAST_RATE = 0.125  # utterances per second; a model with gaps at this rate gets no lower one
_LEAST_UTTERANCES = 6  # that are expected at a rate, which lengthens the runs of low rates
_LAG_S = 0.01  # largest lag of the clients with which figures of a rate are good


async def run_rate(speak: Speak, audio_s: float, rate: float, seconds: float) -> list[Heard]:
    """Starts utterances at random times for some seconds, and waits until all have ended."""
    gaps = np.random.default_rng(0).exponential(1 / rate, max(1, round(2 * rate * seconds)))
    starts = [at for at in np.cumsum(gaps).tolist() if at < seconds] or [0.0]
    began = time.monotonic()

    async def start(at: float) -> Heard:
        await asyncio.sleep(began + at - time.monotonic())
        return await hear(speak, audio_s, at, time.monotonic() - began - at)

    return list(await asyncio.gather(*[start(at) for at in starts]))


def row(model: str, rate: float, heard: list[Heard]) -> dict[str, Any]:
    """Computes the figures of a rate."""
    recordings = [utterance.recording for utterance in heard]
    complete = [recording for recording in recordings if recording.complete]
    return {
        "model": model,
        "utterances_per_s": rate,
        "utterances": len(heard),
        "complete": len(complete),
        "errors": sorted({recording.error for recording in recordings if recording.error}),
        "first_playable_ms": milliseconds(recording.first_playable_s for recording in complete),
        "first_audible_ms": milliseconds(recording.first_audible_s for recording in complete),
        "leading_silence_ms": milliseconds(recording.leading_silence_s for recording in complete),
        "gap_free_start_ms": milliseconds(recording.gap_free_start_s for recording in complete),
        "scheduling_lag_ms": milliseconds(utterance.lag_s for utterance in heard),
        "underrun_utterances": sum(bool(recording.stalls_s) for recording in recordings),
        **{f"c{ms}": continuity(recordings, ms) for ms in THRESHOLDS_MS},
        **{f"buffer_{ms}": buffered(recordings, ms) for ms in THRESHOLDS_MS},
    }


def good(result: dict[str, Any]) -> bool:
    """Returns whether all utterances of a rate were complete and free of gaps."""
    return (
        result["complete"] == result["utterances"]
        and result["buffer_200"] == 1.0
        and result["scheduling_lag_ms"]["p99"] <= 1000 * _LAG_S
    )


def as_line(result: dict[str, Any]) -> str:
    first, start, lag = (
        quantiles(result[f"{name}_ms"], "p50", "p99")
        for name in ("first_playable", "gap_free_start", "scheduling_lag")
    )
    shares = ", ".join(f"buffer {ms} {result[f'buffer_{ms}']:.0%}" for ms in THRESHOLDS_MS)
    return (
        f"{result['model']:11} {result['utterances_per_s']:6.2f}/s, {result['complete']} of "
        f"{result['utterances']} complete; p50 / p99 ms: first playable {first}, gap-free start "
        f"{start}, lag {lag}; {shares}"
    )


async def measure(
    model: str,
    subject: Subject,
    grpc_url: str,
    gateway_url: str | None,
    options: argparse.Namespace,
) -> list[dict[str, Any]]:
    """Measures a server at several rates, and returns a row for each, from the lowest rate."""
    rows: list[dict[str, Any]] = []
    no_limits = httpx.Limits(max_connections=None)
    async with (
        AsyncClient(grpc_url) as client,
        httpx.AsyncClient(base_url=gateway_url or "", timeout=60.0, limits=no_limits) as http,
    ):
        pace = options.speed * subject.config.token_frame_rate
        speak: Speak = partial(from_server, client, subject, 1, pace)
        if gateway_url is not None:
            speak = partial(from_gateway, http)
        await hear(speak, subject.audio_s)  # computes the prompt of the voice once
        while (rate := next_rate(options.rates, rows)) is not None:
            seconds = max(options.seconds, _LEAST_UTTERANCES / rate)
            rows.append(row(model, rate, await run_rate(speak, subject.audio_s, rate, seconds)))
            print(as_line(rows[-1]), flush=True)
    return sorted(rows, key=lambda row: row["utterances_per_s"])


def next_rate(rates: Sequence[float], rows: Sequence[dict[str, Any]]) -> float | None:
    """Returns the rate to measure after some rows; None if the search has ended.

    The rates rise until one is not good. If the lowest one is not good, it is halved until a rate
    is good.
    """
    if not rows:
        return min(rates)
    last = float(rows[-1]["utterances_per_s"])
    if all(map(good, rows)):
        return min((rate for rate in rates if rate > last), default=None)
    lower = last / 2
    return None if any(map(good, rows)) or lower < _LEAST_RATE else lower


def highest_rate(rows: list[dict[str, Any]]) -> float | None:
    """Returns the highest rate of one model without a gap; None if all rates have gaps."""
    return max((row["utterances_per_s"] for row in rows if good(row)), default=None)


def add_options(parser: argparse.ArgumentParser) -> None:
    names = list(LABELS)
    parser.add_argument(
        "--models", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names)
    )
    parser.add_argument(
        "--rates",
        type=float,
        nargs="+",
        default=[0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0],
        help="utterances per second; a higher rate is skipped if a lower one had gaps, and lower "
        f"ones, down to {_LEAST_RATE:g}, are added if the lowest one had gaps",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=20.0,
        help="time in which utterances start; longer at low rates, so that "
        f"{_LEAST_UTTERANCES} utterances are expected",
    )
    parser.add_argument("--utterance-seconds", type=float, default=6.0)
    parser.add_argument(
        "--speed", type=float, default=2.0, help="pace of the tokens, as a multiple of speech"
    )
    parser.add_argument(
        "--gateway",
        action="store_true",
        help="measure models with voices from the text, through a gateway",
    )


def main(options: argparse.Namespace) -> None:
    facts, rows, highest = describe(), list[dict[str, Any]](), dict[str, float | None]()
    with tempfile.TemporaryDirectory() as temporary:
        for model in options.models:
            folder = model_folder(model, Path(temporary))
            subject = Subject.of(folder, options.utterance_seconds)
            if options.gateway and subject.voice is None:
                print(f"{model}: left out, because --gateway measures models with voices")
                continue
            with ExitStack() as stack:
                server = TritonServer(folder, ports=Ports.free(), verbose=False)
                url, server = None, stack.enter_context(server)
                if options.gateway:
                    url, _ = stack.enter_context(gateway(server.grpc_url, subject, options.speed))
                measured = asyncio.run(measure(model, subject, server.grpc_url, url, options))
            rows, highest[model] = rows + measured, highest_rate(measured)
            # After each model, because all models together take many minutes.
            save(options.name, {**facts, "highest_rate_without_gaps": highest, "rows": rows})
    print("highest rate without a gap:", highest)

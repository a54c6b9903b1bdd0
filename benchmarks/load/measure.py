"""Loads on a real server that this process starts, with the settings of a mode."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Generator, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from benchmarks.load.clients import Load, Target, run_load
from benchmarks.load.figures import Row, row
from benchmarks.load.gateway import gateway
from benchmarks.load.subject import Subject
from testkit.rigs.metrics import scrape
from token2wav_server import Ports, TritonServer

Settings = Mapping[str, Mapping[str, Any]]

GATEWAY_MODEL = "token2wav"  # served model that a gateway asks for
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


def measure(
    folder: Path,
    mode: str,
    loads: Iterable[Load],
    subject: Subject,
    settings: Settings,
    gateway_speed: float | None = None,
) -> Generator[Row, None, None]:
    """Yields a row for each load on one server; a load starts when its row is requested.

    Args:
        mode: key of `MODES`. The settings of the mode replace the same ones in `settings`.
        gateway_speed: pace of the language model's tokens, as a multiple of speech, if the clients
            send text to a gateway; None for clients of the server.
    """
    changes, model = MODES[mode]
    merged: dict[str, dict[str, Any]] = {}
    for part, values in (*settings.items(), *changes.items()):
        merged[part] = {**merged.get(part, {}), **values}
    with ExitStack() as stack:
        config = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "server.yaml"
        config.write_text(yaml.safe_dump(merged))
        server = stack.enter_context(
            TritonServer(folder, config=config, models=[model], ports=Ports.free(), verbose=False)
        )
        target = Target(server.grpc_url, model, subject)
        if gateway_speed is not None:
            url = stack.enter_context(gateway(server.grpc_url, subject, gateway_speed))
            target = replace(target, gateway_url=url)
        asyncio.run(target.speak_once(Load(1, 0.0)))
        for load in loads:
            before = batch_sizes(server.metrics_url)
            heard, seconds = run_load(target, load)
            after = batch_sizes(server.metrics_url)
            batches = {name: count - before[name] for name, count in after.items()}
            yield row(mode, load, heard, seconds, batches)


def batch_sizes(url: str) -> dict[str, float]:
    """Reads the sum and the number of batch sizes."""
    metrics = scrape(url)
    return {name: metrics[f"token2wav_batch_streams_{name}"] for name in ("sum", "count")}

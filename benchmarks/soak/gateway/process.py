"""Command of the gateway as the soak runs it: its settings, its process, and its first texts."""

from __future__ import annotations

import hashlib
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import httpx
import yaml
from safetensors.numpy import save_file

from benchmarks.environment import ROOT
from benchmarks.soak.gateway.clients import Door, Manner, speak
from benchmarks.soak.gateway.scene import FEW_KEY, KEY, RECORDING, VOICES
from benchmarks.soak.lines import Line
from testkit.rigs.gateway_rig import TEMPLATE
from token2wav_client.voice import FIELDS
from token2wav_server import Ports

DESCRIPTORS = 1024
LONG_TOKENS = 1000  # of the longest line
# Limits of the gateway: small enough to be reached by misdeeds, but not by honest texts.
LIMITS = {
    "streams": 32,
    "sockets": 64,
    "seconds": 120.0,
    "idle_s": 5.0,
    "speech_tokens": LONG_TOKENS + 200,
}
# Time-outs in seconds, which the longest outages exceed.
_MODEL_TIMEOUTS = {"connect_timeout_s": 3.0, "token_timeout_s": 4.0}
_SERVER_TIMEOUTS = {"response_timeout_s": 15.0}
_KEYS = {
    KEY: {"name": "soak", "streams": 64, "requests_per_minute": 1_000_000},
    FEW_KEY: {"name": "few", "streams": 1, "requests_per_minute": 1},
}
_START_SECONDS = 120.0


def settings_of(folder: Path, lines: list[Line], ports: dict[str, int]) -> dict[str, Any]:
    """Returns the settings of the gateway, and writes the voices of the lines.

    Args:
        ports: ports of the servers behind it.
    """
    voices = folder / "voices"
    voices.mkdir()
    for voice in {line.voice for line in lines if line.voice is not None}:
        tensors = {name: getattr(voice, name) for name in FIELDS}
        save_file(tensors, voices / f"{voice.id}.safetensors")
    return {
        "language_model": {
            "url": f"http://127.0.0.1:{ports['language model']}/v1",
            "template": str(TEMPLATE),
            **_MODEL_TIMEOUTS,
        },
        "speech_server": {"url": f"127.0.0.1:{ports['speech server']}", **_SERVER_TIMEOUTS},
        "voices": {
            "folder": str(voices),
            "model": str(ROOT / "examples" / "demo_voice" / "model"),
            "most": 1000,
        },
        "limits": LIMITS,
        "keys": [
            {"sha256": hashlib.sha256(key.encode()).hexdigest(), **limits}
            for key, limits in _KEYS.items()
        ],
    }


@contextmanager
def started(
    folder: Path, settings: dict[str, Any], ports: Ports
) -> Iterator[subprocess.Popen[str]]:
    """Starts the command of the gateway, with its log in a file."""
    (folder / "gateway.yaml").write_text(yaml.safe_dump(settings))
    command = [sys.executable, "-m", "benchmarks.soak.gateway.command"]
    command += ["--config", str(folder / "gateway.yaml")]
    command += ["--port", str(ports.http), "--metrics-port", str(ports.metrics)]
    command += ["--riva-port", str(ports.grpc)]
    with (folder / "gateway.log").open("w") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True)
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def warm_up(door: Door, lines: list[Line]) -> None:
    """Waits until a gateway speaks through each of its doors, and makes a voice.

    After this, a gateway at rest has loaded everything that it keeps.
    """
    deadline = time.monotonic() + _START_SECONDS
    for manner in Manner.of_each_door():
        while failure := speak(door, lines[:1], manner, Random(0))[0].failure:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the gateway does not speak: {failure}")
            time.sleep(0.2)
    with door.unfinished_call() as call:
        call.send(1)
    with RECORDING.open("rb") as recording:
        httpx.post(
            f"http://127.0.0.1:{door.port}{VOICES}",
            headers=door.headers,
            data={"name": "warm-up"},
            files={"audio_sample": recording},
            timeout=_START_SECONDS,
        ).raise_for_status()

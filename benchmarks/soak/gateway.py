"""Soak of a gateway: attacks and outages must not harm honest clients.

Starts a tritonserver with a tiny model, a language model server, and the command
`token2wav gateway` with an ordinary limit of descriptors. Clients keep the gateway busy. One in
five misbehaves, the servers behind the gateway fail for seconds, and some answers of the language
model server are attacks. Every text of an honest client is compared with the library's audio,
sample by sample. During an outage a text may fail, but its samples up to the failure must be right.
At the end the gateway may hold no descriptor, task or text, and its memory must have stayed flat.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import httpx
import numpy as np
from prometheus_client import CollectorRegistry
from safetensors.numpy import save_file

from benchmarks.environment import ROOT
from benchmarks.soak.crowd import Crowd, Plan, WrongAnswerError
from benchmarks.soak.gateway_clients import PACES, Manner, speak
from benchmarks.soak.gateway_misdeeds import IDLE_S, MISDEEDS, RECORDING, VOICES, Scene
from benchmarks.soak.lines import Line, make_lines, spoken_line
from benchmarks.soak.marked_language_model import create_app
from benchmarks.soak.outages import Outages, ProxyOutages
from benchmarks.soak.report import findings
from benchmarks.soak.watch import (
    REST_SECONDS,
    HealthProbe,
    ServerProbe,
    Watch,
    above_rest,
    gateway_reading,
    read_gateway_log,
    still_held,
)
from testkit.models.golden import TINY
from testkit.rigs.gateway_lines import DOORS
from testkit.rigs.gateway_rig import TEMPLATE, GatewayRig, key_settings, serving
from testkit.rigs.metrics import labelled, scrape
from testkit.rigs.observed_gateway import ObservedGateway
from testkit.rigs.traces import Traces
from token2wav import Token2Wav
from token2wav_client.listening import summary
from token2wav_client.voice import FIELDS
from token2wav_server import Ports, TritonServer

MINUTES, CLIENTS = 20.0, 10
_SERVER_SETTINGS = """
stream: {first_tokens: 0, lookahead_frames: 0}  # so that audio can be compared
limits: {idle_seconds: 12.0}
runtime: {cache_mib: 512}  # more than the clients can fill
"""
_KINDS = ("leave", "stall", "language model")
_DESCRIPTORS = 1024
_LONG_TOKENS = 1000  # of the longest line
# Limits of the gateway: small enough to be reached by misdeeds, but not by honest texts.
_LIMITS = {
    "streams": 32,
    "sockets": 64,
    "seconds": 120.0,
    "idle_s": IDLE_S,
    "speech_tokens": _LONG_TOKENS + 200,
}
# Time-outs in seconds, which the longest outages exceed.
_MODEL_TIMEOUTS = {"connect_timeout_s": 3.0, "token_timeout_s": 4.0}
_SERVER_TIMEOUTS = {"response_timeout_s": 15.0}
_KEY = "key-of-the-soak"
_START_SECONDS = 120.0
# Counts at rest that a gateway returns to. Pools keep their threads.
_RETURNING = ("gateway_descriptors", "tasks", "speaking", "sockets")
# Failures that an outage excuses.
_OUTAGE = re.compile("connection: |language model: |speech server: |gateway: the text took")
_PAUSE_S = 0.2  # after a failure
_LONG_S = 12.0  # a line with more audio is the only one of its connection


class GatewayCrowd(Crowd[Scene]):
    """Clients of a running gateway.

    Args:
        outages: outages of the servers behind the gateway.
    """

    def __init__(self, plan: Plan, rig: GatewayRig, lines: list[Line], outages: Outages) -> None:
        super().__init__(plan, MISDEEDS, _KINDS)
        self._rig, self._lines, self._outages = rig, lines, outages

    def scene(self, random: Random) -> Scene:
        return Scene(self._lines, random, self._rig, _KEY)

    def utterance(self, random: Random) -> tuple[str, Callable[[], None]]:
        manner = Manner.draw(random)
        return str(manner), partial(self._speak, manner, random)

    def excuses(self, failure: str, began: float) -> bool:
        return bool(_OUTAGE.match(failure)) and self._outages.since(began)

    def _speak(self, manner: Manner, random: Random) -> None:
        began, line = time.monotonic(), random.choice(self._lines)
        more = random.choices(self._lines, k=random.randint(0, 8))
        lines = [line, *(one for one in more if one.voice is line.voice and one.seconds < _LONG_S)]
        for spoken, failure in speak(self._rig, _KEY, lines, manner):
            if not failure:
                self.books.spoken.append(spoken.seconds)
                continue
            if not self.excuses(failure, began):
                raise WrongAnswerError(f"'{spoken.name}': {failure}")
            self.books.excused.append(failure)
            time.sleep(_PAUSE_S)


def _lines() -> list[Line]:
    """Returns the lines of `make_lines`, and one that is so long that its tokens wait."""
    lines = make_lines(TINY)
    assert lines[-1].voice is not None
    tokens = np.resize(lines[-1].tokens, _LONG_TOKENS)
    return [*lines, spoken_line(Token2Wav.load(TINY), tokens, "long prompt", lines[-1].voice)]


def _settings(folder: Path, lines: list[Line], ports: dict[str, int]) -> dict[str, Any]:
    """Returns the settings of the gateway, and writes the voices of the lines.

    Args:
        ports: ports of the servers behind it.
    """
    voices = folder / "voices"
    voices.mkdir()
    for voice in {line.voice for line in lines if line.voice is not None}:
        tensors = {name: getattr(voice, name) for name in FIELDS}
        save_file(tensors, voices / f"{voice.id}.safetensors")
    model_url = f"http://127.0.0.1:{ports['language model']}/v1"
    server_url = f"127.0.0.1:{ports['speech server']}"
    demo_model = str(ROOT / "examples" / "demo_voice" / "model")
    return {
        "language_model": {"url": model_url, "template": TEMPLATE, **_MODEL_TIMEOUTS},
        "speech_server": {"url": server_url, **_SERVER_TIMEOUTS},
        "voices": {"folder": str(voices), "model": demo_model, "most": 1000},
        "limits": _LIMITS,
        "keys": [key_settings("soak", _KEY, streams=64, requests_per_minute=1_000_000)],
    }


def _warm_up(rig: GatewayRig, lines: list[Line]) -> None:
    """Waits until a gateway speaks through each of its doors, and makes a voice.

    After this, a gateway at rest has loaded everything that it keeps.
    """
    deadline = time.monotonic() + _START_SECONDS
    for door in DOORS:
        while failure := next(speak(rig, _KEY, lines[:1], Manner(door)))[1]:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the gateway does not speak: {failure}")
            time.sleep(0.2)
    httpx.post(
        f"{rig.url}{VOICES}",
        headers={"authorization": f"Bearer {_KEY}"},
        data={"name": "warm-up"},
        files={"audio_sample": RECORDING.read_bytes()},
        timeout=_START_SECONDS,
    ).raise_for_status()


def soak(plan: Plan, folder: Path) -> dict[str, Any]:
    """Runs a soak. Raises RuntimeError if the gateway ended by itself, or never spoke.

    Args:
        folder: folder for configurations, voices and logs.

    Returns:
        The observations, with a list of `problems` that is empty after a good run.
    """
    config, log_file, lines = folder / "server.yaml", folder / "triton.log", _lines()
    config.write_text(_SERVER_SETTINGS)
    with ExitStack() as stack:
        triton = TritonServer(TINY, config=config, ports=Ports.free(), log_file=log_file)
        server = stack.enter_context(triton)
        texts = {line.name: line.tokens.tolist() for line in lines}
        language_model = stack.enter_context(serving(create_app(texts, PACES)))
        # The language model server breaks answers off on purpose, and uvicorn logs a traceback.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        targets = {"language model": language_model, "speech server": server.ports.grpc}
        outages = stack.enter_context(ProxyOutages(targets, Random(f"{plan.seed} outages")))
        settings = _settings(folder, lines, outages.ports)
        gateway = stack.enter_context(ObservedGateway.start(settings, folder, _DESCRIPTORS))
        ports = gateway.ports
        url, riva = f"http://127.0.0.1:{ports.http}", f"127.0.0.1:{ports.grpc}"
        rig = GatewayRig(url, CollectorRegistry(), folder / "voices", riva)
        _warm_up(rig, lines)
        server_probe = ServerProbe(server.metrics_url, lambda: Traces.of(server.pid))
        read, health = partial(gateway_reading, gateway), HealthProbe(f"{url}/health/live")
        rest = read()
        watch, health_watch = Watch(read), Watch(health.read, every_s=0.2)
        crowd = GatewayCrowd(plan, rig, lines, outages)
        watch.start()
        health_watch.start()
        outages.start()
        crowd.run()
        outages.end()
        if (code := gateway.process.poll()) is not None:
            raise RuntimeError(
                f"seed {plan.seed}: the gateway ended with status {code}; clients saw "
                f"{crowd.books.problems[:5]}"
            )
        watch.stop()
        problems = above_rest(read, {name: rest[name] for name in _RETURNING})
        last = watch.look()
        health_watch.stop()
        problems += [f"health: {failure}" for failure in health.failures]
        server_metrics, metrics = server_probe.when_empty(), scrape(gateway.metrics_url)
        problems += still_held(server_metrics)
        gateway.process.terminate()
        if code := gateway.process.wait(REST_SECONDS):
            problems.append(f"the gateway ended with status {code}")
    problems += server_probe.left_behind()
    secrets = [_KEY, *(line.name for line in lines)]
    log_lines, log_problems = read_gateway_log(gateway.log, secrets)
    return {
        **findings(plan, crowd.books, watch, problems + log_problems),
        "settings": {"limits": _LIMITS, "server": _SERVER_SETTINGS.strip().splitlines()},
        "outages": dict(outages.counts),
        "gateway": {
            "before": rest,
            "after": last,
            "texts": labelled(metrics, "token2wav_gateway_texts_total"),
            "refused": labelled(metrics, "token2wav_gateway_refused_total"),
            "health_ms": summary(reading["latency_ms"] for reading in health_watch.readings),
            "log_lines_in_busiest_minute": log_lines,
        },
        # The soak of the server judges the memory of the server, whose cache still fills here.
        "server": {
            "audio_seconds": round(server_metrics["token2wav_audio_seconds_total"], 2),
            "cache_pages": labelled(server_metrics, "token2wav_cache_pages"),
        },
    }

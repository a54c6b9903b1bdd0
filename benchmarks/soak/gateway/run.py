"""Soak of the gateway: attacks and outages beside honest clients, who must not be harmed.

Starts a tritonserver with a tiny model, a language model server, and the command
`token2wav gateway` with an ordinary limit of descriptors. Clients keep the gateway busy. One in
five misbehaves, the servers behind the gateway fail for seconds, and some answers of the language
model server are attacks. Every text of an honest client is compared with the library's audio,
sample by sample. During an outage a text may fail, but its samples up to the failure must be right.
At the end the gateway may hold no descriptor, task or text, and its memory must have stayed flat.
If there are problems, prints them with the seed and exits with 1.

    .venv/bin/python -m benchmarks.soak.gateway.run --minutes 20
"""

from __future__ import annotations

import logging
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from benchmarks.environment import describe, save
from benchmarks.soak.crowd import Crowd, Deck, Misdeed, Plan, WrongAnswerError, in_general
from benchmarks.soak.gateway.clients import Door, Manner, broken, speak
from benchmarks.soak.gateway.language_model import create_app
from benchmarks.soak.gateway.misdeeds import MISDEEDS
from benchmarks.soak.gateway.outages import Outages
from benchmarks.soak.gateway.process import LIMITS, LONG_TOKENS, settings_of, started, warm_up
from benchmarks.soak.gateway.scene import FEW_KEY, KEY, Scene
from benchmarks.soak.gateway.watch import GatewayWatch, Health, read_log
from benchmarks.soak.lines import TINY, TOLERANCE, Line, make_lines
from benchmarks.soak.report import as_table, exit_with_problems, misdeed_lines, soak_parser
from benchmarks.soak.watch import (
    GROWTH_MIB,
    JUDGED_MINUTES,
    Watch,
    as_rows,
    gone_after,
    growth_mib,
    labelled,
    scrape,
    still_held,
    when_empty,
)
from testkit.rigs.gateway_rig import serving
from token2wav import Token2Wav, Voice
from token2wav_client.voice import FIELDS
from token2wav_server import Ports, TritonServer

SERVER_SETTINGS = """
stream: {first_tokens: 0, lookahead_frames: 0}  # so that audio can be compared
limits: {idle_seconds: 12.0}
runtime: {cache_mib: 512}  # more than the clients can fill
"""
_KINDS = ("leave", "stall", "garbage", "garbage", "flood", "language model")
# Failures that an outage excuses.
_OUTAGE = re.compile(
    r"50[234] |connection: |language model: |speech server: |gateway: the text took"
)
_PAUSE_S = 0.2  # after a failure
_REST_SECONDS = 60.0
_LONGEST_ANSWER = 100  # characters of an answer in the counts


class GatewaySoak(Crowd[Scene]):
    """Clients of a running gateway.

    Args:
        outages: outages of the servers behind the gateway.
    """

    def __init__(self, plan: Plan, door: Door, lines: list[Line], outages: Outages) -> None:
        super().__init__(plan, Deck(MISDEEDS, _KINDS, Random(f"{plan.seed} misdeeds")))
        self._door = door
        self._lines = lines
        self._outages = outages

    def scene(self, random: Random) -> Scene:
        return Scene(self._door, self._lines, random, LIMITS["idle_s"])

    def utterance(self, random: Random) -> tuple[str, Callable[[], None]]:
        manner = Manner.draw(random)
        return str(manner), partial(self._behave, manner, random)

    def misbehave(self, misdeed: Misdeed[Scene], random: Random) -> str:
        began = time.monotonic()
        try:
            answer = misdeed.act(self.scene(random))
        except OSError as error:
            answer = broken(error)
        if _OUTAGE.match(answer) and self._outages.since(began):
            return f"in an outage: {_short(answer)}"
        return misdeed.checked(answer)

    def _behave(self, manner: Manner, random: Random) -> None:
        began = time.monotonic()
        for spoken in speak(self._door, self._lines, manner, random):
            spoken.check()
            if not spoken.failure:
                with self.books.lock:
                    self.books.spoken += 1
                    self.books.audio_seconds += spoken.line.seconds
                continue
            if not _OUTAGE.match(spoken.failure) or not self._outages.since(began):
                raise WrongAnswerError(f"'{spoken.line.name}': {spoken.failure}")
            with self.books.lock:
                self.books.tried_again[_short(spoken.failure)] += 1
            time.sleep(_PAUSE_S)


def _short(answer: str) -> str:
    return in_general(answer)[:_LONGEST_ANSWER]


def lines_of_the_soak() -> list[Line]:
    """Returns the lines of `make_lines`, and one that is so long that its tokens wait."""
    lines = make_lines(TINY)
    last = lines[-1]
    assert last.voice is not None
    tokens = np.resize(last.tokens, LONG_TOKENS)
    voice = Voice(*(getattr(last.voice, name) for name in FIELDS))
    audio = Token2Wav.load(TINY).synthesize(tokens, voice)
    name = last.name.replace(str(len(last.tokens)), str(LONG_TOKENS))
    return [*lines, Line(name, tokens, last.voice, audio)]


def soak(plan: Plan, folder: Path) -> dict[str, Any]:
    """Runs a soak.

    Args:
        folder: folder for configurations, voices and logs.

    Returns:
        The observations, with a list of `problems` that is empty after a good run.
    """
    config, lines, ports = folder / "server.yaml", lines_of_the_soak(), Ports.free()
    config.write_text(SERVER_SETTINGS)
    with ExitStack() as stack:
        triton = TritonServer(
            TINY, config=config, ports=Ports.free(), log_file=folder / "triton.log"
        )
        server = stack.enter_context(triton)
        language_model = stack.enter_context(serving(create_app(lines)))
        # The language model server breaks answers off on purpose, and uvicorn logs a traceback.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        targets = {"language model": language_model, "speech server": server.ports.grpc}
        outages = stack.enter_context(Outages(targets, Random(f"{plan.seed} outages")))
        settings = settings_of(folder, lines, outages.ports)
        process = stack.enter_context(started(folder, settings, ports))
        door, metrics_url = Door(ports.http, KEY, ports.grpc), f"127.0.0.1:{ports.metrics}"
        warm_up(door, lines)
        watch, server_watch = GatewayWatch(process, metrics_url), Watch(server)
        rest, health = watch.look(), Health(ports.http)
        clients = GatewaySoak(plan, door, lines, outages)
        for thread in (watch, server_watch, health):
            thread.start()
        outages.begin()
        clients.run()
        outages.end()
        if process.poll() is not None:
            raise RuntimeError(
                f"seed {plan.seed}: the gateway ended with status {process.returncode}; clients "
                f"saw {clients.books.problems[:5]}"
            )
        for thread in (watch, server_watch):
            thread.stop()
        last = watch.look_when_at_rest(rest, _REST_SECONDS)
        health.stop()
        books, problems = clients.books, list(clients.books.problems)
        problems += [f"{count} more {name} than before" for name, count in last.above(rest).items()]
        problems += [f"health: {failure}" for failure in health.failures]
        server_metrics = when_empty(server.metrics_url, _REST_SECONDS)
        problems += still_held(server_metrics)
        metrics = scrape(metrics_url)
        process.terminate()
        if code := process.wait(_REST_SECONDS):
            problems.append(f"the gateway ended with status {code}")
    problems += [f"left behind: {leftover}" for leftover in gone_after(server_watch, _REST_SECONDS)]
    secrets = [KEY, FEW_KEY, *(line.name for line in lines)]
    log_lines, log_problems = read_log(folder / "gateway.log", secrets)
    problems += [f"log: {line}" for line in log_problems]
    # The soak of the server judges the memory of the server, whose cache still fills here.
    growth = growth_mib(watch.samples)
    if plan.minutes >= JUDGED_MINUTES and growth["gateway_mib"] > GROWTH_MIB:
        problems.append(f"the gateway grew by {growth['gateway_mib']} MiB")
    return {
        "plan": asdict(plan),
        "settings": {"limits": LIMITS, "server": SERVER_SETTINGS.strip().splitlines()},
        "tolerance": TOLERANCE,
        "behaved": {
            "texts": books.spoken,
            "audio_seconds": round(books.audio_seconds, 2),
            "failed_in_outages": dict(books.tried_again.most_common()),
        },
        "outages": Counter(f"{outage.server} {outage.manner}" for outage in outages.all),
        "misbehaved": as_table(books.misdeeds),
        "gateway": {
            "texts": labelled(metrics, "token2wav_gateway_texts_total"),
            "refused": labelled(metrics, "token2wav_gateway_refused_total"),
            "health": health.summary(),
            "log_lines_in_busiest_minute": log_lines,
            "most_descriptors": max(sample.descriptors for sample in watch.samples),
        },
        "server": {
            "audio_seconds": round(server_metrics["token2wav_audio_seconds_total"], 2),
            "cache_pages": labelled(server_metrics, "token2wav_cache_pages"),
            "most_open_streams": max(sample.open_streams for sample in server_watch.samples),
            "most_cache_pages": max(sample.cache_pages for sample in server_watch.samples),
            "growth_mib": growth_mib(server_watch.samples),
        },
        "resources": {
            "growth_mib": growth,
            "allowed_mib": GROWTH_MIB if plan.minutes >= JUDGED_MINUTES else None,
            "before": asdict(rest),
            "after": asdict(last),
            "samples": as_rows(watch.samples, 120),
        },
        "problems": problems,
    }


def summary(result: dict[str, Any]) -> str:
    behaved, gateway, resources = (result[name] for name in ("behaved", "gateway", "resources"))
    failed = sum(behaved["failed_in_outages"].values())
    lines = [
        f"{behaved['texts']} texts, {behaved['audio_seconds']:.0f} s of audio compared; "
        f"{failed} failed in {sum(result['outages'].values())} outages"
    ]
    lines += misdeed_lines(result["misbehaved"], 14)
    lines += [
        f"health: {gateway['health']}",
        f"lines of the log in the busiest minute: {gateway['log_lines_in_busiest_minute']}",
        f"before: {resources['before']}",
        f"after:  {resources['after']}",
        f"growth in MiB, middle to last third: {resources['growth_mib']}",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = soak_parser(__doc__, minutes=20.0, clients=10)
    parser.add_argument("--name", default="soak_gateway", help="name of the result file")
    options = parser.parse_args()
    plan = Plan(options.minutes, options.clients, options.seed)
    print(f"seed {plan.seed}", flush=True)
    facts = describe()
    with tempfile.TemporaryDirectory(prefix="token2wav-soak-") as folder:
        result = soak(plan, Path(folder))
    print(summary(result))
    save(options.name, {**facts, **result})
    exit_with_problems(result["problems"], plan.seed)


if __name__ == "__main__":
    main()

"""Soak of a real server: one in five clients misbehaves, and the other clients must not be harmed.

Starts a tritonserver with a tiny model, a flow model or a codec. Clients keep it busy: they
synthesize one utterance after the other, in several voices and manners. Every utterance of a
well-behaved client is compared with the library's audio, sample by sample. At the end, the server
may hold no state of any client, its memory must have stayed flat, and the stopped server must have
left nothing behind. Before the soak, a separate process runs random operations on the library for a
tenth of the time (operations.py). If there are problems, prints them with the seed and exits with
1.

    .venv/bin/python -m benchmarks.soak.run --minutes 10
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.environment import ROOT, describe, save
from benchmarks.soak.crowd import OVERLOAD, Crowd, Deck, Plan, WrongAnswerError, in_general
from benchmarks.soak.lines import MODELS, TOLERANCE, Line, make_lines, model_folder
from benchmarks.soak.misdeeds import Scene, misdeeds
from benchmarks.soak.report import as_table, exit_with_problems, misdeed_lines, soak_parser
from benchmarks.soak.watch import (
    GROWTH_MIB,
    JUDGED_MINUTES,
    Log,
    Watch,
    as_rows,
    gone_after,
    growth_mib,
    labelled,
    still_held,
    when_empty,
)
from benchmarks.soak.wire import RawStream
from token2wav_client import Client, ClientError
from token2wav_client.audio import AudioFormat
from token2wav_client.wire import Opening
from token2wav_server import Ports, ServerError, TritonServer

IDLE_SECONDS = 12.0
# Limits so small that the server refuses streams, evicts voices and fills its cache.
SETTINGS = """
stream: {{first_tokens: 0, lookahead_frames: 0}}  # so that audio can be compared
limits: {{streams: {streams}, idle_seconds: {idle}}}
runtime: {{cache_mib: 64}}
"""
_KINDS = ("cancel", "vanish", "stall", "crowd", "garbage", "garbage")
# Errors after which well-behaved clients try again.
_AGAIN = re.compile(f"{OVERLOAD}|is not registered here")
OPERATIONS_SHARE = 0.1


@dataclass(frozen=True)
class Manner:
    """Manner in which a well-behaved client sends a line.

    Attributes:
        audio_format: requested format of the audio.
        keep_open: as in `Client.open`.
        named: the client sends the id of the voice, and the voice itself only to a server that does
            not know the id.
        whole: the client sends the line in one request without a sequence id.
        tokens_per_s: pace of the tokens; 0 sends all tokens at once.
    """

    audio_format: AudioFormat
    keep_open: bool
    named: bool
    whole: bool
    tokens_per_s: float

    @classmethod
    def draw(cls, random: Random) -> Manner:
        return cls(
            audio_format=random.choice(["float32", "int16"]),
            keep_open=random.random() < 0.5,
            named=random.random() < 0.5,
            whole=random.random() < 0.25,
            tokens_per_s=random.choice([0.0, 25.0, 60.0]),
        )


def say(url: str, line: Line, manner: Manner, heard: list[NDArray[Any]], random: Random) -> None:
    """Sends a line to its end, and adds the received chunks to `heard`.

    Raises:
        ClientError, grpc.RpcError: the server refused or failed.
    """
    voice = line.voice.id if manner.named and line.voice is not None else line.voice
    if manner.whole:
        with RawStream(url) as stream:
            stream.send(
                line.tokens, Opening(voice, manner.audio_format, manner.keep_open), end=True
            )
            answers = stream.answers()
        heard += answers.audio
        if answers.errors:
            raise ClientError(answers.errors[0])
        return
    portions = in_portions(line.tokens, manner.tokens_per_s, random)
    paced = (wait_for(portion, manner.tokens_per_s) for portion in portions)
    with Client(url, response_timeout_s=60.0) as client:
        for chunk in client.synthesize(
            paced, voice, audio_format=manner.audio_format, keep_open=manner.keep_open
        ):
            heard.append(chunk.audio)


def in_portions(
    tokens: NDArray[np.int32], tokens_per_s: float, random: Random
) -> list[NDArray[np.int32]]:
    """Cuts tokens at random positions; some portions are empty.

    Paced portions are small, so that the server does not mistake a pause for an idle client.
    """
    most = 25 if tokens_per_s else len(tokens)
    cuts = [0]
    while cuts[-1] < len(tokens):
        cuts.append(cuts[-1] + random.randint(0, most))
    return np.split(tokens, cuts[1:-1])


def wait_for(portion: NDArray[np.int32], tokens_per_s: float) -> NDArray[np.int32]:
    if tokens_per_s:
        time.sleep(len(portion) / tokens_per_s)
    return portion


class Soak(Crowd[Scene]):
    """Clients on a running server."""

    def __init__(self, plan: Plan, url: str, lines: list[Line]) -> None:
        codec = all(line.voice is None for line in lines)
        deck = Deck(misdeeds(codec=codec), _KINDS, Random(f"{plan.seed} misdeeds"))
        super().__init__(plan, deck)
        self._url = url
        self._lines = lines

    def scene(self, random: Random) -> Scene:
        return Scene(self._url, self._lines, random, IDLE_SECONDS)

    def utterance(self, random: Random) -> tuple[str, Callable[[], None]]:
        line, manner = random.choice(self._lines), Manner.draw(random)
        return f"'{line.name}' {manner}", partial(self._behave, line, manner, random)

    def _behave(self, line: Line, manner: Manner, random: Random) -> None:
        give_up_at = time.monotonic() + 120.0
        while True:
            heard: list[NDArray[Any]] = []
            try:
                say(self._url, line, manner, heard, random)
                break
            except ClientError as error:
                if heard or not _AGAIN.search(str(error)) or time.monotonic() > give_up_at:
                    raise
                with self.books.lock:
                    self.books.tried_again[in_general(str(error))] += 1
                if OVERLOAD in str(error):
                    time.sleep(random.uniform(0.1, 0.5))
                else:
                    manner = replace(manner, named=False)
        if fault := line.fault(heard):
            raise WrongAnswerError(fault)
        with self.books.lock:
            self.books.spoken += 1
            self.books.audio_seconds += line.seconds


def soak(plan: Plan, folder: Path) -> dict[str, Any]:
    """Runs a soak.

    Args:
        folder: folder for the server's configuration and log.

    Returns:
        The observations, with a list of `problems` that is empty after a good run.

    Raises:
        ServerError: the server ended by itself.
    """
    config, log_file = folder / "server.yaml", folder / "triton.log"
    config.write_text(SETTINGS.format(streams=plan.clients, idle=IDLE_SECONDS))
    model = model_folder(plan.model, folder)
    lines = make_lines(model)
    with TritonServer(model, config=config, ports=Ports.free(), log_file=log_file) as server:
        watch = Watch(server)
        clients = Soak(plan, server.grpc_url, lines)
        watch.start()
        clients.run()
        watch.stop()
        books = clients.books
        if server.wait(timeout_s=0) is not None:
            raise ServerError(
                f"seed {plan.seed}: the server ended: {server.failure_reason()}; clients saw "
                f"{books.problems[:5]}"
            )
        problems = list(books.problems)
        metrics = when_empty(server.metrics_url, IDLE_SECONDS + 60.0)
        problems += still_held(metrics)
        with Client(server.grpc_url) as client:
            client.health(timeout_s=60.0)
        last = watch.look()
    problems += [f"left behind: {leftover}" for leftover in gone_after(watch, 60.0)]
    log = Log.read(log_file)
    problems += [f"log: {line}" for line in log.wrong]
    growth = growth_mib(watch.samples)
    if plan.minutes >= JUDGED_MINUTES:
        problems += [
            f"{name} grew by {mib} MiB" for name, mib in growth.items() if mib > GROWTH_MIB
        ]
    return {
        "plan": asdict(plan),
        "settings": config.read_text().strip().splitlines(),
        "tolerance": TOLERANCE,
        "behaved": {
            "utterances": books.spoken,
            "audio_seconds": round(books.audio_seconds, 2),
            "told_to_try_again": dict(books.tried_again.most_common()),
        },
        "misbehaved": as_table(books.misdeeds),
        "server": {
            "streams": log.streams,
            "ended": log.ended,
            "underruns": log.underruns,
            "audio_seconds": round(metrics["token2wav_audio_seconds_total"], 2),
            "refused": labelled(metrics, "token2wav_refused_total"),
            "cache_pages": labelled(metrics, "token2wav_cache_pages"),
            "most_open_streams": max(sample.open_streams for sample in watch.samples),
            "most_cache_pages": max(sample.cache_pages for sample in watch.samples),
        },
        "memory": {
            "growth_mib": growth,
            "allowed_mib": GROWTH_MIB if plan.minutes >= JUDGED_MINUTES else None,
            "samples": [*as_rows(watch.samples, 120), asdict(last)],
        },
        "problems": problems,
    }


def run_operations(plan: Plan) -> dict[str, Any]:
    """Runs random operations on the library in another process, for 10 % of the soak's time."""
    seconds = 60 * plan.minutes * OPERATIONS_SHARE
    command = [
        sys.executable,
        "-m",
        "testkit.random_operations",
        "--seconds",
        str(seconds),
        "--seed",
        str(plan.seed),
    ]
    ended = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if not ended.stdout:
        return {
            "seed": plan.seed,
            "problems": [f"they ended with status {ended.returncode} and no result"],
        }
    result: dict[str, Any] = json.loads(ended.stdout)
    return result


def summary(result: dict[str, Any]) -> str:
    behaved, server = result["behaved"], result["server"]
    lines = [
        f"{behaved['utterances']} utterances, {behaved['audio_seconds']:.0f} s of audio compared "
        f"to {TOLERANCE:g}; "
        f"told to try again {sum(behaved['told_to_try_again'].values())} times"
    ]
    lines += misdeed_lines(result["misbehaved"], 8)
    lines.append(
        f"{server['streams']} streams ended: {server['ended']}; underruns: {server['underruns']}"
    )
    lines.append(f"growth in MiB, middle to last third: {result['memory']['growth_mib']}")
    return "\n".join(lines)


def main() -> None:
    parser = soak_parser(__doc__, minutes=10.0, clients=14)
    parser.add_argument("--model", choices=MODELS, default=MODELS[0])
    parser.add_argument("--name", help="name of the result file; by default of the model")
    options = parser.parse_args()
    plan = Plan(options.minutes, options.clients, options.seed, options.model)
    print(f"seed {plan.seed}", flush=True)
    facts = describe()
    operations = run_operations(plan)
    with tempfile.TemporaryDirectory(prefix="token2wav-soak-") as folder:
        result = soak(plan, Path(folder))
    result["operations"] = operations
    result["problems"] += [f"operations: {problem}" for problem in operations["problems"]]
    print(summary(result))
    default = "soak" if plan.model == MODELS[0] else f"soak_{plan.model}"
    save(options.name or default, {**facts, **result})
    exit_with_problems(result["problems"], plan.seed)


if __name__ == "__main__":
    main()

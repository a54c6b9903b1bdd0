"""Soak of a server: clients misbehave, processes are killed, and honest clients are not harmed.

Runs `token2wav serve` with a tiny model, a flow model or a codec. Clients keep it busy: they
synthesize one utterance after the other, in several voices and manners. One in five misbehaves.
Every utterance of a well-behaved client is compared with the library's audio, sample by sample.

In the first part of the time the engine, tritonserver and a Python front are killed or stopped.
From a kill until the server is ready again an utterance may fail with a transient error, but its
samples up to the failure must be right. In the other part no process is killed, so that its memory
can be judged. At the end, the server may hold no state of any client, its memory must have stayed
flat, and the stopped server must have left nothing behind.

Before the soak, a separate process runs `testkit.random_operations` on the library for a tenth of
the time. The variable TEST_FRONT chooses the front, as for the tests.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray

from benchmarks.environment import ROOT
from benchmarks.soak.crowd import OVERLOAD, Crowd, Plan, WrongAnswerError, described
from benchmarks.soak.lines import Line, make_lines, model_folder
from benchmarks.soak.outages import Kills
from benchmarks.soak.report import findings
from benchmarks.soak.server_misdeeds import IDLE_SECONDS, KINDS, MISDEEDS, Scene
from benchmarks.soak.watch import (
    Reading,
    ServerProbe,
    Watch,
    above_rest,
    process_reading,
    read_server_log,
    still_held,
)
from testkit.rigs.metrics import labelled
from testkit.rigs.raw_stream import Answers, RawStream
from testkit.rigs.serve_command import Serving
from testkit.rigs.settings import comparable
from token2wav_client import Client, ClientError
from token2wav_client.audio import AudioFormat
from token2wav_client.token_source import paced
from token2wav_client.wire import Opening

MINUTES, CLIENTS = 10.0, 14
# Limits so small that the server refuses streams, evicts voices and fills its cache.
_SETTINGS = """
stream: {{first_tokens: 0, lookahead_frames: 0}}  # so that audio can be compared
limits: {{streams: {streams}, idle_seconds: {idle}}}
runtime: {{cache_mib: 64}}
"""
# A stopped engine is noticed after two canaries.
_OPTIONS = ("--verbose", "--canary-seconds=3", "--canary-patience-seconds=5")
_KILLS_SHARE = 0.4
# Errors after which well-behaved clients try again.
_AGAIN = re.compile(f"{OVERLOAD}|is not registered here")
# Failures that a kill excuses, at most some seconds after the server is ready again.
_KILLED = re.compile(
    "engine: (its process has ended|it is starting); |is no open stream"
    "|no server at |connection: UNAVAILABLE|is not registered here"
)
_LATE_S = 3.0
_PAUSE_S = 0.2  # after a failure
# Values at rest that are the same after any number of restarts. Triton 2.51 keeps the connection of
# a request that its own front end rejected, so tritonserver's descriptors are only reported. The
# launcher's vary by one, the connection of a reader of metrics.
RETURNING = ("model_descriptors", "shared_memory_mib")
_OPERATIONS_SHARE = 0.1


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
    opening = Opening(voice, manner.audio_format, manner.keep_open)
    if manner.whole:
        answers = Answers(heard)
        with RawStream(url) as stream:
            stream.send(line.tokens, opening, end=True)
            while not stream.read(answers):
                pass
        if answers.errors:
            raise ClientError(answers.errors[0])
        return
    most = 25 if manner.tokens_per_s else len(line.tokens)
    portions: Any = in_portions(line.tokens, most, random)
    if manner.tokens_per_s:
        portions = paced(portions, manner.tokens_per_s)
    with Client(url, response_timeout_s=60.0) as client:
        for chunk in client.synthesize(
            portions, voice, audio_format=manner.audio_format, keep_open=manner.keep_open
        ):
            heard.append(chunk.audio)


def in_portions(tokens: NDArray[np.int32], most: int, random: Random) -> list[NDArray[np.int32]]:
    """Cuts tokens at random positions; some portions are empty.

    Paced portions are small, so that the server does not mistake a pause for an idle client.
    """
    cuts = [0]
    while cuts[-1] < len(tokens):
        cuts.append(cuts[-1] + random.randint(0, most))
    return np.split(tokens, cuts[1:-1])


class ServerCrowd(Crowd[Scene]):
    """Clients on a running server.

    Args:
        kills: kills of its processes.
    """

    def __init__(self, plan: Plan, url: str, lines: list[Line], kills: Kills) -> None:
        super().__init__(plan, MISDEEDS, KINDS)
        self._url, self._lines, self._kills = url, lines, kills

    def scene(self, random: Random) -> Scene:
        return Scene(self._lines, random, self._url)

    def utterance(self, random: Random) -> tuple[str, Callable[[], None]]:
        line, manner = random.choice(self._lines), Manner.draw(random)
        return f"'{line.name}' {manner}", partial(self._speak, line, manner, random)

    def excuses(self, failure: str, began: float) -> bool:
        return bool(_KILLED.search(failure)) and self._kills.since(began)

    def _speak(self, line: Line, manner: Manner, random: Random) -> None:
        give_up_at = time.monotonic() + 120.0
        while True:
            heard, failure, began = list[NDArray[Any]](), "", time.monotonic()
            self.books.begun.append(began)
            try:
                say(self._url, line, manner, heard, random)
            except (ClientError, grpc.RpcError) as error:
                failure = described(error)
            if fault := line.fault(heard, cut_short=bool(failure)):
                raise WrongAnswerError(f"{fault}; {failure or 'no error'}")
            if not failure:
                self.books.spoken.append(line.seconds)
                return
            refused = not heard and _AGAIN.search(failure) and time.monotonic() < give_up_at
            killed = _KILLED.search(failure) and self._kills.since(began, late_s=_LATE_S)
            if not refused and not killed:
                raise WrongAnswerError(failure)
            self.books.excused.append(failure)
            if killed:
                time.sleep(_PAUSE_S)
                return
            if OVERLOAD in failure:
                time.sleep(random.uniform(0.1, 0.5))
            else:
                manner = replace(manner, named=False)


def soak(plan: Plan, folder: Path) -> dict[str, Any]:
    """Runs a soak.

    Args:
        folder: folder for the server's configuration and log.

    Returns:
        The observations, with a list of `problems` that is empty after a good run.

    Raises:
        RuntimeError: the command ended by itself.
        queue.Empty: a killed server was not restarted.
    """
    config = folder / "server.yaml"
    config.write_text(comparable(_SETTINGS.format(streams=plan.clients, idle=IDLE_SECONDS)))
    model = model_folder(plan.model, folder)
    lines = make_lines(model)
    with Serving.ready(model, f"--config={config}", *_OPTIONS) as serving:
        _check_health(serving)
        probe = ServerProbe(serving.metrics_url, lambda: serving.traces)

        def read() -> Reading:
            return {**probe.read(), **process_reading("launcher", serving.process.pid)}

        rest = read()
        kills = Kills(serving, 60 * plan.minutes * _KILLS_SHARE, Random(f"{plan.seed} kills"))
        crowd = ServerCrowd(plan, serving.url, lines, kills)
        watch = Watch(read, excuses=kills.since)
        watch.start()
        kills.start()
        crowd.run()
        kills.end()
        watch.stop()
        if (code := serving.process.poll()) is not None:
            raise RuntimeError(
                f"seed {plan.seed}: the server ended with status {code}: {serving.printed[-5:]}; "
                f"clients saw {crowd.books.problems[:5]}"
            )
        metrics = probe.when_empty()
        _check_health(serving)
        above = above_rest(read, {name: rest[name] for name in RETURNING})
        watch.readings.append(watch.look())
        serving.process.terminate()
        code = serving.wait()
    problems = [*kills.problems, *still_held(metrics), *probe.left_behind(), *above]
    if code:
        problems.append(f"the server ended with status {code}")
    if unaccounted := crowd.books.unaccounted():
        problems.append(f"{unaccounted} utterances were begun and never ended")
    log, log_problems = read_server_log(serving.printed, plan.clients)
    restarts = sum(log["restarts"].values())
    if restarts != kills.counts.total():
        problems.append(f"{restarts} restarts after {kills.counts.total()} kills")
    return {
        **findings(plan, crowd.books, watch, problems + log_problems, kills.ended),
        "settings": config.read_text().strip().splitlines(),
        "outages": dict(kills.counts),
        "server": {
            **log,
            "audio_seconds_since_restart": round(metrics["token2wav_audio_seconds_total"], 2),
            "refused": labelled(metrics, "token2wav_refused_total"),
            "cache_pages": labelled(metrics, "token2wav_cache_pages"),
            "before": rest,
            "after": watch.readings[-1],
        },
    }


def _check_health(serving: Serving) -> None:
    with Client(serving.url) as client:
        client.health(timeout_s=60.0)


def run_operations(plan: Plan) -> dict[str, Any]:
    """Runs random operations on the library in another process, for 10 % of the soak's time."""
    seconds = 60 * plan.minutes * _OPERATIONS_SHARE
    command = [sys.executable, "-m", "testkit.random_operations"]
    command += ["--seconds", str(seconds), "--seed", str(plan.seed)]
    ended = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if not ended.stdout:
        return {"problems": [f"they ended with status {ended.returncode} and no result"]}
    result: dict[str, Any] = json.loads(ended.stdout)
    return result

"""Soak of a server: one in five clients misbehaves, and the other clients must not be harmed.

Starts a tritonserver with a tiny model, a flow model or a codec. Clients keep it busy: they
synthesize one utterance after the other, in several voices and manners. Every utterance of a
well-behaved client is compared with the library's audio, sample by sample. At the end, the server
may hold no state of any client, its memory must have stayed flat, and the stopped server must have
left nothing behind. Before the soak, a separate process runs `testkit.random_operations` on the
library for a tenth of the time.
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

import numpy as np
from numpy.typing import NDArray

from benchmarks.environment import ROOT
from benchmarks.soak.crowd import OVERLOAD, Crowd, Plan, WrongAnswerError
from benchmarks.soak.lines import Line, make_lines, model_folder
from benchmarks.soak.report import findings
from benchmarks.soak.server_misdeeds import IDLE_SECONDS, KINDS, Scene, misdeeds
from benchmarks.soak.watch import ServerProbe, Watch, read_server_log, still_held
from testkit.rigs.metrics import labelled
from testkit.rigs.raw_stream import RawStream
from token2wav_client import Client, ClientError
from token2wav_client.audio import AudioFormat
from token2wav_client.token_source import paced
from token2wav_client.wire import Opening
from token2wav_server import Ports, ServerError, TritonServer

MINUTES, CLIENTS = 10.0, 14
# Limits so small that the server refuses streams, evicts voices and fills its cache.
_SETTINGS = """
stream: {{first_tokens: 0, lookahead_frames: 0}}  # so that audio can be compared
limits: {{streams: {streams}, idle_seconds: {idle}}}
runtime: {{cache_mib: 64}}
"""
# Errors after which well-behaved clients try again.
_AGAIN = re.compile(f"{OVERLOAD}|is not registered here")
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
        with RawStream(url) as stream:
            stream.send(line.tokens, opening, end=True)
            answers = stream.answers()
        heard += answers.audio
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
    """Clients on a running server."""

    def __init__(self, plan: Plan, url: str, lines: list[Line]) -> None:
        super().__init__(plan, misdeeds(codec=lines[0].voice is None), KINDS)
        self._url, self._lines = url, lines

    def scene(self, random: Random) -> Scene:
        return Scene(self._lines, random, self._url)

    def utterance(self, random: Random) -> tuple[str, Callable[[], None]]:
        line, manner = random.choice(self._lines), Manner.draw(random)
        return f"'{line.name}' {manner}", partial(self._speak, line, manner, random)

    def _speak(self, line: Line, manner: Manner, random: Random) -> None:
        give_up_at = time.monotonic() + 120.0
        while True:
            heard: list[NDArray[Any]] = []
            try:
                say(self._url, line, manner, heard, random)
                break
            except ClientError as error:
                if heard or not _AGAIN.search(str(error)) or time.monotonic() > give_up_at:
                    raise
                self.books.add_excused(str(error))
                if OVERLOAD in str(error):
                    time.sleep(random.uniform(0.1, 0.5))
                else:
                    manner = replace(manner, named=False)
        if fault := line.fault(heard):
            raise WrongAnswerError(fault)
        self.books.add_utterance(line.seconds)


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
    config.write_text(_SETTINGS.format(streams=plan.clients, idle=IDLE_SECONDS))
    model = model_folder(plan.model, folder)
    lines = make_lines(model)
    with TritonServer(model, config=config, ports=Ports.free(), log_file=log_file) as server:
        probe, crowd = ServerProbe(server), ServerCrowd(plan, server.grpc_url, lines)
        watch = Watch(probe.read)
        watch.start()
        crowd.run()
        watch.stop()
        if server.wait(timeout_s=0) is not None:
            raise ServerError(
                f"seed {plan.seed}: the server ended: {server.failure_reason()}; clients saw "
                f"{crowd.books.problems[:5]}"
            )
        metrics = probe.when_empty()
        with Client(server.grpc_url) as client:
            client.health(timeout_s=60.0)
        watch.readings.append(watch.look())
    log, log_problems = read_server_log(log_file)
    problems = still_held(metrics) + probe.left_behind() + log_problems
    return {
        **findings(plan, crowd.books, watch, problems),
        "settings": config.read_text().strip().splitlines(),
        "server": {
            **log,
            "audio_seconds": round(metrics["token2wav_audio_seconds_total"], 2),
            "refused": labelled(metrics, "token2wav_refused_total"),
            "cache_pages": labelled(metrics, "token2wav_cache_pages"),
        },
    }


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

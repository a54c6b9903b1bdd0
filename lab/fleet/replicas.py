"""Two real servers and the same two by simulation, under the same load, side by side.

Each server has one core and one worker. The costs of its chunks are measured first, on both cores
at the same time. Then both fleets get utterances of the same lengths at the same times. HAProxy
with the configuration in `docker/balancer` chooses the server if it is installed; otherwise this
program chooses, by the class of the simulation. The clients share the cores with the servers.
Prints rows; writes JSON.

    .venv/bin/python -m lab.fleet.replicas    # five minutes, on a quiet machine with 2 cores
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import yaml

from benchmarks.chunk_batch import chunk
from benchmarks.environment import describe, program_parser, save
from benchmarks.gpu.settings import PACE, PROMPT_TOKENS
from benchmarks.load.subject import TRAINED
from lab.fleet.balancer import LeastOpen
from lab.fleet.costs import Fit, Timed, fit
from lab.fleet.fleet import Fleet, Outcome, bursts, lengths, poisson
from lab.fleet.models import FullModel, messages
from lab.fleet.scenarios import Row
from testkit.models.codec_models import drawn_tokens
from testkit.models.sized import a_voice
from testkit.rigs.balancer import Balancer
from testkit.rigs.processes import children, stat_fields
from testkit.rigs.serve_command import Serving
from testkit.simulation.server import ChunkWork, Events, ServerKind
from token2wav import Token2Wav
from token2wav.config import LimitConfig, RuntimeConfig
from token2wav.published.registry import read_config
from token2wav_client import AsyncClient, ClientError, ClientVoice
from token2wav_client.listening import stalls, summary
from token2wav_server import Ports

NAME = "fleet_replicas"
ADDRESSES = ("127.0.0.2", "127.0.0.3")  # HAProxy needs servers with equal ports
BUFFER_S = 0.5
_CASES = ((25, 0.0), (25, 1.0), (75, 1.0), (25, 4.0))  # tokens of a chunk, seconds before it
_BATCHES = (1, 2, 6)
_LONE = 6  # utterances without other load, which show the delay of server and client
_LOOK_S = 0.5  # interval at which the open streams of each server are read


@dataclass(frozen=True)
class ReplicaLoad:
    """Utterances of one run: times of their beginnings, and lengths, in seconds."""

    name: str
    utterances: tuple[tuple[float, float], ...]

    @classmethod
    def of(cls, rate: float, seconds: float, *, bursty: bool = False) -> ReplicaLoad:
        random = np.random.default_rng(round(1000 * rate))
        times = bursts(random, rate, 4.0) if bursty else poisson(random, lambda _: rate, rate)
        drawn, utterances = lengths(random), list[tuple[float, float]]()
        for at in times:
            if at >= seconds:
                break
            utterances.append((at, next(drawn)))
        return cls(f"{rate:g} a second{', in bursts' if bursty else ''}", tuple(utterances))


@dataclass(frozen=True)
class Heard:
    """Utterance as heard: first audio after its beginning, and the silence after it, in seconds."""

    first_s: float
    silent_s: float
    error: str | None = None


def row(heard: Sequence[Heard], levels: Sequence[Sequence[int]]) -> Row:
    """Computes the figures of a run.

    Args:
        levels: open streams of each server, read at regular times.
    """
    good = [utterance for utterance in heard if utterance.error is None]
    busy = [level for level in levels if sum(level)]
    return {
        "utterances": len(heard),
        "errors": sorted({utterance.error for utterance in heard if utterance.error}),
        "first_audio_s": summary([utterance.first_s for utterance in good], 3),
        "without_gap": round(fmean(not utterance.silent_s for utterance in good), 4),
        "silent_s": round(sum(utterance.silent_s for utterance in good), 2),
        "open": round(fmean(sum(level) for level in busy), 2),
        "most_open": max(sum(level) for level in busy),
        "difference": round(fmean(max(level) - min(level) for level in busy), 2),
    }


# The costs of a server


def measure_costs(folder: Path, core: int, chunk_s: float) -> list[Row]:
    """Times chunks on one core.

    Args:
        chunk_s: seconds after which a chunk that was timed three times is not timed again.
    """
    os.sched_setaffinity(0, {core})
    model = Token2Wav.load(folder, runtime=RuntimeConfig("cpu", workers=1))
    return [
        chunk(model, 20, streams, hop, spoken_s, chunk_s)
        for streams in _BATCHES
        for hop, spoken_s in _CASES
    ]


def fitted_costs(folder: Path, cores: Sequence[int], chunk_s: float) -> Fit:
    """Times chunks on all cores at the same time, and fits costs to the medians."""
    command = [sys.executable, "-m", "lab.fleet.replicas", "--model", str(folder)]
    command += [f"--chunk-seconds={chunk_s}", "--core"]
    processes = [
        subprocess.Popen([*command, str(core)], stdout=subprocess.PIPE, text=True) for core in cores
    ]
    timed: list[Timed] = []
    for process in processes:
        output, _ = process.communicate()
        if process.returncode:
            raise SystemExit("replicas: the costs of the chunks could not be measured")
        timed += [
            (
                timing["streams"],
                ChunkWork(timing["computed_tokens"], round(PACE * timing["history_s"])),
                timing["total_ms"][0] / 1000,
            )
            for timing in json.loads(output.splitlines()[-1])
        ]
    return fit(timed)


# The simulated fleet


def simulate(kind: ServerKind, load: ReplicaLoad) -> Row:
    """Simulates a load."""
    events, outcomes, levels = Events(), list[Outcome](), list[list[int]]()
    fleet = Fleet(FullModel(kind), events, len(ADDRESSES), on_over=outcomes.append)
    for at, seconds in load.utterances:
        events.at(at, lambda seconds=seconds: fleet.speak(seconds))  # type: ignore[misc]

    def look() -> None:
        levels.append([len(replica.open) for replica in fleet.replicas])
        if fleet.open_streams or events.now < load.utterances[-1][0]:
            events.at(events.now + _LOOK_S, look)

    events.at(_LOOK_S, look)
    events.run()
    return row([Heard(outcome.first_s, outcome.silent_s) for outcome in outcomes], levels)


def delay_of(kind: ServerKind, alone_s: float) -> float:
    """Returns the seconds by which a lone utterance is later than it is simulated."""
    events, outcomes = Events(), list[Outcome]()
    alone = Fleet(FullModel(kind, speed=1000.0), events, 1, on_over=outcomes.append)
    alone.speak(1.0)
    events.run()
    return max(0.0, alone_s - outcomes[0].first_s)


# The real fleet


@contextmanager
def fleet(folder: Path) -> Iterator[tuple[list[Serving], list[str], int | None]]:
    """Starts the servers, each on its own core, and HAProxy if it is installed.

    Yields:
        The servers; the addresses for clients, one address if HAProxy chooses the server; and the
        process of HAProxy.
    """
    cores, ports = os.sched_getaffinity(0), Ports.free(ADDRESSES[0])
    status_port = Ports.free(ADDRESSES[0]).http
    with ExitStack() as stack:
        temporary = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        settings = temporary / "server.yaml"
        limits = {"player_buffer_seconds": BUFFER_S}
        settings.write_text(yaml.safe_dump({"runtime": {"workers": 1}, "limits": limits}))
        replicas = list[Serving]()
        stack.callback(os.sched_setaffinity, 0, cores)
        for address, core in zip(ADDRESSES, sorted(cores), strict=False):
            os.sched_setaffinity(0, {core})  # the processes of the server inherit it
            starting = Serving.replica(
                folder, address, ports, status_port, f"--config={settings}", "--canary-seconds=0"
            )
            replicas.append(stack.enter_context(starting))
        os.sched_setaffinity(0, cores)
        for replica in replicas:
            replica.wait_for_line("token2wav: ready, ")
        if shutil.which("haproxy") is None:
            yield replicas, [replica.url for replica in replicas], None
            return
        others = set(children(os.getpid()))
        balancer = stack.enter_context(
            Balancer.start(temporary, ADDRESSES, grpc_port=ports.grpc, status_port=status_port)
        )
        [process] = set(children(os.getpid())) - others
        balancer.wait_for(*["UP"] * len(ADDRESSES))
        yield replicas, [balancer.url], process


class Clients:
    """Clients of the real fleet.

    Args:
        clients: a client for each server; or one client of the balancer.
    """

    def __init__(
        self, clients: Sequence[AsyncClient], replicas: list[Serving], folder: Path
    ) -> None:
        self._config, self._clients, self._replicas = read_config(folder), clients, replicas
        voice = a_voice(self._config)
        self._voice = ClientVoice(voice.prompt_tokens, voice.prompt_mel, voice.speaker_embedding)
        self._tokens = drawn_tokens(self._config, 1000)
        self._balancer = LeastOpen[AsyncClient]()
        for client in clients:
            self._balancer.add(client)

    async def run(self, load: ReplicaLoad) -> Row:
        """Starts all utterances at their times, and waits until they have ended."""
        began, levels = time.monotonic(), list[list[int]]()

        async def begin(at: float, seconds: float) -> Heard:
            await asyncio.sleep(began + at - time.monotonic())
            return await self.speak(seconds)

        async def look() -> None:
            while True:
                await asyncio.sleep(_LOOK_S)
                levels.append(
                    [await asyncio.to_thread(replica.open_streams) for replica in self._replicas]
                )

        looking = asyncio.create_task(look())
        heard = await asyncio.gather(*[begin(at, seconds) for at, seconds in load.utterances])
        looking.cancel()
        return row(heard, levels)

    async def speak(self, seconds: float, speed: float = 1.0) -> Heard:
        client, began = self._balancer.open(), time.monotonic()
        assert client is not None
        pieces = list[tuple[float, float]]()
        try:
            async for part in client.synthesize(self._paced(seconds, speed), self._voice):
                pieces.append((time.monotonic() - began, part.duration_s))
        except ClientError as error:
            return Heard(0.0, 0.0, str(error))
        finally:
            self._balancer.close(client)
        silences = stalls([at for at, _ in pieces], [length for _, length in pieces], BUFFER_S)
        return Heard(pieces[0][0], sum(silences))

    async def _paced(self, seconds: float, speed: float) -> AsyncIterator[Any]:
        position = 0
        for at, count in messages(self._config, seconds, time.monotonic(), speed):
            await asyncio.sleep(at - time.monotonic())
            yield self._tokens[position : position + count]
            position += count


async def measure(
    replicas: list[Serving], urls: list[str], folder: Path, loads: Sequence[ReplicaLoad]
) -> tuple[float, list[Row]]:
    """Measures lone utterances, then every load.

    Returns:
        Median first audio of an utterance that is alone and whose tokens arrive at once, in
        seconds; and a row for each load.
    """
    clients = [AsyncClient(url) for url in urls]
    try:
        real = Clients(clients, replicas, folder)
        for _ in replicas:  # the voice is cached from then on
            await asyncio.gather(*[real.speak(1.0, 100.0) for _ in replicas])
        alone = [(await real.speak(1.0, 1000.0)).first_s for _ in range(_LONE)]
        rows = []
        for load in loads:
            rows.append(await real.run(load))
            print("  real     ", load.name, rows[-1], flush=True)
        return float(np.median(alone)), rows
    finally:
        for client in clients:
            await client.close()


def cpu_s(process: int) -> float:
    """Returns the processor time of a process in seconds."""
    user, system = stat_fields(process)[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = program_parser()
    parser.add_argument("--model", type=Path, default=TRAINED["demo_voice"], help="model folder")
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[1.0, 2.0, 3.0], help="utterances a second"
    )
    parser.add_argument(
        "--burst-rate", type=float, default=1.5, help="of utterances in bursts of 4"
    )
    parser.add_argument("--seconds", type=float, default=40.0, help="length of each load")
    parser.add_argument("--chunk-seconds", type=float, default=0.6, help="for each timed chunk")
    parser.add_argument("--name", default=NAME, help="name of the result file")
    parser.add_argument("--core", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    if options.core is not None:
        print(json.dumps(measure_costs(options.model, options.core, options.chunk_seconds)))
        return
    cores = sorted(os.sched_getaffinity(0))[: len(ADDRESSES)]
    fitted = fitted_costs(options.model, cores, options.chunk_seconds)
    print("costs", fitted, flush=True)
    loads = [ReplicaLoad.of(rate, options.seconds) for rate in options.rates]
    loads.append(ReplicaLoad.of(options.burst_rate, options.seconds, bursty=True))
    with fleet(options.model) as (replicas, urls, haproxy):
        before = cpu_s(haproxy) if haproxy else 0.0
        alone_s, real = asyncio.run(measure(replicas, urls, options.model, loads))
        balancer_s = cpu_s(haproxy) - before if haproxy else None
    config = read_config(options.model)
    kind = ServerKind(
        config,
        fitted.costs,
        limits=LimitConfig(player_buffer_seconds=BUFFER_S),
        prompt_tokens=PROMPT_TOKENS,
    )
    delay_s = delay_of(kind, alone_s)
    kind = replace(kind, costs=replace(fitted.costs, open_s=delay_s))
    rows = []
    for load, measured in zip(loads, real, strict=True):
        rows.append({"load": load.name, "real": measured, "simulated": simulate(kind, load)})
        print("  simulated", load.name, rows[-1]["simulated"], flush=True)
    speech_s = sum(seconds for load in loads for _, seconds in load.utterances)
    save(
        options.name,
        describe()
        | {
            "costs": asdict(fitted.costs),
            "cost_error": round(fitted.error, 3),
            "alone_s": round(alone_s, 4),
            "delay_s": round(delay_s, 4),
            "balancer": {
                "haproxy": haproxy is not None,
                "cpu_s": balancer_s,
                "speech_s": round(speech_s, 1),
            },
            "rows": rows,
        },
    )


if __name__ == "__main__":
    main()

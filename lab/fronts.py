"""Servers of several environments under the same load, in turns.

No server computes: the backend `pause` takes a set time for a batch. So the figures show scheduler,
Triton and gRPC. They include no time in which tokens arrive: the lateness of an audio chunk is the
time since a server without any delay would have sent its last sample. Up to 0.15 s are a choice
of the scheduler, which defers early audio that the listener does not need yet. If the lag of the
clients is not far below the lateness, other programs need the cores; with `setsid` in front of the
command, Linux gives it a share of its own. All servers must have the same checksums of audio.

The clients speak HTTP/2 themselves, because a message costs 0.34 ms of CPU time in the gRPC library
for Python, which is the cost in the server too, and 0.1 ms here.

    .venv/bin/python -m lab.fronts --servers this=.venv/bin/python
"""

from __future__ import annotations

import asyncio
import os
import re
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import yaml
from tritonclient.grpc import service_pb2

from benchmarks.environment import RESULTS, describe, program_parser, save
from benchmarks.load.listener import quantiles
from benchmarks.load.subject import CHOICES, Subject, model_folder
from lab.png import save_picture
from lab.stream_call import StreamCall
from testkit.rigs.processes import descendants, stat_fields
from testkit.rigs.serve_command import Serving
from testkit.simulation.listener import Listener
from testkit.simulation.server import Costs, Events, ServerKind, SimulatedServer
from token2wav import AudioChunk
from token2wav.config import LimitConfig, ServerConfig
from token2wav.config.values import from_mapping
from token2wav_client import ClientError
from token2wav_client.listening import milliseconds, stalls
from token2wav_client.wire import Opening, build_request, read_response

SETTINGS: dict[str, dict[str, Any]] = {
    "runtime": {"backend": "pause", "workers": 1},
    "limits": {"streams": 1024, "batch_streams": 64},
}
LOADS = ("80x25x1", "250x5x5", "400x5x5/instant", "12x5x5/instant")
_METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"
_PATIENCE_S = 120.0  # after the last message
_WARM_UP_S = 0.001  # between the messages of the first utterance
_PROGRAMS = {"tritonserver": "triton", "triton_python_backend_stub": "model"}
_ENGINE = "token2wav_server.engine"


@dataclass(frozen=True)
class Load:
    """Load of clients that each speak one utterance.

    Attributes:
        client_messages_per_s: messages of one client.
        tokens: tokens of a message.
        instant: whether batches take no time.
        starts_s: seconds in which the clients begin, one after the other.
    """

    clients: int
    client_messages_per_s: float
    tokens: int
    instant: bool = False
    starts_s: float = 4.0

    @classmethod
    def of(cls, text: str) -> Load:
        """Reads CLIENTSxMESSAGESxTOKENS, and `/instant` for batches that take no time.

        Raises:
            ValueError: the text does not have this form.
        """
        match = re.fullmatch(r"(\d+)x(\d+(?:\.\d+)?)x(\d+)(/instant)?", text)
        if not match:
            raise ValueError(f"{text!r} is no load, such as {', '.join(LOADS)}")
        return cls(int(match[1]), float(match[2]), int(match[3]), bool(match[4]))

    def __str__(self) -> str:
        instant = ", instant" if self.instant else ""
        return f"{self.clients} x {self.client_messages_per_s:g}/s x {self.tokens}{instant}"

    def settings(self, settings: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        runtime = {**settings.get("runtime", {})}
        if self.instant:
            runtime |= {"pause_batch_ms": 0, "pause_token_ms": 0}
        return {**{key: dict(part) for key, part in settings.items()}, "runtime": runtime}


class Ideal(Listener):
    """Listener of a server without delay.

    Attributes:
        chunks_s: arrival of each chunk, and the audio until its end, both in seconds.
    """

    def __init__(self, coming: Sequence[tuple[float, int]], events: Events) -> None:
        super().__init__(coming, events, LimitConfig().player_buffer_seconds)
        self.chunks_s: list[tuple[float, float]] = []

    def send(self, chunk: AudioChunk) -> None:
        super().send(chunk)
        self.chunks_s.append((self._events.now, self.playback.seconds_sent))


@dataclass(frozen=True)
class Script:
    """Utterance of all clients.

    Attributes:
        messages: requests without the id of the utterance.
        gap_s: seconds between messages.
        audio_s: length of the audio.
        ideal_s: (chunks, 2) as `Ideal.chunks_s`.
    """

    messages: tuple[bytes, ...]
    gap_s: float
    audio_s: float
    ideal_s: np.ndarray[Any, np.dtype[np.float64]]

    @classmethod
    def of(cls, subject: Subject, load: Load, settings: Mapping[str, Any]) -> Script:
        """Writes the utterance of a load for a server with these settings."""
        tokens, gap_s = subject.tokens, 1 / load.client_messages_per_s
        portions = np.split(tokens, range(load.tokens, len(tokens), load.tokens))
        opening = Opening(subject.voice, audio_format="int16")
        messages = (
            build_request(
                "token2wav",
                "",
                str(number),
                portion,
                opening=None if number else opening,
                end=number == len(portions) - 1,
            ).SerializeToString()
            for number, portion in enumerate(portions)
        )
        server = from_mapping(ServerConfig, settings, "")
        prompt = len(subject.voice.prompt_tokens) if subject.voice else 0
        kind = ServerKind(
            subject.config, Costs(), server.stream, server.limits, prompt_tokens=prompt
        )
        coming = [(number * gap_s, len(portion)) for number, portion in enumerate(portions)]
        events = Events()
        listener = Ideal(coming, events)
        listener.connect(SimulatedServer(kind, events))
        listener.feed()
        events.run()
        return cls(tuple(messages), gap_s, subject.audio_s, np.array(listener.chunks_s))

    def late_s(self, arrivals_s: Sequence[float], durations_s: Sequence[float]) -> list[float]:
        """Returns how late each chunk is, in seconds; 0 for a chunk that is early."""
        times_s, ends_s = self.ideal_s.T
        ideal = np.searchsorted(ends_s, np.cumsum(durations_s) - 1e-6)
        late_s = np.asarray(arrivals_s) - times_s[np.minimum(ideal, len(times_s) - 1)]
        return [float(seconds) for seconds in np.maximum(0, late_s)]


@dataclass
class Spoken:
    """Utterance of one client.

    Attributes:
        arrivals_s, durations_s: arrival since the start, and length, of each chunk.
        answered: number of messages with a complete answer.
        ended_at: time of the last answer, on the monotonic clock.
        lags_s: delay with which the client sent each message.
        checksum: of all audio.
    """

    arrivals_s: list[float] = field(default_factory=list)
    durations_s: list[float] = field(default_factory=list)
    answered: int = 0
    ended_at: float = 0.0
    lags_s: list[float] = field(default_factory=list)
    checksum: int = 0
    error: str = ""


async def speak(address: str, script: Script, at: float) -> Spoken:
    """Speaks an utterance from a time on the monotonic clock on.

    Errors of the server are a part of the result.
    """
    spoken = Spoken()

    def accept(content: bytes) -> None:
        now = time.monotonic()
        try:
            answer = read_response(
                service_pb2.ModelStreamInferResponse.FromString(content), "int16"
            )
        except ClientError as error:
            spoken.error = str(error)
            call.close()
            return
        if answer.chunk and len(answer.chunk.audio):
            spoken.arrivals_s.append(now - at)
            spoken.durations_s.append(answer.chunk.duration_s)
            spoken.checksum = crc32(answer.chunk.audio.tobytes(), spoken.checksum)
        spoken.answered += answer.last_of_request
        spoken.ended_at = now
        if spoken.answered == len(script.messages):
            call.close()

    call = await StreamCall.open(address, _METHOD, accept)
    # The fields of concatenated messages are merged, so the id is written once for an utterance.
    sequence = service_pb2.InferParameter(string_param=uuid.uuid4().hex)
    end = service_pb2.ModelInferRequest(parameters={"sequence_id": sequence}).SerializeToString()
    for number, message in enumerate(script.messages):
        due = at + number * script.gap_s
        await asyncio.sleep(due - time.monotonic())
        spoken.lags_s.append(time.monotonic() - due)
        if call.ended.done():
            break
        call.send(message + end)
    try:
        await asyncio.wait_for(call.ended, _PATIENCE_S)
    except (ConnectionError, asyncio.TimeoutError) as error:
        spoken.error = spoken.error or str(error) or "no answer"
    call.close()
    if not spoken.error and abs(sum(spoken.durations_s) - script.audio_s) > 1e-6:
        spoken.error = "incomplete audio"
    return spoken


async def run_load(address: str, script: Script, load: Load) -> tuple[list[Spoken], float]:
    """Runs all clients in this thread. Returns their utterances, and the start of the first one on
    the monotonic clock.
    """
    start = time.monotonic() + 1.0  # when all are connected
    delays = np.linspace(0, load.starts_s, load.clients, endpoint=False).tolist()
    spoken = await asyncio.gather(*[speak(address, script, start + delay) for delay in delays])
    return spoken, start


def cpu_seconds(process: int) -> dict[str, float]:
    """Returns the CPU time of a server so far, by kind of process, in seconds."""
    seconds: dict[str, float] = {}
    for pid in (process, *descendants(process)):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            ticks = sum(map(int, stat_fields(pid)[11:13]))  # of the user and of the system
        except OSError:  # it has ended meanwhile
            continue
        kind = "engine" if _ENGINE in words else _PROGRAMS.get(Path(words[0]).name, "launcher")
        seconds[kind] = seconds.get(kind, 0.0) + ticks / os.sysconf("SC_CLK_TCK")
    return seconds


def row(
    load: Load, script: Script, spoken: Sequence[Spoken], start: float, cpu_s: Mapping[str, float]
) -> dict[str, Any]:
    """Computes the figures of a load.

    Args:
        cpu_s: CPU time of each kind of process, and of the clients.
    """
    late_s = [
        script.late_s(utterance.arrivals_s, utterance.durations_s)
        for utterance in spoken
        if utterance.arrivals_s
    ]
    answered = sum(utterance.answered for utterance in spoken)
    seconds = max(utterance.ended_at for utterance in spoken) - start
    last_start_s = load.starts_s * (1 - 1 / load.clients)
    offered_s = last_start_s + script.gap_s * (len(script.messages) - 1)
    buffer_s = LimitConfig().player_buffer_seconds
    return {
        "load": str(load),
        **asdict(load),
        "utterances": len(spoken),
        "errors": dict(Counter(utterance.error for utterance in spoken if utterance.error)),
        "checksums": sorted({utterance.checksum for utterance in spoken if not utterance.error}),
        "offered_messages_per_s": round(load.clients * len(script.messages) / offered_s),
        "messages_per_s": round(answered / seconds),
        "first_audio_late_ms": milliseconds(late[0] for late in late_s),
        "chunk_late_ms": milliseconds(late for chunks in late_s for late in chunks),
        "underrun_utterances": sum(
            bool(utterance.arrivals_s)
            and bool(stalls(utterance.arrivals_s, utterance.durations_s, buffer_s))
            for utterance in spoken
        ),
        "cpu_ms_per_message": {
            kind: round(1000 * value / max(1, answered), 3) for kind, value in cpu_s.items()
        },
        "clients_share_of_a_core": round(cpu_s["clients"] / seconds, 3),
        "client_lag_ms": milliseconds(lag for utterance in spoken for lag in utterance.lags_s),
    }


def as_line(result: Mapping[str, Any]) -> str:
    first, chunk, lag = (
        quantiles(result[f"{name}_ms"], "p50", "p99")
        for name in ("first_audio_late", "chunk_late", "client_lag")
    )
    cpu = " + ".join(f"{kind} {ms:.2f}" for kind, ms in result["cpu_ms_per_message"].items())
    return (
        f"{result['load']:24} {result['server']:10} {result['messages_per_s']:5} of "
        f"{result['offered_messages_per_s']:5} messages/s; late by ms (p50 / p99): first audio "
        f"{first}, chunks {chunk}; {result['underrun_utterances']} underruns; CPU ms a message: "
        f"{cpu}; lag of clients {lag} ms; errors {result['errors']}"
    )


@dataclass(frozen=True)
class Server:
    """Server to measure.

    Attributes:
        python: interpreter of its environment.
        front: its setting `server.front`; empty for none, which older checkouts do not know.
    """

    python: Path
    front: str = ""

    @classmethod
    def of(cls, text: str) -> Server:
        """Reads PYTHON or PYTHON@FRONT.

        Raises:
            ValueError: there is no such interpreter.
        """
        python, _, front = text.partition("@")
        if not Path(python).is_file():
            raise ValueError(f"{python}: there is no such interpreter")
        return cls(Path(python).absolute(), front)


def measure(
    server: Server, folder: Path, subject: Subject, load: Load, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Starts a server, and returns its figures under a load."""
    settings = load.settings(settings)
    script = Script.of(subject, load, settings)
    if server.front:
        settings["server"] = {"front": server.front}
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(settings, file)
        file.flush()
        with Serving.start(folder, f"--config={file.name}", python=server.python) as serving:
            serving.wait_for_line("ready, gRPC ")
            # The first utterance registers the voice.
            quick = replace(script, gap_s=_WARM_UP_S)
            asyncio.run(speak(serving.url, quick, time.monotonic()))
            before, clients_s = cpu_seconds(serving.process.pid), time.process_time()
            spoken, start = asyncio.run(run_load(serving.url, script, load))
            cpu_s = {"clients": time.process_time() - clients_s}
            for kind, seconds in cpu_seconds(serving.process.pid).items():
                cpu_s[kind] = seconds - before.get(kind, 0.0)
            serving.process.terminate()
            serving.wait()
    return row(load, script, spoken, start, cpu_s)


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws three figures of every server and load, with a bar for each turn."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    panels = {
        "messages a second": lambda row: row["messages_per_s"],
        "first audio late by ms, p99": lambda row: row["first_audio_late_ms"]["p99"],
        "CPU ms of the server a message": lambda row: (
            sum(row["cpu_ms_per_message"].values()) - row["cpu_ms_per_message"]["clients"]
        ),
    }
    loads, servers = (list(dict.fromkeys(row[key] for row in rows)) for key in ("load", "server"))
    turns = max(row["turn"] for row in rows)
    size = (12, 1.5 + len(loads))
    figure, axes = plt.subplots(1, len(panels), figsize=size, sharey=True, layout="constrained")
    for axis, (title, value) in zip(axes, panels.items(), strict=True):
        for row in rows:
            if row["first_audio_late_ms"]:
                server = servers.index(row["server"])
                bar = (server * turns + row["turn"] - 1) / (turns * len(servers) + 1)
                height, colour = 0.8 / (turns * len(servers)), f"C{server}"
                label = row["server"] if (row["turn"], row["load"]) == (1, loads[0]) else None
                position = loads.index(row["load"]) + bar
                axis.barh(
                    position, value(row), height, color=colour, label=label, edgecolor="white"
                )
        axis.set(title=title)
    axes[1].set(xscale="log", xlim=(1, None))
    axes[1].xaxis.set_major_formatter("{x:g}")
    axes[0].set_yticks([index + 0.35 for index in range(len(loads))], labels=loads)
    axes[0].invert_yaxis()
    handles = axes[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=len(servers))
    save_picture(figure, path, dpi=80)


def servers_of(words: Sequence[str]) -> dict[str, Server]:
    """Reads NAME=PYTHON or NAME=PYTHON@FRONT of each server.

    Raises:
        ValueError: a word has another form, or there is no such interpreter.
    """
    pairs = [word.partition("=") for word in words]
    return {name: Server.of(text) for name, _, text in pairs}


def main() -> None:
    parser = program_parser()
    parser.add_argument(
        "--servers",
        nargs="+",
        required=True,
        metavar="NAME=PYTHON[@FRONT]",
        help="servers to compare: a name, the interpreter of the environment, and for checkouts "
        "that know the setting server.front its value",
    )
    parser.add_argument(
        "--loads",
        nargs="+",
        default=LOADS,
        metavar="LOAD",
        help="clients, messages a second of each, tokens of a message; /instant for batches that "
        f"take no time (default: {' '.join(LOADS)})",
    )
    parser.add_argument("--turns", type=int, default=2, help="times that each server runs")
    parser.add_argument("--tokens", type=int, default=250, help="of an utterance")
    parser.add_argument("--model", default="tiny", help=CHOICES)
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help=f"settings of the servers (default: {SETTINGS})"
    )
    parser.add_argument("--name", default="serving_fronts", help="name of the result file")
    options = parser.parse_args()
    settings = yaml.safe_load(options.config.read_text()) if options.config else SETTINGS
    servers, loads = servers_of(options.servers), [Load.of(text) for text in options.loads]
    facts, rows = describe(), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as temporary:
        folder = model_folder(options.model, Path(temporary))
        subject = Subject.of(folder, 1.0)
        subject = Subject.of(folder, options.tokens / subject.config.token_frame_rate)
        for load in loads:
            for turn in range(1, options.turns + 1):
                for name, server in servers.items():
                    figures = measure(server, folder, subject, load, settings)
                    rows.append({"server": name, "turn": turn, **figures})
                    print(as_line(rows[-1]), flush=True)
                    # After each row, because all rows together take many minutes.
                    result = {"model": options.model, "settings": settings, "rows": rows}
                    save(options.name, {**facts, **result})
    draw(rows, RESULTS / f"{options.name}.png")


if __name__ == "__main__":
    main()

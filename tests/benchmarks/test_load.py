"""Load generators: the search for the highest rate without gaps, and the figures of a load."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from benchmarks.load import servers
from benchmarks.load.closed_loop import Load, row
from benchmarks.load.listener import Heard
from benchmarks.load.open_loop import highest_rate, next_rate
from benchmarks.load.servers import SETTINGS, Script, Spoken
from benchmarks.load.subject import Subject
from testkit.models.golden import TINY
from testkit.rigs.raw_grpc import StreamCall
from token2wav import RuntimeConfig, Token2Wav, Voice
from token2wav_client.listening import record

RATE = 8000


def result(rate: float, free_of_gaps: bool) -> dict[str, Any]:
    return {
        "utterances_per_s": rate,
        "utterances": 8,
        "complete": 8,
        "buffer_200": 1.0 if free_of_gaps else 0.875,
        "scheduling_lag_ms": {"p50": 0.0, "p99": 1.0},
    }


@pytest.mark.parametrize(
    ("limit", "measured", "highest"),
    [
        (3.0, [1.0, 2.0, 4.0], 2.0),
        (9.0, [1.0, 2.0, 4.0], 4.0),
        (0.3, [1.0, 0.5, 0.25], 0.25),
        (0.0, [1.0, 0.5, 0.25, 0.125], None),
    ],
)
def test_rates_rise_until_one_has_gaps_or_fall_until_none_has(
    limit: float, measured: list[float], highest: float | None
) -> None:
    rows: list[dict[str, Any]] = []
    while (rate := next_rate([4.0, 1.0, 2.0], rows)) is not None:
        rows.append(result(rate, rate <= limit))
    assert [row["utterances_per_s"] for row in rows] == measured
    assert highest_rate(rows) == highest


def heard(*arrivals_s: float, complete: bool = True) -> Heard:
    """Returns an utterance of chunks of a second; its first chunk took 0.25 s after its tokens."""
    chunks = [(arrival_s, np.zeros(RATE, np.int16)) for arrival_s in arrivals_s]
    return Heard(record(chunks, RATE, arrivals_s[-1], complete=complete), 0.0, 0.25)


def test_a_load_counts_gaps_after_the_buffer_of_the_player_and_complete_utterances_only() -> None:
    load = Load(3, 25.0, buffer_s=0.5)
    # The second chunk is 0.08 s and 0.3 s late for a player that waits 0.5 s.
    utterances = [heard(1.0, 2.58), heard(1.0, 2.8), heard(1.0, complete=False)]
    result = row("batching", load, utterances, 8.0, {"sum": 6.0, "count": 4.0})
    assert result["load"] == "3 clients, 25 tokens/s"
    assert (result["utterances"], result["failed"]) == (2, ["incomplete audio"])
    assert result["first_audio_ms"]["p50"] == 250.0
    assert result["first_playable_ms"]["p50"] == 1000.0
    assert result["share_without_gaps"] == {"0.05 s": 0.0, "0.1 s": 0.5, "0.2 s": 0.5}
    assert (result["audio_seconds_per_second"], result["mean_batch"]) == (0.5, 1.5)


@pytest.fixture(scope="module")
def script() -> Script:
    """Utterance of 200 tokens in messages of 5, five in a second."""
    return Script.of(Subject.of(TINY, 8.0), servers.Load.of("3x5x5"), SETTINGS)


def test_the_ideal_server_sends_the_chunks_of_the_library_when_their_tokens_arrive(
    script: Script,
) -> None:
    subject = Subject.of(TINY, 8.0)
    model = Token2Wav.load(TINY, runtime=RuntimeConfig(backend="pause"))
    now, expected = 0.0, []
    model.pipeline.clock = lambda: now
    sent = subject.voice
    assert sent is not None
    voice = Voice(sent.prompt_tokens, sent.prompt_mel, sent.speaker_embedding)
    with model.stream(voice) as stream:
        for number, portion in enumerate(np.split(subject.tokens, 40)):
            now = 0.2 * number
            take = stream.finish if number == 39 else stream.push
            expected += [(now, chunk.duration_s) for chunk in take(portion)]
    times_s, durations_s = np.array(expected).T
    assert script.ideal_s[0] == pytest.approx([times_s[0], durations_s[0]])
    assert script.ideal_s[-1] == pytest.approx([times_s[-1], 8.0])
    assert script.late_s(times_s + 0.5, durations_s) == pytest.approx(
        [0.5] * len(expected), abs=0.2
    )


def test_figures_of_servers(script: Script) -> None:
    load, (times_s, ends_s) = servers.Load.of("3x5x5"), script.ideal_s.T
    durations_s = np.diff(ends_s, prepend=0).tolist()
    spoken = [
        Spoken((times_s + late_s).tolist(), durations_s, 40, 16.0, [0.001], 7)
        for late_s in (-1.0, 0.25)  # early audio is not late
    ]
    spoken.append(Spoken(answered=20, ended_at=15.0, error="no answer"))
    result = servers.row(load, script, spoken, 6.0, {"clients": 0.5, "triton": 0.2})
    assert (result["messages_per_s"], result["offered_messages_per_s"]) == (10, 11)
    assert result["first_audio_late_ms"]["p50"] == 125.0
    assert result["chunk_late_ms"]["max"] == 250.0
    assert (result["errors"], result["checksums"]) == ({"no answer": 1}, [7])
    assert result["cpu_ms_per_message"] == {"clients": 5.0, "triton": 2.0}
    assert result["clients_share_of_a_core"] == 0.05
    assert result["client_lag_ms"]["p99"] == 1.0


def test_loads_and_servers_of_the_command_line(tmp_path: Path) -> None:
    load = servers.Load.of("400x2.5x5/instant")
    assert (load.clients, load.client_messages_per_s, load.tokens, load.instant) == (
        400,
        2.5,
        5,
        True,
    )
    runtime = {"backend": "pause", "workers": 1, "pause_batch_ms": 0, "pause_token_ms": 0}
    assert load.settings(SETTINGS) == {**SETTINGS, "runtime": runtime}
    with pytest.raises(ValueError, match="'80x25' is no load, such as 80x25x1"):
        servers.Load.of("80x25")
    (tmp_path / "python").touch()
    python = tmp_path / "python"
    assert servers.servers_of([f"old={python}", f"new={python}@native"]) == {
        "old": servers.Server(python),
        "new": servers.Server(python, "native"),
    }
    with pytest.raises(ValueError, match="nowhere: there is no such interpreter"):
        servers.servers_of(["old=nowhere"])


def test_the_cpu_time_of_a_server_is_of_its_processes() -> None:
    before = servers.cpu_seconds(os.getpid())["launcher"]
    while os.times().user - before < 0.05:
        pass
    assert servers.cpu_seconds(os.getpid())["launcher"] > before


METHOD = "/test.Echo/Echo"


@pytest.fixture
def echo() -> Iterator[str]:
    """Address of a gRPC server that repeats each message, and ends the call after b"end"."""

    def repeat(messages: Iterator[bytes], _: Any) -> Iterator[bytes]:
        for message in messages:
            if message == b"end":
                return
            yield message

    handler = grpc.stream_stream_rpc_method_handler(repeat)
    with ThreadPoolExecutor(2) as threads:
        server = grpc.server(threads)
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("test.Echo", {"Echo": handler}),)
        )
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield f"127.0.0.1:{port}"
        server.stop(0).wait()


def test_a_call_sends_and_receives_messages_of_any_size(echo: str) -> None:
    """Messages above 16 KB need several frames, and those above 64 KB wait for the server."""
    sent = [bytes([index]) * size for index, size in enumerate([0, 1, 40_000, 3_000_000, 7])]

    async def exchange() -> list[bytes]:
        received: list[bytes] = []
        call = await StreamCall.open(echo, METHOD, received.append)
        for message in sent:
            call.send(message)
        while len(received) < len(sent):
            await asyncio.sleep(0.01)
        call.close()
        await call.ended
        return received

    assert asyncio.run(asyncio.wait_for(exchange(), 60)) == sent


@pytest.mark.parametrize("method", [METHOD, "/test.Echo/Unknown"])
def test_a_call_that_the_server_ends(echo: str, method: str) -> None:
    async def end() -> None:
        call = await StreamCall.open(echo, method, lambda _: None)
        call.send(b"end")
        with pytest.raises(ConnectionError, match="the server has ended the call"):
            await asyncio.wait_for(call.ended, 60)

    asyncio.run(end())

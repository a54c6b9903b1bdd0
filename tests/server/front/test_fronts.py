"""Both fronts in a real tritonserver, before an engine that the test plays."""

from __future__ import annotations

import json
import signal
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tritonclient.grpc import InferInput

from testkit.models.golden import ROOT
from testkit.patience import PATIENCE_SECONDS, run_elsewhere, until
from testkit.rigs.fake_engine import FakeEngine, frame
from testkit.rigs.front_server import Server, tritonserver
from testkit.rigs.processes import entries, resident_mib
from testkit.rigs.server_rig import Connection as Client
from testkit.rigs.server_rig import is_final, request_input
from token2wav_server.engine.frames import (
    AUDIO,
    FAILED,
    FINISHED,
    READY,
    FailedFrame,
    RequestFrame,
    audio_frame,
    failed_frame,
    finished_frame,
    ready_frame,
)

ENDED = "engine: its process has ended; send the utterance again"
STARTING = "engine: it is starting; send the utterance again in some seconds"
SLOW = "engine: it does not read fast enough; send the utterance again"
TOKENS = np.arange(5, dtype=np.int32)
FRAME_LIMIT = 64 << 20
REFUSALS = 50


@pytest.fixture(
    scope="module",
    params=["native", pytest.param("python", marks=pytest.mark.python_models)],
)
def front(request: pytest.FixtureRequest) -> Path:
    if request.param == "python":
        return ROOT / "model_repository" / "token2wav" / "1" / "model.py"
    library: Path = request.getfixturevalue("native_library")
    return library


@pytest.fixture(scope="module")
def server(front: Path) -> Iterator[Server]:
    with tritonserver(front) as server:
        first = FakeEngine(server.engine_path)
        until(lambda: server.ready or server.process.poll() is not None)
        assert server.process.poll() is None, server.log
        first.stop()
        yield server
        assert server.process.poll() is None, "it has ended"


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client.open(server.grpc_url) as client:
        yield client


def _accepted(client: Client, engine: FakeEngine) -> bool:
    """Sends a request, which the front may refuse for as long as it has not read the greeting."""
    client.send(TOKENS)
    until(lambda: not client.inbox.empty() or not engine.requests.empty())
    if not client.inbox.empty():
        assert client.error() == STARTING
        return False
    engine.send(finished_frame(engine.request().slot))
    return is_final(client.receive())


@pytest.fixture
def engine(server: Server, client: Client) -> Iterator[FakeEngine]:
    """A new engine, whose greeting the front has read."""
    engine = FakeEngine(server.engine_path)
    engine.wait_for_front()
    until(lambda: _accepted(client, engine))
    yield engine
    engine.stop()


def exchange(
    client: Client, engine: FakeEngine, tokens: Any = TOKENS, *arguments: Any, **options: Any
) -> RequestFrame:
    """Sends a request, and finishes it."""
    client.send(tokens, *arguments, **options)
    until(lambda: not client.inbox.empty() or not engine.requests.empty())
    assert client.inbox.empty(), client.receive()  # a refusal
    request = engine.request()
    engine.send(finished_frame(request.slot))
    assert is_final(client.receive())
    return request


def test_requests_arrive_as_they_were_sent(client: Client, engine: FakeEngine) -> None:
    tokens = np.zeros(0, np.int32)
    voice: dict[str, NDArray[Any]] = {
        "prompt_mel": np.random.default_rng(0).random((7, 80), np.float32),
        "voice_id": np.arange(256, dtype=np.uint8),
    }
    parameters: dict[str, str | int | bool | float] = {
        "text": 'a "quoted" \\ line\n\x01\x7f é 𝄞',
        "": "",
        "n": -(2**63),
        "yes": True,
        "speed": 1.0,
        "exact": 0.1,
        "tiny": 5e-324,
        "infinite": float("-inf"),
    }
    first = exchange(client, engine, tokens, voice, 2**63 - 1, parameters=parameters, start=True)
    second = exchange(client, engine, sequence="é" * 64, end=True)
    third = exchange(client, engine)
    assert (first.sequence_id, second.sequence_id, third.sequence_id) == (2**63 - 1, "é" * 64, 0)
    assert (first.flags, second.flags, third.flags) == (1, 2, 0)
    received = json.loads(first.parameters)
    assert received == parameters
    assert isinstance(received["speed"], float)
    assert json.loads(second.parameters or "{}") == {}
    inputs = {"tokens": tokens, **voice}
    assert first.inputs.keys() == inputs.keys()
    for name, array in inputs.items():
        assert first.inputs[name].dtype == array.dtype
        assert np.array_equal(first.inputs[name], array)
    assert first.slot < second.slot < third.slot


def test_responses_arrive_as_they_were_sent(client: Client, engine: FakeEngine) -> None:
    client.send(TOKENS)
    slot = engine.request().slot
    chunks = [
        {
            "audio": np.random.default_rng(size).random(size, np.float32),
            "chunk_index": np.array([size], np.int32),
            "final": np.array([size == 0]),
        }
        for size in (24_000, 1, 0)
    ]
    engine.send(*(audio_frame(slot, chunk) for chunk in chunks), finished_frame(slot))
    for chunk in chunks:
        response = client.receive()
        assert not is_final(response)
        assert {output.name for output in response.get_response().outputs} == chunk.keys()
        for name, array in chunk.items():
            assert np.array_equal(response.as_numpy(name), array)
    assert is_final(client.receive())


def test_a_frame_in_pieces(client: Client, engine: FakeEngine) -> None:
    client.send(TOKENS)
    slot = engine.request().slot
    audio = np.arange(1000, dtype=np.float32)
    for byte in audio_frame(slot, {"audio": audio})[:200]:
        engine.send(bytes([byte]))
    engine.send(audio_frame(slot, {"audio": audio})[200:])
    assert np.array_equal(client.receive().as_numpy("audio"), audio)


@pytest.mark.parametrize("status", range(5))
def test_errors(status: int, client: Client, engine: FakeEngine) -> None:
    client.send(TOKENS)
    slot = engine.request().slot
    text = f'tokens: "é" of status {status}'
    engine.send(failed_frame(FailedFrame(slot, status, text)), finished_frame(slot))
    assert client.error() == text
    exchange(client, engine)


def test_an_output_that_the_model_lacks_fails_its_request_only(
    front: Path, client: Client, engine: FakeEngine
) -> None:
    if front.suffix == ".py":
        pytest.skip("Triton's Python backend logs the output and drops it")
    client.send(TOKENS)
    slot = engine.request().slot
    engine.send(audio_frame(slot, {"video": np.zeros(1, np.float32)}), finished_frame(slot))
    assert "video" in client.error()
    exchange(client, engine)


def test_cancellation_reaches_the_engine_once(server: Server, engine: FakeEngine) -> None:
    with Client.open(server.grpc_url) as client:
        for _ in range(3):
            client.send(TOKENS)
        slots = [engine.request().slot for _ in range(3)]
        engine.send(finished_frame(slots[0]))
        assert is_final(client.receive())
        client.cancel()
        cancelled = [engine.cancelled.get(timeout=PATIENCE_SECONDS)[0] for _ in range(2)]
        assert sorted(cancelled) == slots[1:]
        # The engine may answer what it has computed already.
        engine.send(*(audio_frame(slot, {"audio": np.zeros(9, np.float32)}) for slot in slots))
        time.sleep(0.3)
        assert engine.cancelled.empty()
        engine.send(*map(finished_frame, slots))
    with Client.open(server.grpc_url) as client:
        exchange(client, engine)


def test_the_end_of_the_engine_and_a_new_one(
    server: Server, client: Client, engine: FakeEngine
) -> None:
    for sequence in range(10):
        client.send(TOKENS, sequence=sequence)
    for _ in range(10):
        engine.request()
    engine.stop()
    assert [client.error() for _ in range(10)] == [ENDED] * 10
    client.send(TOKENS, sequence=9)  # before the client has read the error
    assert client.error() == ENDED
    client.send(TOKENS, sequence=9, start=True)
    assert client.error() == STARTING
    client.send(TOKENS)
    assert client.error() == STARTING
    assert server.ready, "tritonserver goes on"
    successor = FakeEngine(server.engine_path)
    successor.wait_for_front()
    try:
        until(lambda: _accepted(client, successor))
    finally:
        successor.stop()


def test_an_engine_that_is_not_ready(server: Server, client: Client) -> None:
    silent = FakeEngine(server.engine_path, greeting=b"")
    silent.wait_for_front()
    try:
        client.send(TOKENS)
        assert client.error() == STARTING
    finally:
        silent.stop()


def test_refused_clients_leave_no_connection(server: Server) -> None:
    """Each ends its requests, and does not cancel: Triton 2.51 keeps the connection of many clients
    that cancel at the moment of their last response.
    """

    def connections_after_a_refusal() -> int:
        with Client.open(server.grpc_url) as client:
            client.send(TOKENS)
            assert client.error() in (ENDED, STARTING)
            run_elsewhere(client.client.stop_stream)  # waits for the end of the stream
        return entries(server.process.pid, "fd")

    first = connections_after_a_refusal()
    for _ in range(REFUSALS):
        connections_after_a_refusal()
    until(lambda: entries(server.process.pid, "fd") <= first + 2)


SLOT = struct.pack("<Q", 10**18)
# One frame for each place in which a front refuses frames. The contents of frames are tested with
# the parsers: tests/server/front/test_native_frames.py and tests/server/engine/test_frames.py.
BAD_FRAMES = {
    "no kind": struct.pack("<I", 0),
    "too long": struct.pack("<IB", FRAME_LIMIT + 1, AUDIO),
    "unknown kind": frame(77, b""),
    "of the front": frame(1, b""),
    "ready again": frame(READY, struct.pack("<I", 1)),
    "wrong size": frame(AUDIO, audio_frame(1, {"a": np.zeros(2, np.int8)})[5:-1]),
    "half a slot": frame(FINISHED, SLOT + SLOT[:4]),
    "status": frame(FAILED, SLOT + b"\5"),
}


@pytest.mark.parametrize("bad", BAD_FRAMES)
def test_a_bad_frame_ends_the_connection_only(
    bad: str, server: Server, client: Client, engine: FakeEngine
) -> None:
    client.send(TOKENS)
    engine.request()
    engine.send(BAD_FRAMES[bad])
    assert client.error() == ENDED
    until(lambda: _accepted(client, engine))
    assert server.process.poll() is None


def test_a_client_sends_a_long_utterance_at_once(client: Client, engine: FakeEngine) -> None:
    codes = np.zeros(15_000 * 32, np.int32)  # 2 MB
    utterances = 10
    for number in range(1, utterances + 1):
        client.send(TOKENS, sequence=number, start=True)
        client.send(codes, sequence=number)
        client.send(TOKENS, sequence=number, end=True)
    open_requests = 3 * utterances
    while open_requests:
        until(lambda: not client.inbox.empty() or not engine.requests.empty())
        while not engine.requests.empty():
            engine.send(finished_frame(engine.request().slot))
        while not client.inbox.empty():
            assert is_final(client.receive())
            open_requests -= 1


def test_an_engine_that_does_not_read(server: Server, client: Client, engine: FakeEngine) -> None:
    engine.reading.clear()
    before = resident_mib(server.process.pid)
    tokens = np.zeros(250_000, np.int32)  # 1 MB
    voice = {"prompt_mel": np.zeros((15_000, 80), np.float32)}  # 5 MB
    for _ in range(75):
        client.send(tokens, voice)
    assert {client.error() for _ in range(60)} == {SLOW}
    grown = resident_mib(server.process.pid) - before
    assert grown < 400, f"{grown} MiB"
    engine.reading.set()
    open_requests = 75 - 60
    while open_requests:
        until(lambda: not client.inbox.empty() or not engine.requests.empty())
        while not engine.requests.empty():
            engine.send(finished_frame(engine.request().slot))
        while not client.inbox.empty():
            client.inbox.get()
            open_requests -= 1
    exchange(client, engine, tokens)


def test_a_request_that_is_too_large(client: Client, engine: FakeEngine) -> None:
    client.send(np.zeros(FRAME_LIMIT // 4, np.int32))
    error = client.error()
    assert error.startswith("request: 67108"), error
    assert error.endswith(" bytes; at most 67108864 are allowed")
    exchange(client, engine)


@pytest.mark.parametrize("shape", [[0, 2**62], [0, 2**24 + 1]])
def test_an_empty_input_whose_shape_numpy_refuses(
    shape: list[int], front: Path, client: Client, engine: FakeEngine
) -> None:
    """It must not end the engine, which holds inputs in NumPy."""
    if front.suffix == ".py" and shape[1] > 2**32:
        pytest.skip("it ends the stub of Triton 2.51 before the front reads it")
    tokens = request_input("tokens", np.zeros(0, np.int32))
    codes = InferInput("codes", shape, "INT32")
    codes._raw_content = b""  # no array has this shape
    client.client.async_stream_infer("token2wav", [tokens, codes])
    assert client.error()
    exchange(client, engine)


def test_many_messages(server: Server, engine: FakeEngine) -> None:
    """Every one of 8,000 requests gets its own audio, and then its end."""

    def answer() -> None:
        for _ in range(8000):
            request = engine.request()
            audio = request.inputs["tokens"].astype(np.float32)
            engine.send(audio_frame(request.slot, {"audio": audio}), finished_frame(request.slot))

    answers = threading.Thread(target=answer, daemon=True)
    answers.start()
    with (
        Client.open(server.grpc_url) as first,
        Client.open(server.grpc_url) as second,
    ):
        for number in range(8000):
            client = (first, second)[number % 2]
            client.send([number], sequence=number % 2 + 1, name=str(number))
        # Triton does not keep the order of responses to different requests of a stream.
        audio: dict[str, float] = {}
        finished: set[str] = set()
        for client in (first, second):
            for _ in range(8000):
                response = client.receive()
                name = response.get_response().id
                if is_final(response):
                    assert name in audio
                    finished.add(name)
                else:
                    [audio[name]] = response.as_numpy("audio")
    assert audio == {str(number): number for number in range(8000)}
    assert finished == audio.keys()
    answers.join(PATIENCE_SECONDS)
    assert not answers.is_alive()


def test_nothing_is_left_that_keeps_the_model(front: Path) -> None:
    """Triton unloads a model only when all its requests have been let go."""
    with tritonserver(front) as server:
        engine = FakeEngine(server.engine_path)
        try:
            until(lambda: server.ready)
            with Client.open(server.grpc_url) as client:
                exchange(client, engine)
                client.send(TOKENS)
                engine.send(failed_frame(FailedFrame(engine.request().slot, 3, "tokens: wrong")))
                assert client.error() == "tokens: wrong"
                if front.suffix != ".py":
                    client.send(TOKENS)
                    slot = engine.request().slot
                    engine.send(audio_frame(slot, {"video": np.zeros(1, np.float32)}))
                    assert "video" in client.error()
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(PATIENCE_SECONDS) == 0, server.log
        finally:
            engine.stop()


@pytest.mark.parametrize(
    ("options", "greeting", "message"),
    [
        (
            {},
            frame(READY, struct.pack("<I", 2)),
            "engine: it speaks version 2 of the protocol, and this front version 1",
        ),
        ({"instances": 2}, ready_frame(), "the model has one instance; set its count to 1"),
        ({"engine": False}, b"", "engine: TOKEN2WAV_ENGINE does not name its socket"),
    ],
    ids=["another version", "two instances", "no socket"],
)
def test_a_start_that_fails(
    front: Path, options: dict[str, Any], greeting: bytes, message: str
) -> None:
    with tritonserver(front, **options) as server:
        engine = FakeEngine(server.engine_path, greeting)
        try:
            assert server.process.wait(PATIENCE_SECONDS) != 0
            assert message in server.log
        finally:
            engine.stop()

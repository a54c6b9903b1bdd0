"""Requests that crash Triton's own HTTP parser, and other attacks, on every open HTTP port.

Each attack runs beside a gRPC stream that must keep every sample, and must leave the same
tritonserver running.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from testkit.models.golden import TINY, GoldenSet
from testkit.patience import PATIENCE_SECONDS, until
from testkit.rigs.serve_command import Serving, Speaker
from tests.served.test_streaming import SERVER_EQUALS_LIBRARY
from token2wav_client import ClientVoice
from token2wav_server.launcher.front import BODY_BYTES
from token2wav_server.launcher.ports import Ports

MEGABYTE = 1_000_000
KEY = "a-key-for-attackers-only"
SPEAK = "/v2/models/token2wav/generate_stream"
FORM = "Content-Type: application/x-www-form-urlencoded"  # crashes Triton 2.51
HALF_HEADERS = b"GET /v2/health/ready HTTP/1.1\r\nHost:"
HALF_BODY = (
    f"POST {SPEAK} HTTP/1.1\r\nHost: a\r\nadmin-key: {KEY}\r\nContent-Length: 1000\r\n\r\n{{"
).encode()
TOLD = [("http", "/v2/health/ready"), ("http", "/v2"), ("metrics", "/metrics"), ("status", "/")]
PATHS = [
    *TOLD,
    ("http", "/nowhere"),
    ("http", "/v2/systemsharedmemory/region/a/register"),
    ("http", SPEAK),
    ("metrics", "/nowhere"),
]


@pytest.fixture(scope="module")
def status_port() -> int:
    return Ports.free().http


@pytest.fixture(scope="module")
def serving(status_port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("attacks")
    key, config = folder / "key", folder / "server.yaml"
    key.write_text(KEY)
    # A stream beside an attack sends nothing until the attack is over.
    config.write_text("stream: {first_tokens: 0}\nlimits: {idle_seconds: 600}")
    options = [
        f"--config={config}",
        f"--status-port={status_port}",
        f"--admin-key-file={key}",
        "--canary-seconds=0",
    ]
    with Serving.ready(TINY, *options) as serving:
        yield serving


@pytest.fixture(autouse=True)
def _others_hear_nothing_of_it(
    serving: Serving, golden: GoldenSet, voice: ClientVoice, whole: NDArray[np.float32]
) -> Iterator[None]:
    before = serving.traces.processes
    speaker = Speaker(serving.url, voice, golden.tokens, at_once=160, ends=False)
    speaker.start()
    assert speaker.heard.wait(PATIENCE_SECONDS)
    yield
    speaker.may_end.set()
    speaker.join(PATIENCE_SECONDS)
    assert speaker.audio is not None, speaker.error
    assert np.abs(speaker.audio - whole).max() <= SERVER_EQUALS_LIBRARY
    assert serving.traces.processes == before


@pytest.fixture
def ports(serving: Serving, status_port: int) -> dict[str, int]:
    return {"http": serving.ports.http, "metrics": serving.ports.metrics, "status": status_port}


@pytest.mark.parametrize("megabytes", [1, 8, 100])
def test_large_bodies(megabytes: int, ports: dict[str, int]) -> None:
    for service, path in PATHS:
        for expect in ([], ["Expect: 100-continue"]):
            length = f"Content-Length: {megabytes * MEGABYTE}"
            code = status(
                ports[service], path, FORM, length, *expect, body=[bytes(MEGABYTE)] * megabytes
            )
            assert code in refused(service) | ({None} if megabytes > 1 else set())


@pytest.mark.parametrize(("size", "chunks"), [(1, 200_000), (MEGABYTE, 8)])
def test_chunked_bodies(size: int, chunks: int, ports: dict[str, int]) -> None:
    piece = b"%x\r\n%s\r\n" % (size, b"A" * size)
    at_once = max(MEGABYTE // len(piece), 1)
    body = [*[piece * at_once] * (chunks // at_once), b"0\r\n\r\n"]
    for service, path in PATHS:
        code = status(ports[service], path, FORM, "Transfer-Encoding: chunked", body=body)
        assert code in refused(service) | {None}
    assert status(
        ports["http"], SPEAK, f"admin-key: {KEY}", "Transfer-Encoding: chunked", body=body
    ) in (411, None)


def test_bounds_of_a_body_whose_sender_has_the_key(ports: dict[str, int]) -> None:
    http, key = ports["http"], f"admin-key: {KEY}"
    assert status(http, SPEAK, key, f"Content-Length: {BODY_BYTES + 1}") == 413
    # Triton parses the longest accepted body as JSON, for any content type. The body is too small
    # to crash Triton.
    longest = b'{"tokens": [' + b"1," * (BODY_BYTES // 2 - 8) + b"1]}"
    assert status(http, SPEAK, key, FORM, f"Content-Length: {len(longest)}", body=[longest]) == 400
    nested = [
        b"[" * MEGABYTE,
        b'{"a":' * 200_000,
        b'{"tokens":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ]
    names = b'{"tokens":[1]' + b"".join(b',"p%d":1' % number for number in range(100_000)) + b"}"
    broken = [
        b'{"tokens": [1',
        b"[]",
        b"\xff\xfe",
        b'{"tokens": [4294967297]}',
        b'{"tokens":[1],"tokens":[2]}',
    ]
    for text in (*nested, names, *broken):
        assert status(http, SPEAK, key, f"Content-Length: {len(text)}", body=[text]) == 400
    assert status(http, SPEAK, key, "Content-Length: 0") == 411
    assert status(http, SPEAK, key, "Content-Length: 5", "Content-Encoding: gzip") == 415
    assert status(http, SPEAK, key, "Content-Length: -5") == 400
    assert status(http, SPEAK, key, "Content-Length: 5", "Content-Length: 6") == 400
    assert status(http, SPEAK, key, "Content-Length: 5", "Transfer-Encoding: chunked") in (400, 411)
    assert status(http, SPEAK, "admin-key: guessed", "Content-Length: 5") == 403


def test_headers_without_end(ports: dict[str, int]) -> None:
    many = [f"X-{number}: {'a' * 100}" for number in range(10_000)]
    for service, path in PATHS:
        for headers in (many, ["X: " + "a" * MEGABYTE], ["X: 1"] * 65):
            assert status(ports[service], path, *headers) in (400, None)
        assert status(ports[service], path + "a" * MEGABYTE) in (400, None)


def test_bytes_that_are_no_request_are_refused(ports: dict[str, int]) -> None:
    for port in ports.values():
        for junk in (
            b"GET /\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00",
            b"\0" * 1000,
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        ):
            assert status_of(exchange(port, [junk], hang_up=True)) in (400, 403, 405, None)


def test_only_a_few_methods_and_paths_are_open(ports: dict[str, int]) -> None:
    http, key = ports["http"], f"admin-key: {KEY}"
    for method in ("POST", "PUT", "DELETE", "HEAD", "OPTIONS", "TRACE", "CONNECT"):
        assert status(http, "/v2/health/ready", method=method) in (400, 403, 405), method
    for path in (
        "/v2/",
        "/v2/logging",
        "/v2/trace/setting",
        "/v2/systemsharedmemory/status",
        "/v2//health/ready",
        "/v2/models/../logging",
        "/v2/%6cogging",
        "/v2/health/ready?a=b",
    ):
        assert status(http, path, key) == 403, path
    assert status(http, "/v2/models/token2wav") == 200
    infer = "/v2/models/token2wav/infer"
    assert status(http, infer, "Content-Length: 2", method="POST", body=[b"{}"]) == 403
    for path in (
        "/v2/repository/index",
        "/v2/repository/models/token2wav/unload",
        "/v2/cudasharedmemory/region/a/register",
    ):
        assert status(http, path, key, "Content-Length: 2", method="POST", body=[b"{}"]) == 403


def test_a_connection_carries_one_request(ports: dict[str, int]) -> None:
    for service, path in PATHS:
        assert exchange(ports[service], [head("GET", path) * 1000]).count(b"HTTP/1.1 ") == 1


def test_a_body_that_does_not_arrive(ports: dict[str, int]) -> None:
    with connect(ports["http"], HALF_BODY) as late:
        assert status_of(late.recv(1000)) == 408


@pytest.mark.parametrize("half", [b"", HALF_HEADERS, HALF_BODY])
def test_half_open_requests_shut_nobody_out(half: bytes, ports: dict[str, int]) -> None:
    """Repeatedly opens more connections than the server allows.

    A whole request must still be answered at the first attempt.
    """
    slow: list[socket.socket] = []
    for _ in range(3):
        slow += [connect(port, half) for port in ports.values() for _ in range(150)]
        assert [status(ports[service], path) for service, path in TOLD] == [200] * len(TOLD)
    for connection in slow:
        with contextlib.suppress(ConnectionResetError):
            while connection.recv(1000):
                pass
        connection.close()


def test_a_flood_of_connections(ports: dict[str, int]) -> None:
    """Closes or resets connections before or after a whole request, without reading an answer."""
    request = head("GET", "/")
    for port in ports.values():
        for number in range(1000):
            connection = connect(port, (b"", request[:10], request)[number % 3])
            if number % 2:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()
    until(lambda: all(status(ports[service], path) == 200 for service, path in TOLD))


def refused(service: str) -> set[int | None]:
    # The status port reads no body, and answers every request with its status.
    return {200} if service == "status" else {403, 405, 413}


def status(
    port: int, path: str, *headers: str, body: list[bytes] | None = None, method: str = ""
) -> int | None:
    """Returns the status of the answer, or None if the connection is cut before the answer."""
    method = method or ("GET" if body is None and "Content" not in "".join(headers) else "POST")
    return status_of(exchange(port, [head(method, path, *headers), *(body or [])]))


def head(method: str, path: str, *headers: str) -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: a", *headers, "", ""]).encode()


def exchange(port: int, parts: list[bytes], *, hang_up: bool = False) -> bytes:
    """Sends until the server accepts no more, then reads to the end."""
    connection = connect(port)
    answer = b""
    with connection:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for part in parts:
                connection.sendall(part)
            if hang_up:
                connection.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            while part := connection.recv(1 << 16):
                answer += part
    return answer


def connect(port: int, opening: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_SECONDS)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        connection.sendall(opening)
    return connection


def status_of(answer: bytes) -> int | None:
    answer = answer.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
    return int(answer.split()[1]) if answer.startswith(b"HTTP/1.") else None

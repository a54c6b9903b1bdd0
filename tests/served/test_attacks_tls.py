"""Attacks on a gRPC port with TLS: connections that stop half-way, floods of handshakes, and bytes
that are no TLS.

Each runs beside a stream over TLS that must keep every sample, and leaves the same tritonserver
running.
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from numpy.typing import NDArray

from testkit.models.golden import TINY, GoldenSet
from testkit.rigs.certificates import Authority
from testkit.rigs.serve_command import Serving, speaking_beside
from tests.served.test_attacks import connect, head
from tests.served.test_streaming import SERVER_EQUALS_LIBRARY
from token2wav_client import Client, ClientVoice, Tls

NAME = "tts.example"
HALF_OPEN = 200
HANDSHAKES = 500
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.make(tmp_path_factory.mktemp("tls"), NAME)


@pytest.fixture(scope="module")
def tls(authority: Authority) -> Tls:
    return Tls(ca=authority.ca, server_name=NAME)


@pytest.fixture(scope="module")
def serving(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    config = tmp_path_factory.mktemp("attacks") / "server.yaml"
    config.write_text("stream: {first_tokens: 0}\nlimits: {idle_seconds: 600}")
    certificate = [
        f"--tls-certificate={authority.certificate(NAME)}",
        f"--tls-key={authority.key(NAME)}",
    ]
    with Serving.ready(TINY, f"--config={config}", *certificate, "--canary-seconds=0") as serving:
        yield serving


@pytest.fixture
def held() -> Iterator[contextlib.ExitStack]:
    """Context with connections that stay open until all other connections are served."""
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture(autouse=True)
def _others_hear_nothing_of_it(
    serving: Serving,
    golden: GoldenSet,
    voice: ClientVoice,
    whole: NDArray[np.float32],
    tls: Tls,
    held: contextlib.ExitStack,
) -> Iterator[None]:
    before = serving.traces.processes
    with speaking_beside(serving.url, voice, golden.tokens, tls) as ended:
        yield
        with Client(serving.url, tls=tls) as newcomer:
            [chunk] = newcomer.synthesize([[1, 2, 3]], voice)
        assert len(chunk.audio) == 3 * 960
        assert np.abs(ended() - whole).max() <= SERVER_EQUALS_LIBRARY
    assert serving.traces.processes == before


@pytest.mark.parametrize("part", ["nothing", "half of a hello"])
def test_handshakes_that_stop(part: str, serving: Serving, held: contextlib.ExitStack) -> None:
    hello = client_hello()
    begin = b"" if part == "nothing" else hello[: len(hello) // 2]
    for _ in range(HALF_OPEN):
        held.enter_context(connect(serving.ports.grpc, begin))


def test_connections_that_stop_after_the_handshake(
    serving: Serving, authority: Authority, held: contextlib.ExitStack
) -> None:
    for number in range(HALF_OPEN // 2):
        secured = held.enter_context(shaken(serving.ports.grpc, authority))
        secured.sendall((b"", PREFACE[:10], PREFACE, PREFACE + SETTINGS + b"\0\0")[number % 4])


def test_a_flood_of_handshakes(serving: Serving, authority: Authority) -> None:
    def shake(_: int) -> str | None:
        with shaken(serving.ports.grpc, authority) as secured:
            return secured.selected_alpn_protocol()

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(shake, range(HANDSHAKES))) == {"h2"}


def test_bytes_that_are_no_tls(serving: Serving) -> None:
    hello = client_hello()
    for junk in (
        head("GET", "/v2/health/ready"),
        PREFACE + SETTINGS,
        bytes(100_000),
        os.urandom(100_000),
        hello + os.urandom(10_000),  # a hello that is right, and no answer to the server's
        b"\x16\x03\x01\xff\xff" + bytes(70_000),  # a record longer than TLS has
        b"\x15\x03\x03\x00\x02\x02\x28" * 1000,  # alerts
        hello * 100,
    ):
        answer = until_it_hangs_up(connect(serving.ports.grpc), junk)
        assert b"200 OK" not in answer


def test_junk_inside_of_tls(serving: Serving, authority: Authority) -> None:
    for junk in (
        head("GET", "/"),
        os.urandom(100_000),
        PREFACE + bytes(100_000),
        PREFACE + os.urandom(100_000),
    ):
        answer = until_it_hangs_up(shaken(serving.ports.grpc, authority), junk)
        assert b"200 OK" not in answer


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1])
@pytest.mark.filterwarnings("ignore:ssl.TLSVersion")
def test_versions_of_tls_that_are_too_old(
    version: ssl.TLSVersion, serving: Serving, authority: Authority
) -> None:
    context = trusting(authority)
    context.set_ciphers("ALL:@SECLEVEL=0")  # so that this side does not refuse
    context.minimum_version = context.maximum_version = version
    with pytest.raises(OSError, match=r"(?i)alert.protocol.version|eof occurred|reset by peer"):
        shaken(serving.ports.grpc, authority, context)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_versions_of_tls_that_are_accepted(
    version: ssl.TLSVersion, serving: Serving, authority: Authority
) -> None:
    context = trusting(authority)
    context.minimum_version = context.maximum_version = version
    with shaken(serving.ports.grpc, authority, context) as secured:
        assert secured.selected_alpn_protocol() == "h2"


def trusting(authority: Authority) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(authority.ca))
    context.set_alpn_protocols(["h2"])
    return context


def shaken(port: int, authority: Authority, context: ssl.SSLContext | None = None) -> ssl.SSLSocket:
    """Returns a connection after the handshake."""
    plain = connect(port)
    try:
        return (context or trusting(authority)).wrap_socket(plain, server_hostname=NAME)
    except BaseException:
        plain.close()
        raise


def client_hello() -> bytes:
    """Returns the first message of a handshake."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.create_default_context()
    context.set_alpn_protocols(["h2"])
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing, server_hostname=NAME).do_handshake()
    return outgoing.read()


def until_it_hangs_up(connection: socket.socket, junk: bytes) -> bytes:
    """Sends junk until the server accepts no more, then reads to the end."""
    answer = b""
    with connection:
        with contextlib.suppress(OSError):
            connection.sendall(junk)
            connection.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            while part := connection.recv(1 << 16):
                answer += part
    return answer

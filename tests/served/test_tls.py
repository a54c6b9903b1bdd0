"""TLS and closed calls of a server. test_tls_balancer.py has the balancer in front of it."""

from __future__ import annotations

import shutil
import socket
import ssl
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from testkit.models.golden import TINY
from testkit.patience import PATIENCE_SECONDS
from testkit.rigs.certificates import Authority
from testkit.rigs.serve_command import Serving
from testkit.rigs.tls_server import (
    CLOSED,
    NAME,
    RESTRICTED,
    admin,
    channel,
    mutual,
    mutual_server,
    speaks,
    tls_options,
)
from token2wav.commands import main as command
from token2wav_client import Client, ClientVoice, ServerUnavailable, Tls
from token2wav_client.errors import AccessError as NoAccess
from token2wav_server.launcher.access import Certificates
from token2wav_server.launcher.ports import Ports
from token2wav_server.launcher.supervisor import Canary

OTHER = "127.0.0.3"
MODELS = ("token2wav",)
HALF_OPEN, HANDSHAKES = 100, 300


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.make(tmp_path_factory.mktemp("authority"), NAME)


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Authority that signs for the same names, but that no server or client trusts."""
    return Authority.make(tmp_path_factory.mktemp("stranger"), NAME)


@pytest.fixture(scope="module")
def servers(
    authority: Authority, admin_key: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Serving, Serving]]:
    """Two servers that start together: one requires client certificates, one has TLS for all."""
    folder, ports = tmp_path_factory.mktemp("settings"), Ports.free(OTHER)
    status_port, options = Ports.free(OTHER).http, tls_options(authority)
    with (
        mutual_server(authority, admin_key, folder) as closed,
        Serving.replica(TINY, OTHER, ports, status_port, *options) as open_to_all,
    ):
        for server in (closed, open_to_all):
            server.wait_for_line("token2wav: ready, ")
        yield closed, open_to_all


@pytest.fixture(scope="module")
def server(servers: tuple[Serving, Serving]) -> Serving:
    return servers[0]


def test_tls_without_certificates_of_clients(
    servers: tuple[Serving, Serving], authority: Authority
) -> None:
    url = servers[1].url
    assert speaks(url, tls=Tls(ca=authority.ca, server_name=NAME))
    with pytest.raises(ServerUnavailable, match=r"it may require TLS or a client certificate"):
        speaks(url)
    certificates = Certificates(authority.certificate(NAME), authority.key(NAME))
    canary = Canary(60.0, 60.0, MODELS, certificates)
    assert canary.start(url).result() is None


def test_the_canary_reads_a_renewed_certificate_no_earlier_than_the_server(
    servers: tuple[Serving, Serving], authority: Authority, tmp_path: Path
) -> None:
    """The server has the old certificate until its next start."""
    copy = Authority(shutil.copytree(authority.folder, tmp_path / "authority"))
    canary = Canary(60.0, 60.0, MODELS, Certificates(copy.certificate(NAME), copy.key(NAME)))
    Authority.make(copy.folder, NAME)
    assert canary.start(servers[1].url).result() is None
    canary.read_certificates()
    problem = canary.start(servers[1].url).result()
    assert problem is not None
    assert problem.sentence.startswith("no secure connection to ")


@pytest.mark.parametrize("name", ["TLSv1", "TLSv1_1", "TLSv1_2", "TLSv1_3"])
@pytest.mark.filterwarnings("ignore:ssl.TLSVersion")
def test_versions_of_tls(name: str, servers: tuple[Serving, Serving], authority: Authority) -> None:
    version, context = ssl.TLSVersion[name], trusting(authority)
    context.set_ciphers("ALL:@SECLEVEL=0")  # so that this side refuses no version
    context.minimum_version = context.maximum_version = version
    if version >= ssl.TLSVersion.TLSv1_2:
        with shaken(servers[1], context) as secured:
            assert secured.selected_alpn_protocol() == "h2"
        return
    refusals = r"(?i)alert.protocol.version|eof occurred|closed \(EOF\)|reset by peer"
    with pytest.raises(OSError, match=refusals):
        shaken(servers[1], context)


def test_attacks_on_the_port_with_tls(
    servers: tuple[Serving, Serving], authority: Authority
) -> None:
    """Connections that stop half-way stay open during a flood of handshakes, and bytes that are no
    TLS, or no HTTP/2 inside of TLS.
    """
    server, context = servers[1], trusting(authority)
    before = server.traces.processes
    with ExitStack() as held:
        for _ in range(HALF_OPEN):
            held.enter_context(connection(server))
            held.enter_context(shaken(server, context)).sendall(b"PRI * HTTP/2.0")
        for _ in range(HANDSHAKES):
            shaken(server, context).close()
        for junk in (b"GET / HTTP/1.1\r\n\r\n", bytes(100_000), b"\x16\x03\x01\xff\xff" * 10_000):
            for attack in (connection(server), shaken(server, context)):
                with attack, suppress(OSError):  # the server hangs up early
                    attack.sendall(junk)
                    while attack.recv(1 << 16):
                        pass
        assert speaks(server.url, tls=Tls(ca=authority.ca, server_name=NAME))
    assert server.traces.processes == before


def trusting(authority: Authority) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(authority.ca))
    context.set_alpn_protocols(["h2"])
    return context


def connection(server: Serving) -> socket.socket:
    address = (OTHER, server.ports.grpc)
    return socket.create_connection(address, timeout=PATIENCE_SECONDS)


def shaken(server: Serving, context: ssl.SSLContext) -> ssl.SSLSocket:
    """Returns a connection after the handshake."""
    plain = connection(server)
    try:
        return context.wrap_socket(plain, server_hostname=NAME)
    except BaseException:
        plain.close()
        raise


def test_clients_without_the_right_certificate_are_refused(
    server: Serving, authority: Authority, stranger: Authority
) -> None:
    strange = {"cert": stranger.certificate("client"), "key": stranger.key("client")}
    for tls in (Tls(ca=authority.ca, server_name=NAME), mutual(authority, **strange)):
        with pytest.raises(ServerUnavailable):
            speaks(server.url, tls=tls)


def test_a_server_with_another_certificate_is_not_tried_again(
    server: Serving,
    authority: Authority,
    stranger: Authority,
    voice: ClientVoice,
    caplog: pytest.LogCaptureFixture,
) -> None:
    mismatches = (
        mutual(authority, ca=stranger.ca),
        mutual(authority, server_name="other.test"),
        Tls(),
    )
    for tls in mismatches:
        with (
            Client(server.url, tls=tls, retries=5) as client,
            pytest.raises(NoAccess, match=f"^no secure connection to {server.url} "),
        ):
            client.open(voice)
    assert not caplog.records


def test_the_command_takes_certificates_and_a_token(
    server: Serving, authority: Authority, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    token = tmp_path / "token"
    token.write_text("s3cret\n")
    url, known = f"--url={server.url}", mutual(authority)
    health = ["health", url, f"--ca={known.ca}", f"--server-name={known.server_name}"]
    credentials = [f"--cert={known.cert}", f"--key={known.key}", f"--token-file={token}"]
    assert command([*health, *credentials, f"--timeout={PATIENCE_SECONDS}"]) == 0
    assert capfd.readouterr().out.startswith("healthy: ")
    assert command(["health", url, "--tls"]) == 7
    assert "error: no secure connection to " in capfd.readouterr().err
    assert command(health) == 3


def test_the_canary_gets_through_mutual_tls(server: Serving, authority: Authority) -> None:
    certificates = Certificates(authority.certificate(NAME), authority.key(NAME), authority.ca)
    canary = Canary(60.0, 60.0, MODELS, certificates)
    assert canary.start(server.url).result() is None


@pytest.fixture(scope="module")
def direct(server: Serving, authority: Authority) -> Iterator[Any]:
    """Yields a stub of Triton's calls, connected to the server itself."""
    files = (authority.ca, authority.key("client"), authority.certificate("client"))
    with channel(server.url, NAME, *files) as opened:
        yield service_pb2_grpc.GRPCInferenceServiceStub(opened)


@pytest.mark.parametrize(("call", "request_", "reason"), CLOSED, ids=lambda value: str(value)[:30])
def test_calls_that_clients_do_not_need_are_closed(
    call: str, request_: Any, reason: str, direct: Any, admin_key: Path
) -> None:
    for metadata in ((), (("triton-grpc-protocol-admin-key", "guessed"),)):
        with pytest.raises(grpc.RpcError, match=RESTRICTED):
            getattr(direct, call)(request_, metadata=metadata)
    refused = pytest.raises(grpc.RpcError, match=reason) if reason else nullcontext()
    with refused:
        getattr(direct, call)(request_, metadata=admin(admin_key))
    assert direct.ModelReady(service_pb2.ModelReadyRequest(name="token2wav")).ready


def test_the_admin_key_is_not_printed(server: Serving, admin_key: Path) -> None:
    """Comes last in this file, so that the log has everything from the tests above."""
    assert admin_key.read_text().strip() not in "\n".join(server.printed)
    assert admin_key.stat().st_mode & 0o777 == 0o600

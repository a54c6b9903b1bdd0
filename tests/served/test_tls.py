"""TLS, closed protocols, and requests via the balancer to a server that requires certificates."""

from __future__ import annotations

import hashlib
import re
import socket
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2, service_pb2_grpc

from testkit.models.golden import TINY, GoldenSet
from testkit.patience import PATIENCE_SECONDS, until
from testkit.rigs.balancer import Balancer
from testkit.rigs.certificates import Authority
from testkit.rigs.gateway_rig import GatewayRig, serving, tokens_of
from testkit.rigs.gateway_speech import PACE, TEXT, assert_same, body, expected
from testkit.rigs.serve_command import Serving
from tests.served.test_streaming import SERVER_EQUALS_LIBRARY
from token2wav import Token2Wav
from token2wav.commands import main as command
from token2wav.serving.door.sequences import CLIENT_HEADER
from token2wav_client import Client, ClientVoice, ServerError, ServerUnavailable, Tls
from token2wav_client.errors import AccessError as NoAccess
from token2wav_server.demo import language_model
from token2wav_server.launcher.access import Certificates
from token2wav_server.launcher.ports import Ports
from token2wav_server.launcher.supervisor import Canary

ADDRESS, OTHER = "127.0.0.2", "127.0.0.3"
TOKEN = "a-token-for-tests-only"
MESSAGE_BYTES = 200_000
MODELS = ("token2wav",)
HALF_OPEN, HANDSHAKES = 100, 300


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.make(tmp_path_factory.mktemp("authority"), "token2wav.test", "balancer.test")


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Authority that signs for the same names, but that no server or client trusts."""
    return Authority.make(tmp_path_factory.mktemp("stranger"), "token2wav.test")


@pytest.fixture(scope="module")
def admin_key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("admin") / "key"


@pytest.fixture(scope="module")
def servers(
    authority: Authority, admin_key: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Serving, Serving]]:
    """Two servers that start together: one requires client certificates, one has TLS for all."""
    tls = [
        f"--tls-certificate={authority.certificate('token2wav.test')}",
        f"--tls-key={authority.key('token2wav.test')}",
        "--canary-seconds=0",
    ]
    settings = tmp_path_factory.mktemp("settings") / "server.yaml"
    settings.write_text("stream: {first_tokens: 0}\nlimits: {streams_per_client: 2}\n")
    closed = [
        *tls,
        f"--config={settings}",
        f"--tls-client-ca={authority.ca}",
        f"--admin-key-file={admin_key}",
        "--verbose",
    ]
    with (
        Serving.replica(
            TINY, ADDRESS, Ports.free(ADDRESS), Ports.free(ADDRESS).http, *closed
        ) as mutual_server,
        Serving.replica(TINY, OTHER, Ports.free(OTHER), Ports.free(OTHER).http, *tls) as tls_server,
    ):
        for server in (mutual_server, tls_server):
            server.wait_for_line("token2wav: ready, ")
        yield mutual_server, tls_server


@pytest.fixture(scope="module")
def server(servers: tuple[Serving, Serving]) -> Serving:
    return servers[0]


@pytest.fixture(scope="module")
def balancer(
    server: Serving, authority: Authority, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Balancer]:
    """Balancer that admits clients with a token over TLS, and has a certificate for the server."""
    folder = tmp_path_factory.mktemp("balancer")
    tokens = folder / "tokens"
    tokens.write_text(f"{hashlib.sha256(TOKEN.encode()).hexdigest()} alice\n")
    with Balancer.start(
        folder,
        [ADDRESS],
        grpc_port=server.ports.grpc,
        status_port=server.status_port,
        TOKEN2WAV_CERTIFICATE=str(authority.both("balancer.test")),
        TOKEN2WAV_TOKENS=str(tokens),
        TOKEN2WAV_REPLICA_CA=str(authority.ca),
        TOKEN2WAV_REPLICA_NAME="token2wav.test",
        TOKEN2WAV_REPLICA_CERTIFICATE=str(authority.both("client")),
        TOKEN2WAV_MESSAGE_BYTES=str(MESSAGE_BYTES),
    ) as balancer:
        balancer.wait_for("UP")
        yield balancer


def mutual(authority: Authority, **other: Path | str) -> Tls:
    settings: dict[str, Any] = {
        "ca": authority.ca,
        "cert": authority.certificate("client"),
        "key": authority.key("client"),
        "server_name": "token2wav.test",
    }
    return Tls(**(settings | other))


def speaks(url: str, **how: Any) -> bool:
    with Client(url, **how) as client:
        return client.health(timeout_s=PATIENCE_SECONDS).first_audio_s is not None


def test_tls_without_certificates_of_clients(
    servers: tuple[Serving, Serving], authority: Authority
) -> None:
    url = servers[1].url
    assert speaks(url, tls=Tls(ca=authority.ca, server_name="token2wav.test"))
    with pytest.raises(ServerUnavailable, match=r"it may require TLS or a client certificate"):
        speaks(url)
    certificates = Certificates(
        authority.certificate("token2wav.test"), authority.key("token2wav.test")
    )
    canary = Canary(60.0, 60.0, MODELS, certificates)
    assert canary.start(url).result() is None


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
    with pytest.raises(OSError, match=r"(?i)alert.protocol.version|eof occurred|reset by peer"):
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
        assert speaks(server.url, tls=Tls(ca=authority.ca, server_name="token2wav.test"))
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
        return context.wrap_socket(plain, server_hostname="token2wav.test")
    except BaseException:
        plain.close()
        raise


def test_clients_without_the_right_certificate_are_refused(
    server: Serving, authority: Authority, stranger: Authority
) -> None:
    strange = {"cert": stranger.certificate("client"), "key": stranger.key("client")}
    for tls in (Tls(ca=authority.ca, server_name="token2wav.test"), mutual(authority, **strange)):
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
    certificates = Certificates(
        authority.certificate("token2wav.test"), authority.key("token2wav.test"), authority.ca
    )
    canary = Canary(60.0, 60.0, MODELS, certificates)
    assert canary.start(server.url).result() is None


RESTRICTED = "This protocol is restricted"
UNLOAD = service_pb2.RepositoryModelUnloadRequest(model_name="token2wav")
REGISTER = service_pb2.SystemSharedMemoryRegisterRequest(name="a", key="/b")
# Calls that clients do not need, each with the reason why the admin key does not open it.
CLOSED: list[tuple[str, Any, str]] = [
    ("TraceSetting", service_pb2.TraceSettingRequest(), ""),
    ("LogSettings", service_pb2.LogSettingsRequest(), ""),
    ("RepositoryIndex", service_pb2.RepositoryIndexRequest(), ""),
    ("SystemSharedMemoryStatus", service_pb2.SystemSharedMemoryStatusRequest(), RESTRICTED),
    ("CudaSharedMemoryStatus", service_pb2.CudaSharedMemoryStatusRequest(), RESTRICTED),
    ("SystemSharedMemoryRegister", REGISTER, RESTRICTED),
    ("RepositoryModelUnload", UNLOAD, "explicit model load / unload is not allowed"),
]


@pytest.fixture(scope="module")
def direct(server: Serving, authority: Authority) -> Iterator[Any]:
    """Yields a stub of Triton's calls, connected to the server itself."""
    files = (authority.ca, authority.key("client"), authority.certificate("client"))
    with _channel(server.url, "token2wav.test", *files) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


@pytest.mark.parametrize(("call", "request_", "reason"), CLOSED, ids=lambda value: str(value)[:30])
def test_calls_that_clients_do_not_need_are_closed(
    call: str, request_: Any, reason: str, direct: Any, admin_key: Path
) -> None:
    for metadata in ((), (("triton-grpc-protocol-admin-key", "guessed"),)):
        with pytest.raises(grpc.RpcError, match=RESTRICTED):
            getattr(direct, call)(request_, metadata=metadata)
    refused = pytest.raises(grpc.RpcError, match=reason) if reason else nullcontext()
    with refused:
        getattr(direct, call)(request_, metadata=_admin(admin_key))
    assert direct.ModelReady(service_pb2.ModelReadyRequest(name="token2wav")).ready


def test_a_token_lets_in(
    balancer: Balancer,
    authority: Authority,
    golden: GoldenSet,
    voice: ClientVoice,
    whole: NDArray[np.float32],
) -> None:
    tls = Tls(ca=authority.ca, server_name="balancer.test")
    with Client(balancer.url, tls=tls, token=TOKEN) as client:
        audio = np.concatenate([chunk.audio for chunk in client.synthesize([golden.tokens], voice)])
    assert np.abs(audio - whole).max() <= SERVER_EQUALS_LIBRARY


def test_the_gateway_speaks_through_the_balancer(
    balancer: Balancer,
    authority: Authority,
    voice: ClientVoice,
    model: Token2Wav,
    tmp_path: Path,
) -> None:
    token = tmp_path / "token"
    token.write_text(f"{TOKEN}\n")
    tls = {"ca": authority.ca, "server_name": "balancer.test"}
    with (
        serving(language_model.create_app(tokens_of, PACE)) as port,
        GatewayRig.start(
            tmp_path,
            grpc_url=balancer.url,
            language_model_url=f"http://127.0.0.1:{port}/v1",
            voice=voice,
            settings={"speech_server": {"token_file": token, "tls": tls}},
        ) as gateway,
        gateway.http() as http,
    ):
        assert http.get("/health/ready").status_code == 200
        audio = http.post("/v1/audio/speech", json=body()).content
    assert_same(audio, expected(model, voice, TEXT))


def test_a_client_gets_its_share_and_cannot_take_another_name(
    balancer: Balancer, server: Serving, authority: Authority
) -> None:
    tls = Tls(ca=authority.ca, server_name="balancer.test")
    speaker = ClientVoice(
        np.zeros(0, np.int32), np.zeros((0, 80), np.float32), np.ones(192, np.float32)
    )
    with ExitStack() as stack:
        for name in ("bob", "carol"):
            client = stack.enter_context(
                Client(balancer.url, tls=tls, token=TOKEN, headers={CLIENT_HEADER: name})
            )
            stack.enter_context(client.open(speaker)).push([1])
        until(lambda: server.open_streams() == 2)
        client = stack.enter_context(
            Client(balancer.url, tls=tls, token=TOKEN, headers={CLIENT_HEADER: "dave"})
        )
        with pytest.raises(
            ServerError, match=r"^streams: client 'alice' has 2 open, .*; try again later$"
        ):
            list(client.synthesize([[1]], speaker))
        assert speaks(server.url, tls=mutual(authority))  # direct, so without a client name
    until(lambda: server.open_streams() == 0)
    assert speaks(balancer.url, tls=tls, token=TOKEN)


@pytest.mark.parametrize("token", [None, "nobody", "wrong", TOKEN[:-1]])
def test_without_a_token_nobody_gets_in(
    balancer: Balancer, authority: Authority, token: str | None
) -> None:
    tls = Tls(ca=authority.ca, server_name="balancer.test")
    with pytest.raises(
        NoAccess, match="balancer: no valid token; send the header authorization: Bearer TOKEN"
    ):
        speaks(balancer.url, tls=tls, token=token)


def test_the_balancer_wants_tls(balancer: Balancer) -> None:
    with pytest.raises(ServerUnavailable, match="it may require TLS or a client certificate"):
        speaks(balancer.url, token=TOKEN)


def test_the_balancer_passes_on_the_calls_of_synthesis(
    balancer: Balancer, authority: Authority, admin_key: Path
) -> None:
    metadata = (("authorization", f"Bearer {TOKEN}"), *_admin(admin_key))
    with _channel(balancer.url, "balancer.test", authority.ca) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        assert stub.ServerLive(service_pb2.ServerLiveRequest(), metadata=metadata).live
        assert stub.ModelMetadata(
            service_pb2.ModelMetadataRequest(name="token2wav"), metadata=metadata
        ).inputs
        configuration = stub.ModelConfig(
            service_pb2.ModelConfigRequest(name="token2wav"), metadata=metadata
        ).config
        assert configuration.parameters["vocabulary"].string_value == "6561"
        statistics = ("ModelStatistics", service_pb2.ModelStatisticsRequest(), "")
        for name, request, _ in (*CLOSED, statistics):
            with pytest.raises(grpc.RpcError, match="balancer: this call is not open to clients"):
                getattr(stub, name)(request, metadata=metadata)


def test_a_message_that_is_too_long_ends_its_stream_only(
    balancer: Balancer, authority: Authority
) -> None:
    tls = Tls(ca=authority.ca, server_name="balancer.test")
    tokens = MESSAGE_BYTES // (2 * 80 * 4) + 1
    long = ClientVoice(
        np.zeros(tokens, np.int32), np.zeros((2 * tokens, 80), np.float32), np.ones(192, np.float32)
    )
    with Client(balancer.url, tls=tls, token=TOKEN) as client:
        with pytest.raises(ServerError, match="status: 400"):
            list(client.synthesize([[1, 2, 3]], long))
        assert client.health(timeout_s=PATIENCE_SECONDS).first_audio_s is not None
    until(
        lambda: re.search(r"message of \d+ bytes refused, limit 200000", balancer.log.read_text())
    )


def test_no_secret_is_printed(server: Serving, balancer: Balancer, admin_key: Path) -> None:
    """Comes last in this file, so that the log has everything from the tests above."""
    log = "\n".join(server.printed) + balancer.log.read_text()
    assert "client=alice" in log
    assert TOKEN not in log
    assert hashlib.sha256(TOKEN.encode()).hexdigest() not in log
    assert admin_key.read_text().strip() not in log
    assert admin_key.stat().st_mode & 0o777 == 0o600


def _channel(url: str, name: str, *files: Path) -> Any:
    credentials = grpc.ssl_channel_credentials(*(file.read_bytes() for file in files))
    return grpc.secure_channel(url, credentials, options=[("grpc.ssl_target_name_override", name)])


def _admin(key: Path) -> tuple[tuple[str, str], ...]:
    return (("triton-grpc-protocol-admin-key", key.read_text().strip()),)


def _encrypted(key: Path, folder: Path) -> Path:
    out = folder / "encrypted.key"
    subprocess.run(
        ["openssl", "pkcs8", "-topk8", "-in", key, "-out", out, "-passout", "pass:secret"],
        check=True,
        timeout=PATIENCE_SECONDS,
    )
    return out

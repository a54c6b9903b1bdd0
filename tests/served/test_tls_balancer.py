"""Balancer that admits clients with a token, in front of a server that wants certificates."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import numpy as np
import pytest
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2, service_pb2_grpc

from testkit.models.golden import GoldenSet
from testkit.patience import PATIENCE_SECONDS, until
from testkit.rigs.balancer import Balancer, needs_haproxy
from testkit.rigs.certificates import Authority
from testkit.rigs.gateway_rig import GatewayRig, serving, tokens_of
from testkit.rigs.gateway_speech import PACE, TEXT, assert_same, body, expected
from testkit.rigs.serve_command import Serving
from testkit.rigs.tls_server import (
    ADDRESS,
    CLOSED,
    NAME,
    admin,
    channel,
    mutual,
    mutual_server,
    speaks,
)
from tests.served.test_streaming import SERVER_EQUALS_LIBRARY
from token2wav import Token2Wav
from token2wav.serving.door.sequences import CLIENT_HEADER
from token2wav_client import Client, ClientVoice, ServerError, ServerUnavailable, Tls
from token2wav_client.errors import AccessError as NoAccess
from token2wav_server.demo import language_model

TOKEN, BALANCER = "a-token-for-tests-only", "balancer.test"
MESSAGE_BYTES = 200_000


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    needs_haproxy()
    return Authority.make(tmp_path_factory.mktemp("authority"), NAME, BALANCER)


@pytest.fixture(scope="module")
def tls(authority: Authority) -> Tls:
    return Tls(ca=authority.ca, server_name=BALANCER)


@pytest.fixture(scope="module")
def server(
    authority: Authority, admin_key: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Serving]:
    with mutual_server(authority, admin_key, tmp_path_factory.mktemp("settings")) as server:
        server.wait_for_line("token2wav: ready, ")
        yield server


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
        TOKEN2WAV_CERTIFICATE=str(authority.both(BALANCER)),
        TOKEN2WAV_TOKENS=str(tokens),
        TOKEN2WAV_REPLICA_CA=str(authority.ca),
        TOKEN2WAV_REPLICA_NAME=NAME,
        TOKEN2WAV_REPLICA_CERTIFICATE=str(authority.both("client")),
        TOKEN2WAV_MESSAGE_BYTES=str(MESSAGE_BYTES),
    ) as balancer:
        balancer.wait_for("UP")
        yield balancer


def test_a_token_lets_in(
    balancer: Balancer,
    tls: Tls,
    golden: GoldenSet,
    voice: ClientVoice,
    whole: NDArray[np.float32],
) -> None:
    with Client(balancer.url, tls=tls, token=TOKEN) as client:
        audio = np.concatenate([chunk.audio for chunk in client.synthesize([golden.tokens], voice)])
    assert np.abs(audio - whole).max() <= SERVER_EQUALS_LIBRARY


def test_the_gateway_speaks_through_the_balancer(
    balancer: Balancer,
    tls: Tls,
    voice: ClientVoice,
    model: Token2Wav,
    tmp_path: Path,
) -> None:
    token = tmp_path / "token"
    token.write_text(f"{TOKEN}\n")
    trusted = {"ca": tls.ca, "server_name": BALANCER}
    speech_server = {"token_file": token, "tls": trusted}
    with (
        serving(language_model.create_app(tokens_of, PACE)) as port,
        GatewayRig.start(
            tmp_path,
            grpc_url=balancer.url,
            language_model_url=f"http://127.0.0.1:{port}/v1",
            voice=voice,
            settings={"speech_server": speech_server},
        ) as gateway,
        gateway.http() as http,
    ):
        assert http.get("/health/ready").status_code == 200
        audio = http.post("/v1/audio/speech", json=body()).content
    assert_same(audio, expected(model, voice, TEXT))


def test_a_client_gets_its_share_and_cannot_take_another_name(
    balancer: Balancer, server: Serving, authority: Authority, tls: Tls
) -> None:
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
def test_without_a_token_nobody_gets_in(balancer: Balancer, tls: Tls, token: str | None) -> None:
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
    metadata = (("authorization", f"Bearer {TOKEN}"), *admin(admin_key))
    with channel(balancer.url, BALANCER, authority.ca) as opened:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(opened)
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


def test_a_message_that_is_too_long_ends_its_stream_only(balancer: Balancer, tls: Tls) -> None:
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

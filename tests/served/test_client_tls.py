"""A real server that speaks TLS only and wants to know its clients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.support.certificates import Authority
from tests.support.golden import TINY
from token2wav_client import AccessError, Client, ClientVoice, ServerUnavailable, Tls
from token2wav_client.cli import main
from token2wav_server import Ports, TritonServer


@dataclass(frozen=True)
class Secured:
    url: str
    known: Tls
    stranger: Tls


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("tls")
    ours, theirs = Authority.make(folder / "ours", "tts.example"), Authority.make(folder / "theirs")
    arguments = [
        "--grpc-use-ssl=1",
        "--grpc-use-ssl-mutual=1",
        f"--grpc-server-cert={ours.certificate('tts.example')}",
        f"--grpc-server-key={ours.key('tts.example')}",
        f"--grpc-root-cert={ours.ca}",
    ]
    with TritonServer(
        TINY, ports=Ports.free(), log_file=folder / "triton.log", extra_args=arguments
    ) as running:
        yield Secured(
            running.grpc_url,
            *(
                Tls(
                    ca=ours.ca,
                    cert=made.certificate("client"),
                    key=made.key("client"),
                    server_name="tts.example",
                )
                for made in (ours, theirs)
            ),
        )


def test_who_is_known_is_served(secured: Secured, voice: ClientVoice) -> None:
    with Client(
        secured.url, tls=secured.known, token="not looked at here", headers={"x-key": "nor this"}
    ) as client:
        [chunk] = client.synthesize([[1, 2, 3]], voice)
    assert len(chunk.audio) == 3 * 960


def test_who_is_unknown_is_told_what_may_be_missing(secured: Secured, voice: ClientVoice) -> None:
    for tls in (None, replace(secured.known, cert=None, key=None), secured.stranger):
        with (
            Client(secured.url, tls=tls) as client,
            pytest.raises(
                ServerUnavailable, match=r"hangs up: does it want TLS, or a certificate\?"
            ),
        ):
            client.open(voice)


def test_a_server_that_is_not_who_it_says_is_not_tried_again(
    secured: Secured, voice: ClientVoice, caplog: pytest.LogCaptureFixture
) -> None:
    impostors = (
        Tls(),
        replace(secured.known, server_name="else.example"),
        replace(secured.known, ca=secured.stranger.cert),
    )
    for tls in impostors:
        with (
            Client(secured.url, tls=tls, retries=5) as client,
            pytest.raises(AccessError, match=f"no secure connection to {secured.url} "),
        ):
            client.open(voice)
    assert not caplog.records


def test_the_command(secured: Secured, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    known = secured.known
    command = [
        "health",
        f"--url={secured.url}",
        f"--ca={known.ca}",
        f"--server-name={known.server_name}",
    ]
    command += ["--connect-timeout=60", "--timeout=60"]
    token = tmp_path / "token"
    token.write_text("s3cret\n")
    assert (
        main([*command, f"--cert={known.cert}", f"--key={known.key}", f"--token-file={token}"]) == 0
    )
    assert capfd.readouterr().out.startswith("healthy: ")
    assert main(["health", f"--url={secured.url}", "--tls"]) == 7
    assert "error: no secure connection to " in capfd.readouterr().err
    assert main(command) == 3

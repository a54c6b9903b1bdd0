"""Connections to a server: options that are refused before anything connects, and the errors of
failed calls.
"""

from __future__ import annotations

import math
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from testkit.patience import PATIENCE_SECONDS
from token2wav.commands import main
from token2wav_client import (
    AccessError,
    Client,
    ClientError,
    InputError,
    ServerError,
    ServerUnavailable,
    Tls,
    UtteranceClosedError,
)
from token2wav_client.client import Utterance
from token2wav_client.connection import checked_metadata
from token2wav_client.errors import error_of_response, error_of_rpc
from token2wav_client.wire import Opening

NOBODY = "127.0.0.1:1"
NO_ADDRESSES = [
    *("", "localhost", "localhost:", ":8001", "http://localhost:8000", "host:grpc", "a: 8001"),
    *(" localhost:8001", "localhost:8001\n", "::1:8001", "user@localhost:8001", "localhost:٣"),
    *("unix:/run/server:1", "a:1,b:1", "a:-1"),
]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"headers": {"a b": "c"}}, "headers: 'a b' is not a valid header name"),
        ({"headers": {"grpc-timeout": "1S"}}, "headers: 'grpc-timeout' is not a valid header name"),
        ({"headers": {"te": "c"}}, "headers: 'te' is not a valid header name"),
        ({"headers": {"picture-bin": "c"}}, "headers: 'picture-bin' is not a valid header name"),
        ({"headers": {"x-key": "two\nlines"}}, "headers, x-key: expected printable ASCII"),
        ({"token": ""}, "token: expected printable ASCII"),
        ({"token": "two\nlines"}, "token: expected printable ASCII"),
        ({"token": "a", "headers": {"Authorization": "b"}}, "headers: authorization and a token"),
        ({"url": "far.example:1", "token": "a"}, "token: it would be sent to far.example"),
        ({"url": "127.0.0.1.example:1", "token": "a"}, "token: it would be sent to 127.0.0.1.exam"),
        *(({"url": url}, f"url: {url!r} is not host:port, as in") for url in NO_ADDRESSES),
        *(
            ({"url": f"a:{port}"}, f"url: 'a:{port}' has the port {port}, which is outside 1 to")
            for port in ("0", "65536", "99999", "999999999")  # gRPC would wrap them
        ),
        ({"max_message_mib": 0}, "max_message_mib: 0 is outside 1 to 2047"),
        ({"max_message_mib": 2048}, "max_message_mib: 2048 is outside 1 to 2047"),
        ({"keepalive_s": 1.5}, "keepalive_s: 1.5 is neither 0 nor 2 to 86400"),
        ({"keepalive_s": math.inf}, "keepalive_s: inf is neither 0 nor 2 to 86400"),
        ({"keepalive_s": math.nan}, "keepalive_s: nan is neither 0 nor 2 to 86400"),
        ({"retries": -1}, "retries: -1 sent; must be 0 or more"),
    ],
)
def test_arguments_that_cannot_be(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError) as raised:
        Client(**arguments)
    assert str(raised.value).startswith(sentence)
    assert "two" not in str(raised.value)  # it may be a secret


@pytest.mark.parametrize("url", ["localhost:1", "127.0.0.1:1", "127.1.2.3:1", "[::1]:1"])
def test_a_token_may_go_to_this_machine_in_the_clear(url: str) -> None:
    sent = checked_metadata(url, None, {"X-Key": "v"}, "s3cret")
    assert sent == (("x-key", "v"), ("authorization", "Bearer s3cret"))


@pytest.mark.parametrize(
    "url", ["localhost:1", "a-b.example:65535", "my_server:8001", "[::1]:8001", "[fe80::1%eth0]:1"]
)
def test_addresses_that_are_taken_and_secrets_that_are_not_shown(url: str) -> None:
    with Client(url, headers={"x-key": "s3cret", "authorization": "Bearer s3cret"}) as client:
        assert "s3cret" not in repr(client)


def test_files_that_are_no_certificates(tmp_path: Path) -> None:
    text = tmp_path / "text.pem"
    text.write_text("hello")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"ca": tmp_path / "nowhere.pem"}, r"ca: .*nowhere.pem \(No such file or directory\)"),
        ({"ca": text}, r"ca: cannot use .*text.pem \(no certificate or crl found\)"),
        ({"cert": text}, "key: missing; a certificate and its key are needed together"),
        ({"key": text}, "cert: missing"),
        ({"cert": text, "key": text}, r"cert, key: cannot use .*text.pem"),
    ]
    for files, message in cases:
        with pytest.raises(InputError, match=message):
            Tls(**files)


def test_a_token_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TOKEN2WAV_TOKEN", "s3cret")
    assert main(["health", "--url=far.example:1"]) == 2
    errors = capsys.readouterr().err
    assert "token: it would be sent to far.example unencrypted; use TLS" in errors
    assert "s3cret" not in errors


class Failed:
    """End of a call, as grpc.RpcError represents it."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        self.code, self.details = lambda: code, lambda: details


@pytest.mark.parametrize(
    ("code", "details", "kind", "transient"),
    [
        ("UNAVAILABLE", "Connection refused", ServerUnavailable, True),
        ("UNAVAILABLE", "all addresses: Connection reset by peer", ServerUnavailable, True),
        ("UNAVAILABLE", "an http1.x server (HTTP status 400)", ServerUnavailable, True),
        ("UNAVAILABLE", "Received http2 header with status: 502", ServerUnavailable, True),
        ("INTERNAL", "Received RST_STREAM with error code 2", ServerUnavailable, True),
        ("CANCELLED", "Received RST_STREAM with error code 8", ServerUnavailable, True),
        ("DEADLINE_EXCEEDED", "Deadline Exceeded", ServerUnavailable, True),
        ("CANCELLED", "CANCELLED", ServerError, True),
        ("UNAUTHENTICATED", "Received http2 header with status: 401", AccessError, False),
        ("PERMISSION_DENIED", "Received http2 header with status: 403", AccessError, False),
        ("UNAVAILABLE", "Tls handshake failed: CERTIFICATE_VERIFY_FAILED", AccessError, False),
        ("UNAVAILABLE", "UNAUTHENTICATED: Hostname Verification Check failed.", AccessError, False),
        ("INVALID_ARGUMENT", "tokens: wrong", ServerError, False),
        ("RESOURCE_EXHAUSTED", "Received message larger than max", ServerError, False),
    ],
)
def test_error_class_of_a_failed_call(
    code: str, details: str, kind: type[ClientError], transient: bool
) -> None:
    error = error_of_rpc(Failed(grpc.StatusCode[code], details), NOBODY)
    assert isinstance(error, kind)
    assert error.transient == transient
    assert details in str(error)


@pytest.mark.parametrize(
    ("sentence", "transient"),
    [
        ("streams: all 64 are in use; try again later", True),
        ("server: it is shutting down; try another one", True),
        ("engine: its process has ended; send the utterance again", True),
        ("backend: this process can no longer use the GPU: CUDA error: an illegal access", True),
        ("Stub process 'token2wav_0_0' is not healthy.", True),
        ("Request for unknown model: 'token2wav' has no available versions", True),
        ("sequence_id: 'x' is no open stream; it ended, failed, was idle for too long", True),
        ("tokens: 9999 at index 0 is outside the vocabulary 0 to 6560", False),
        ("backend: the model produced NaN or infinite audio", False),
        ("stream: no tokens for 30 s, so it was closed", False),
    ],
)
def test_error_class_of_a_server_message(sentence: str, transient: bool) -> None:
    error = error_of_response(sentence)
    assert (str(error), error.transient) == (sentence, transient)


@pytest.mark.parametrize(
    ("sent", "expected", "sentence"),
    [
        ("[5,2]", "[-1]", "tokens: shape (5, 2), expected 1 dimension for this model"),
        (
            "[5]",
            "[-1,4]",
            "tokens: shape (5,), expected 2 dimensions, dimension 2 of length 4 for this model",
        ),
        ("[0]", "[192]", "tokens: shape (0,), expected (192,) for this model"),
    ],
)
def test_tritons_message_on_a_shape_is_reworded(sent: str, expected: str, sentence: str) -> None:
    message = (
        "[request id: 0] unexpected shape for input 'tokens' for model 'token2wav'. "
        f"Expected {expected}, got {sent}. "
    )
    error = error_of_response(message)
    assert (str(error), error.transient) == (sentence, False)


def test_tritons_message_on_an_unexpected_input_is_reworded() -> None:
    error = error_of_response("unexpected inference input 'latents' for model 'token2wav'")
    assert str(error) == "latents: sent, but this model takes no latents"


def test_an_error_names_its_field() -> None:
    error = ServerError("tokens: shape (5, 2), expected: 1 dimension")
    assert (error.field, error.problem) == ("tokens", "shape (5, 2), expected: 1 dimension")
    unnamed = ServerError("the server at localhost: 1 fails")
    assert (unnamed.field, unnamed.problem) == (None, str(unnamed))


def test_only_clients_with_retries_try_again(caplog: pytest.LogCaptureFixture) -> None:
    with Client(NOBODY) as client, pytest.raises(ServerUnavailable):
        client.open("0" * 64)
    with Client(NOBODY, retries=8) as client, pytest.raises(ServerUnavailable):
        client.health()
    assert not caplog.records
    with Client(NOBODY, retries=1) as client, pytest.raises(ServerUnavailable):
        client.open("0" * 64)
    [record] = caplog.records
    assert f"no server at {NOBODY}" in record.message
    assert "retry 1 of 1 in " in record.message


def test_no_proxy_is_between_a_client_and_its_own_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "no_proxy", "no_grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:2" if name == "http_proxy" else "")
    with Client(NOBODY) as client, pytest.raises(ServerUnavailable, match=f"ipv4:{NOBODY}: "):
        client.open("0" * 64)


def test_a_client_that_is_closed_stops_trying(caplog: pytest.LogCaptureFixture) -> None:
    client = Client(NOBODY, retries=100)
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(client.open, "0" * 64)
        while len(caplog.records) < 3:
            time.sleep(0.02)
        client.close()
        with pytest.raises(UtteranceClosedError, match="the client is closed"):
            result.result(PATIENCE_SECONDS)


def test_no_utterance_opens_in_a_client_that_another_thread_closes() -> None:
    """The other thread closes it between the check and the start of the utterance."""
    client = Client(NOBODY)

    def begin(*arguments: Any, **options: Any) -> Utterance:
        client.close()
        return Utterance(*arguments, **options)

    client._kind = begin  # type: ignore[assignment]
    client._model_seen_ready = True
    with pytest.raises(UtteranceClosedError, match="the client is closed"):
        client.open("0" * 64)


def test_headers_of_an_utterance_replace_none_of_the_client() -> None:
    with Client("localhost:1", headers={"x-key": "s3cret"}) as client:
        opening = Opening(None, headers={"X-Key": "other"})
        with pytest.raises(InputError, match="headers: x-key is a header of the client already"):
            client._new_utterance(opening, retries=0)
        opening = Opening(None, headers={"trace parent": "00"})
        with pytest.raises(InputError, match="'trace parent' is not a valid header name"):
            client._new_utterance(opening, retries=0)

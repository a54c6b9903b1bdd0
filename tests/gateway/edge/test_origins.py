"""Origins: which web pages may use the gateway."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import httpx
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect
from websockets.typing import Origin

from testkit.patience import PATIENCE_SECONDS
from testkit.rigs.gateway_rig import key_settings, serving_gateway
from testkit.rigs.raw_client import SOCKET_PATH
from token2wav_gateway.settings import Settings

SHOP = "https://shop.example"
KEY = "secret"
SETTINGS = {
    "origins": [SHOP],
    "keys": [key_settings("shop", KEY)],
}


@pytest.fixture(scope="module")
def host() -> Iterator[str]:
    with serving_gateway(Settings.model_validate(SETTINGS)) as port:
        yield f"127.0.0.1:{port}"


def origin_of(case: str, host: str) -> str:
    return f"http://{host}" if case == "same host" else case


ALLOWED = ["same host", SHOP, "HTTPS://SHOP.example"]
REFUSED = [
    "https://evil.example",
    "http://shop.example",
    "https://shop.example.evil.example",
    "https://shop.example:444",
    "http://127.0.0.1:1",
    "null",
    "http://[",
    "",
]


@pytest.mark.parametrize("case", [*ALLOWED, *REFUSED])
@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/v1/audio/voices"), ("POST", "/v1/audio/speech"), ("DELETE", "/v1/audio/voices/a")],
)
def test_changes_from_pages_of_other_hosts_are_refused(
    host: str, case: str, method: str, path: str
) -> None:
    headers = {"origin": origin_of(case, host)}
    answer = httpx.request(
        method, f"http://{host}{path}", headers=headers, timeout=PATIENCE_SECONDS
    )
    if case in ALLOWED:
        assert answer.status_code == 401  # the key is checked next
    else:
        assert answer.status_code == 403
        error = answer.json()["error"]
        assert error["message"].startswith(f"origin: {case!r} is neither the host")
        assert error["type"] == "permission_error"


@pytest.mark.parametrize("case", [*ALLOWED, *REFUSED[:-1]])
def test_websockets_of_pages_of_other_hosts_are_refused(
    host: str, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    url, origin = f"ws://{host}{SOCKET_PATH}", Origin(origin_of(case, host))
    if case in ALLOWED:
        with connect(url, origin=origin) as client:
            assert "a valid key is needed" in client.recv(PATIENCE_SECONDS)
    else:
        with pytest.raises(InvalidStatus) as refusal, connect(url, origin=origin):
            pass
        assert refusal.value.response.status_code == 403
        assert b"origin: " in refusal.value.response.body
        assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize("origin", ["null", "file://"])
def test_an_empty_host_is_no_origin(host: str, origin: str) -> None:
    headers = {"origin": origin, "host": ""}
    answer = httpx.post(f"http://{host}/v1/audio/speech", headers=headers, timeout=PATIENCE_SECONDS)
    assert answer.status_code == 403


@pytest.mark.parametrize(("origin", "allowed"), [(SHOP, True), ("https://evil.example", False)])
def test_browsers_may_show_answers_to_allowed_pages_only(
    host: str, origin: str, allowed: bool
) -> None:
    headers = {"origin": origin}
    asked = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-lang",
    }
    with httpx.Client(base_url=f"http://{host}", timeout=PATIENCE_SECONDS) as client:
        read = client.get("/v1/models", headers=headers)
        preflight = client.options("/v1/audio/speech", headers=headers | asked)
    assert read.status_code == 401
    assert preflight.status_code == (200 if allowed else 400)
    for answer in (read, preflight):
        assert (answer.headers.get("access-control-allow-origin") == origin) == allowed

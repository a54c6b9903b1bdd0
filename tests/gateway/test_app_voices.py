"""Requests for voices: clients that leave, disks that are full, and keys that own no voice."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.numpy import save_file

from testkit.limits import files_of_at_most
from testkit.patience import PATIENCE_SECONDS, until
from testkit.rigs.gateway_rig import key_settings, serving
from tests.gateway.voices.test_voices import FULL, TENSORS
from token2wav_client import ClientVoice
from token2wav_gateway.app import create_app
from token2wav_gateway.metrics import Metrics
from token2wav_gateway.settings import Settings
from token2wav_gateway.voices.listener import Listener


class SlowFrontEnd:
    """Front end that computes voices until `goes_on` is set.

    Attributes:
        count: number of recordings that it has begun to compute.
        most: largest number of recordings at the same time.
        goes_on: lets all recordings end.
    """

    def __init__(self) -> None:
        self.count = self.most = 0
        self.goes_on = threading.Event()
        self._running = 0

    def voice_of(self, recording: bytes, field: str) -> ClientVoice:
        self.count += 1
        self._running += 1
        self.most = max(self.most, self._running)
        try:
            assert self.goes_on.wait(PATIENCE_SECONDS)
        finally:
            self._running -= 1
        return ClientVoice(**TENSORS)


@pytest.fixture
def front_end(monkeypatch: pytest.MonkeyPatch) -> SlowFrontEnd:
    slow = SlowFrontEnd()
    monkeypatch.setattr(Listener, "_computed", slow.voice_of)
    return slow


@contextmanager
def served(folder: Path, metrics: Metrics, **settings: Any) -> Iterator[httpx.Client]:
    """Serves a gateway that makes voices, and yields a client of it."""
    voices = {"folder": folder, "model": folder}
    app = create_app(Settings.model_validate({"voices": voices, **settings}), metrics)
    with (
        serving(app) as port,
        httpx.Client(base_url=f"http://127.0.0.1:{port}/v1", timeout=PATIENCE_SECONDS) as http,
    ):
        yield http


def upload(http: httpx.Client, name: str, size: int = 10, key: str = "none") -> httpx.Request:
    return http.build_request(
        "POST",
        "/audio/voices",
        data={"name": name},
        files={"audio_sample": b"x" * size},
        headers={"authorization": f"Bearer {key}"},
    )


def upload_and_leave(http: httpx.Client, stack: ExitStack) -> None:
    """Sends a recording, and disconnects at the end of the stack."""
    request = upload(http, "bob")
    head = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
    connection = socket.create_connection((request.url.host, request.url.port or 0))
    stack.enter_context(closing(connection))
    connection.sendall(f"POST {request.url.path} HTTP/1.1\r\n{head}\r\n".encode() + request.read())


def test_abandoned_recordings_are_computed_one_at_a_time(
    front_end: SlowFrontEnd, tmp_path: Path
) -> None:
    metrics = Metrics()

    def left() -> float:
        """Number of clients that left: while their voice was made, or while they were read."""
        values = (
            metrics.registry.get_sample_value("token2wav_gateway_refused_total", {"status": status})
            for status in ("499", "400")
        )
        return sum(value or 0.0 for value in values)

    def six_leave() -> None:
        before = left()
        with ExitStack() as stack:
            for _ in range(6):
                upload_and_leave(http, stack)
            until(lambda: front_end.count >= 1)
        until(lambda: left() == before + 6)

    with served(tmp_path, metrics) as http:
        six_leave()
        six_leave()
        front_end.goes_on.set()
        assert http.send(upload(http, "eve", 11)).status_code == 201
    assert (front_end.count, front_end.most) == (2, 1)


@pytest.mark.parametrize("size", [10, 2 << 20], ids=["voice", "form"])
def test_a_full_disk_is_reported_with_507(
    front_end: SlowFrontEnd, size: int, tmp_path: Path
) -> None:
    """Neither the voice nor a form above 1 MiB, which is kept in a file, can be written."""
    front_end.goes_on.set()
    with served(tmp_path, Metrics()) as http:
        with files_of_at_most(FULL):
            answer = http.send(upload(http, "bob", size))
        assert answer.status_code == 507
        assert answer.json()["error"]["message"] == "gateway: its disk is full"
        assert list(tmp_path.iterdir()) == []
        assert http.send(upload(http, "bob", size)).status_code == 201


def test_a_key_deletes_only_the_voices_that_it_made(
    front_end: SlowFrontEnd, tmp_path: Path
) -> None:
    front_end.goes_on.set()
    save_file(TENSORS, tmp_path / "joe.safetensors")
    keys = [key_settings(name, name) for name in ("one", "two")]

    def delete(name: str, key: str) -> int:
        headers = {"authorization": f"Bearer {key}"}
        return http.delete(f"/audio/voices/{name}", headers=headers).status_code

    with served(tmp_path, Metrics(), keys=keys) as http:
        assert http.send(upload(http, "bob", key="one")).status_code == 201
        for name, key, status in (("joe", "one", 403), ("bob", "two", 403), ("bob", "one", 200)):
            assert delete(name, key) == status
    assert [path.name for path in tmp_path.iterdir()] == ["joe.safetensors"]


def test_the_consent_of_a_speaker_is_stored(front_end: SlowFrontEnd, tmp_path: Path) -> None:
    front_end.goes_on.set()
    with served(tmp_path, Metrics()) as http:

        def create(name: str, **fields: str) -> httpx.Response:
            files = {"audio_sample": b"x" * 10}
            return http.post("/audio/voices", data={"name": name, **fields}, files=files)

        assert create("bob", consent="contract 17").json()["consent"] == "contract 17"
        assert "consent" not in create("eve").json()
        assert json.loads((tmp_path / "bob.json").read_text())["consent"] == "contract 17"
        voices = http.get("/audio/voices").json()["data"]
        assert [voice.get("consent") for voice in voices] == ["contract 17", None]
        error = create("joe", consent="x" * 257)
        assert error.status_code == 400
        assert error.json()["error"]["param"] == "consent"
        assert not (tmp_path / "joe.json").exists()

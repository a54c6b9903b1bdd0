from __future__ import annotations

import sys

import pytest

from testkit.rigs.processes import finished
from token2wav_server.model_process import CANARY_VARIABLE, DEVICE_LOST_STATUS, is_canary


@pytest.mark.parametrize(
    ("secret", "client", "known"),
    [
        ("secret", "secret", True),
        ("secret", "secre", False),
        ("secret", "", False),
        ("secret", "sécret", False),
        ("", "", False),  # a server that the launcher has not started
        (None, "", False),
    ],
)
def test_only_the_launcher_can_name_itself_canary(
    secret: str | None, client: str, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(CANARY_VARIABLE, raising=False)
    if secret is not None:
        monkeypatch.setenv(CANARY_VARIABLE, secret)
    assert is_canary(client) is known


def test_a_process_that_has_lost_its_gpu_ends() -> None:
    code = "import time; from token2wav_server import model_process as process; "
    ended = finished(sys.executable, "-c", f"{code} process.end_process(); time.sleep(600)")
    assert ended.returncode == DEVICE_LOST_STATUS, ended.stderr
    assert "the model process has lost its GPU and ends with status 70" in ended.stderr

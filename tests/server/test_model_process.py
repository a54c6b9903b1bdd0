from __future__ import annotations

import subprocess
import sys

import pytest

from testkit.patience import PATIENCE_SECONDS
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


def test_a_stage_of_the_ensemble_that_hangs_ends_its_process() -> None:
    code = """
import time
from unittest import mock
from token2wav.serving.audio_output import AudioFormat
from token2wav_server.ensemble import stage_streams

stage_streams.hang_seconds = lambda tokens: 0.2
stage = mock.Mock(advance=lambda batch: time.sleep(600))
streams = stage_streams.StageStreams("flow", stage, 1, 60.0)
stage_streams.ticker(streams.check)
label = stage_streams.Label(1, 0, True, AudioFormat())
streams.run([stage_streams.Part(label, "", print)])
"""
    ended = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_SECONDS,
    )
    assert ended.returncode == DEVICE_LOST_STATUS, ended.stderr
    assert "and ends with status 70" in ended.stderr

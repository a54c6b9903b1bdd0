"""Replies through Triton's response senders, with stand-ins for Triton's objects."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from testkit.triton import FakeTriton
from token2wav.errors import InputError
from token2wav.serving.audio_output import AudioChunk
from token2wav.serving.end_limits import EndReason
from token2wav_server.replies import outputs_of


class Sender:
    """Response sender of one request. It does not survive a call after the final response."""

    def __init__(self) -> None:
        self.responses: list[Any] = []
        self.over = False

    def is_cancelled(self) -> bool:
        assert not self.over, "a question after the final response"
        return False

    def send(self, *responses: Any, flags: int = 0) -> None:
        assert not self.over, "a response after the final one"
        self.responses += responses
        self.over = bool(flags)


@pytest.fixture
def reply_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", FakeTriton())
    yield importlib.import_module("token2wav_server.triton_reply")
    for name in ("triton_reply", "triton_tensors"):
        sys.modules.pop(f"token2wav_server.{name}", None)


def test_a_reply_does_not_use_its_sender_after_the_end(reply_module: Any) -> None:
    """Tritonserver would crash."""
    sender = Sender()
    reply = reply_module.TritonReply(SimpleNamespace(get_response_sender=lambda: sender))
    chunk = AudioChunk(np.zeros(960, np.float32), 0, False, 24_000, 960, 0, 0, 1)
    reply.send(chunk)
    reply.fail(InputError("tokens", "none"))
    reply.send(chunk)
    reply.finish()
    assert not reply.is_cancelled()
    audio, error = sender.responses
    assert audio["audio"].shape == (960,)
    assert error == "INVALID_ARG tokens: none"


def test_no_capsule_prints_a_traceback(
    reply_module: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NumPy does not know the name that Triton gives to a capsule that it has used."""
    monkeypatch.setattr(sys, "unraisablehook", sys.__unraisablehook__)
    sender = Sender()
    reply = reply_module.TritonReply(SimpleNamespace(get_response_sender=lambda: sender))
    samples = np.arange(960, dtype=np.float32)
    reply.send(AudioChunk(samples, 0, True, 24_000, 960, 0, 0, 1))
    assert capsys.readouterr().err == ""
    np.testing.assert_array_equal(sender.responses[0]["audio"], samples)


@pytest.mark.parametrize(
    ("reason", "number"), [(None, 0), (EndReason.REPEATS, 1), (EndReason.SILENCE, 2)]
)
def test_each_limit_that_ends_a_stream_has_a_number(reason: EndReason | None, number: int) -> None:
    chunk = AudioChunk(np.zeros(9, np.float32), 0, True, 24_000, 960, end_reason=reason)
    assert outputs_of(chunk)["end_reason"].tolist() == [number]

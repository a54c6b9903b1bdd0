"""Replies through Triton's response senders, with stand-ins for Triton's objects."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from testkit.triton import Request, triton_module
from token2wav.errors import InputError
from token2wav.serving.audio_output import AudioChunk
from token2wav.serving.end_limits import EndReason
from token2wav_server.replies import outputs_of


@pytest.fixture
def reply_module() -> Iterator[Any]:
    with triton_module():
        yield importlib.import_module("token2wav_server.triton_reply")


def test_a_reply_does_not_use_its_sender_after_the_end(reply_module: Any) -> None:
    """Tritonserver would crash."""
    request = Request({})
    reply = reply_module.TritonReply(request)
    chunk = AudioChunk(np.zeros(960, np.float32), 0, False, 24_000, 960, 0, 0, 1)
    reply.send(chunk)
    reply.fail(InputError("tokens", "none"))
    reply.send(chunk)
    reply.finish()
    assert not reply.is_cancelled()
    audio, _ = request.next()
    assert audio["audio"].shape == (960,)
    assert request.next() == ("INVALID_ARG tokens: none", 1)


def test_no_capsule_prints_a_traceback(
    reply_module: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NumPy does not know the name that Triton gives to a capsule that it has used."""
    monkeypatch.setattr(sys, "unraisablehook", sys.__unraisablehook__)
    request = Request({})
    samples = np.arange(960, dtype=np.float32)
    reply_module.TritonReply(request).send(AudioChunk(samples, 0, True, 24_000, 960, 0, 0, 1))
    assert capsys.readouterr().err == ""
    np.testing.assert_array_equal(request.next()[0]["audio"], samples)


@pytest.mark.parametrize(
    ("reason", "number"), [(None, 0), (EndReason.REPEATS, 1), (EndReason.SILENCE, 2)]
)
def test_each_limit_that_ends_a_stream_has_a_number(reason: EndReason | None, number: int) -> None:
    chunk = AudioChunk(np.zeros(9, np.float32), 0, True, 24_000, 960, end_reason=reason)
    assert outputs_of(chunk)["end_reason"].tolist() == [number]

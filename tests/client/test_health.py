"""Command `health` against servers that answer in every wrong way.

The tests in tests/served run it against real servers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from testkit.rigs.fake_triton import Answer, fake_triton, refused, response
from token2wav.commands import main
from token2wav_client.errors import ResponseTimeoutError, ServerError
from token2wav_client.health import Examination

PATIENT = ("--connect-timeout=60", "--timeout=60")  # a busy machine takes its time


def spoken(request: Any, audio: npt.NDArray[Any]) -> Iterator[Any]:
    outputs = {"audio": audio, "chunk_index": np.array([0], np.int32), "final": np.array([True])}
    yield response(request.id, outputs, last=True)


def silent(request: Any, audio: npt.NDArray[Any]) -> Iterator[Any]:
    yield from ()


def one_sample_short(request: Any, audio: npt.NDArray[Any]) -> Iterator[Any]:
    yield from spoken(request, audio[:-1])


def not_finite(request: Any, audio: npt.NDArray[Any]) -> Iterator[Any]:
    audio[17] = np.nan
    yield from spoken(request, audio)


def health(answer: Answer, *arguments: str) -> int:
    with fake_triton(answer) as (url, _):
        return main(["health", f"--url={url}", *PATIENT, *arguments])


@pytest.mark.parametrize("audio_format", ["float32", "int16"])
def test_healthy(audio_format: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert health(spoken, f"--audio-format={audio_format}") == 0
    output = capsys.readouterr()
    assert re.fullmatch(
        r"healthy: first audio after \d+\.\d{3} s, complete audio after \d+\.\d{3} s\n", output.out
    )
    assert output.err == ""


def test_no_room_is_no_illness(capsys: pytest.CaptureFixture[str]) -> None:
    assert health(refused("streams: all 64 are in use; try again later")) == 0
    assert capsys.readouterr().out.startswith("healthy, but all streams are in use: ")


@pytest.mark.parametrize(
    ("answer", "status", "sentence"),
    [
        (one_sample_short, 4, "audio: the server sent 2879 samples for 3 tokens, expected 2880"),
        (not_finite, 4, "audio: the server sent NaN or infinite samples"),
        *(
            (refused(sentence), status, sentence)
            for status, sentence in (
                (4, "Stub process 'token2wav_0_0' is not healthy."),
                (6, "server: it is shutting down; try another one"),
                (6, "engine: it is starting; send the utterance again in some seconds"),
            )
        ),
    ],
)
def test_ill(
    answer: Answer, status: int, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert health(answer) == status
    assert capsys.readouterr().err == f"token2wav health: error: {sentence}\n"


def test_silence(capsys: pytest.CaptureFixture[str]) -> None:
    for timeout_s in (0.3, 3.0, 30.0):
        status = health(silent, f"--timeout={timeout_s}")
        errors = capsys.readouterr().err
        if status != 3:  # status 3: on a busy machine, even the connection was too late
            break
    assert status == 5
    match = re.fullmatch(
        r"token2wav health: error: the server did not synthesize 3 tokens within (\S+) s\n", errors
    )
    assert match
    assert float(match[1]) <= timeout_s  # minus the time that passed before


def test_after_its_time_every_error_is_a_time_out() -> None:
    """A call that gRPC ends on its deadline can fail in many ways."""
    with pytest.raises(ResponseTimeoutError), Examination(None, timeout_s=0.0).judging():
        raise ServerError("Stream removed")

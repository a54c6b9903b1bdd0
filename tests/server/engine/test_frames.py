"""Frames between engine and front: both ends agree, and nothing else is accepted."""

from __future__ import annotations

import contextlib
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from token2wav_server.engine import frames
from token2wav_server.engine.frames import (
    FrameBuffer,
    FrameError,
    RequestFrame,
    audio_frame,
    parse_audio,
    parse_failed,
    parse_ready,
    parse_request,
    parse_slot,
    request_frame,
)

INPUTS: dict[str, Any] = {
    "tokens": np.arange(7, dtype=np.int32),
    "prompt_mel": np.ones((3, 80), np.float32),
    "latents_fp16": np.zeros((0, 64), np.float16),
    "final": np.array([True]),
}
REQUEST = RequestFrame(5, 3, 2**63, '{"voice": "é"}', INPUTS)
PARSERS = {
    frames.REQUEST: parse_request,
    frames.CANCELLED: parse_slot,
    frames.READY: parse_ready,
    frames.AUDIO: parse_audio,
    frames.FINISHED: parse_slot,
    frames.FAILED: parse_failed,
}


def payload(frame: bytes) -> bytearray:
    [only] = FrameBuffer().add(frame)
    return only


@pytest.mark.parametrize("sequence_id", [0, 2**64 - 1, "", "text é"])
@pytest.mark.parametrize("parameters", ["", '{"keep_open": true}'])
def test_a_request_arrives_as_it_was_sent(sequence_id: int | str, parameters: str) -> None:
    sent = REQUEST._replace(sequence_id=sequence_id, parameters=parameters)
    request = parse_request(payload(request_frame(sent)))
    assert request[:4] == sent[:4]
    assert list(request.inputs) == list(INPUTS)
    for name, array in INPUTS.items():
        assert request.inputs[name].dtype == array.dtype
        assert (request.inputs[name] == array).all()
        assert request.inputs[name].shape == array.shape
    request.inputs["tokens"][0] = 1  # torch warns of arrays that cannot be written


@pytest.mark.parametrize("length", [0, frames.LARGEST_FRAME + 1, 2**32 - 1])
def test_a_frame_of_a_forbidden_length_is_refused_before_it_arrives(length: int) -> None:
    with pytest.raises(FrameError, match=f"a frame has {length} bytes"):
        payload(struct.pack("<I", length))


def tensor(number: int, shape: list[int], size: int) -> bytes:
    head = struct.pack(f"<B1sBB{len(shape)}qQ", 1, b"x", number, len(shape), *shape, size)
    return struct.pack("<BQB", frames.AUDIO, 1, 1) + head + bytes(8)


@pytest.mark.parametrize(
    ("frame", "problem"),
    [
        (struct.pack("<BQ", frames.REQUEST, 1), "ends 2 bytes too early"),
        (struct.pack("<BQBBQ", frames.REQUEST, 1, 0, 2, 7), "the sequence id has the form 2"),
        (struct.pack("<BQBBH2s", frames.REQUEST, 1, 0, 1, 2, b"\xff\xff"), "not UTF-8"),
        (struct.pack("<BQB", frames.CANCELLED, 1, 0), "1 bytes after its end"),
        (struct.pack("<BI", frames.AUDIO, 1), "the first frame has kind 17"),
        (struct.pack("<BI", frames.FINISHED, 1), "ends 4 bytes too early"),
        (struct.pack("<BQB1s", frames.FAILED, 1, 3, b"\xff"), "not UTF-8"),
        (struct.pack("<BQB", frames.FAILED, 1, 5), "the status 5 is unknown"),
        (tensor(99, [2], 8), "'x' has the data type 99"),
        (tensor(13, [2], 8), "'x' has the data type 13"),  # texts
        (tensor(8, [3], 8), r"'x' has the shape \(3,\) and 8 bytes"),
        (tensor(8, [-1, -2], 8), "has the shape"),
        (tensor(8, [2**62, 4, 2**40], 8), "has the shape"),
        (tensor(8, [0, 2**62], 0), "has the shape"),
        (tensor(8, [0, 2**26, 2**26, 2**26], 0), "has the shape"),
        (tensor(8, [3], 12), "ends 4 bytes too early"),
    ],
)
def test_a_frame_of_another_form_is_refused(frame: bytes, problem: str) -> None:
    parse = parse_ready if "first frame" in problem else PARSERS[frame[0]]
    with pytest.raises(FrameError, match=problem):
        parse(bytearray(frame))


@given(st.data())
def test_no_bytes_end_the_receiver(data: st.DataObject) -> None:
    """A frame with wrong bytes is read or refused, in no other way."""
    frame = bytearray(
        payload(data.draw(st.sampled_from([request_frame(REQUEST), audio_frame(1, INPUTS)])))
    )
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(1, len(frame) - 1))] = data.draw(st.integers(0, 255))
    del frame[data.draw(st.integers(1, len(frame))) :]
    with contextlib.suppress(FrameError):
        PARSERS[frame[0]](frame)

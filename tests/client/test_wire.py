"""Requests and responses in the form of the protocol."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tritonclient.grpc import service_pb2

from token2wav_client.errors import InputError, ProtocolError
from token2wav_client.tokens import as_tokens
from token2wav_client.wire import Opening, build_request, read_response

TRITON_TYPES = {
    "float32": "FP32",
    "int16": "INT16",
    "int32": "INT32",
    "bool": "BOOL",
    "int64": "INT64",
}


def response(**outputs: npt.NDArray[Any]) -> Any:
    message = service_pb2.ModelStreamInferResponse()
    message.infer_response.id = "3"
    for name, array in outputs.items():
        message.infer_response.outputs.add(
            name=name, datatype=TRITON_TYPES[array.dtype.name], shape=array.shape
        )
        message.infer_response.raw_output_contents.append(array.tobytes())
    return message


def chunk(**changes: npt.NDArray[Any]) -> Any:
    outputs: dict[str, npt.NDArray[Any]] = {
        "audio": np.array([0.5, -0.5], np.float32),
        "chunk_index": np.array([2], np.int32),
        "final": np.array([True]),
    }
    return response(**(outputs | changes))


@pytest.mark.parametrize("switch", [None, True, False])
def test_noise_is_a_parameter_if_it_is_given(switch: bool | None) -> None:
    opening = Opening(None, decoder_noise=switch)
    parameters = build_request("m", "s", "0", as_tokens([7]), opening=opening).parameters
    assert ("decoder_noise" in parameters) == (switch is not None)
    assert switch is None or parameters["decoder_noise"].bool_param == switch


@pytest.mark.parametrize("speed", [1, 1.25])
def test_another_speed_than_1_is_a_parameter(speed: float) -> None:
    """Servers of earlier versions refuse the parameter."""
    parameters = build_request(
        "m", "s", "0", as_tokens([7]), opening=Opening("anna", speed=speed)
    ).parameters
    assert ("speed" in parameters) == (speed != 1)
    assert speed == 1 or parameters["speed"].double_param == speed


@pytest.mark.parametrize("speed", [0.4, 2.5, float("nan")])
def test_an_impossible_speed_is_refused(speed: float) -> None:
    with pytest.raises(InputError, match=r"speed: .* is not from 0\.5 to 2"):
        Opening("anna", speed=speed)


def test_a_chunk_is_read_and_may_be_written_to() -> None:
    answer = read_response(chunk(), "float32")
    assert answer.request_id == "3"
    assert not answer.last_of_request
    assert answer.chunk is not None
    assert (answer.chunk.index, answer.chunk.final) == (2, True)
    assert answer.chunk.audio.tolist() == [0.5, -0.5]
    assert answer.chunk.audio.flags.writeable


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (chunk(audio=np.zeros(3, np.int16)), "audio: the server sent int16, expected float32"),
        (chunk(audio=np.zeros((3, 1), np.float32)), r"audio: the server sent shape \(3, 1\)"),
        (chunk(audio=np.zeros((1, 3, 2), np.float32)), r"the server sent shape \(1, 3, 2\), expec"),
        (chunk(chunk_index=np.array([1], np.int64)), "chunk_index: the server sent int64"),
        (chunk(final=np.array([True, False])), "final: the server sent 1 and 2 values"),
        (
            chunk(samples_trimmed=np.array([-1], np.int32)),
            r"samples_trimmed: the server sent \[-1\], expected one number of",
        ),
        (response(audio=np.zeros(3, np.float32)), "chunk_index: missing"),
    ],
)
def test_responses_that_violate_the_protocol_are_refused(message: Any, words: str) -> None:
    with pytest.raises(ProtocolError, match=words):
        read_response(message, "float32")


def test_a_tensor_shorter_than_its_shape_is_refused() -> None:
    message = chunk()
    message.infer_response.raw_output_contents[0] = b"\x00" * 4
    with pytest.raises(ProtocolError, match="audio: the server sent an unreadable tensor"):
        read_response(message, "float32")

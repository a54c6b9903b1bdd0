"""Requests and responses in the form of the protocol."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tritonclient.grpc import service_pb2

from token2wav_client.errors import InputError, ProtocolError, ServerError
from token2wav_client.tokens import as_tokens
from token2wav_client.voice import ClientVoice
from token2wav_client.wire import Opening, build_request, read_response

TRITON_TYPES = {
    "float32": "FP32",
    "int16": "INT16",
    "int32": "INT32",
    "bool": "BOOL",
    "int64": "INT64",
}


def tensors(request: Any) -> dict[str, tuple[str, list[int], bytes]]:
    return {
        tensor.name: (tensor.datatype, list(tensor.shape), content)
        for tensor, content in zip(request.inputs, request.raw_input_contents, strict=True)
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


def test_a_voice_that_the_server_knows_goes_by_its_id() -> None:
    opening = Opening("0123" * 16, "float32", keep_open=True)  # in hexadecimal digits
    sent = tensors(build_request("token2wav", "sequence", "0", as_tokens([7]), opening=opening))
    assert sent["voice_id"] == ("UINT8", [32], b"\x01\x23" * 16)
    assert set(sent) == {"tokens", "voice_id"}


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


def test_a_voice_of_the_server_goes_by_its_name() -> None:
    for name in ("anna", "Änne 2", "0123" * 15):
        opening = Opening(name, "float32", keep_open=True)
        request = build_request("token2wav", "sequence", "0", as_tokens([7]), opening=opening)
        assert request.parameters["voice"].string_param == name
        assert set(tensors(request)) == {"tokens"}
    assert "voice" not in build_request("token2wav", "sequence", "1", as_tokens([7])).parameters


def test_the_first_request_carries_voice_and_options(
    voice_arrays: dict[str, npt.NDArray[Any]],
) -> None:
    voice = ClientVoice(**voice_arrays)
    opening = Opening(voice, "mulaw", keep_open=True, sample_rate=8000)
    request = build_request("token2wav", "sequence", "0", as_tokens([7, 300]), opening=opening)
    assert request.model_name == "token2wav"
    assert request.id == "0"
    parameters = request.parameters
    assert parameters["sequence_id"].string_param == "sequence"
    assert parameters["sequence_start"].bool_param
    assert not parameters["sequence_end"].bool_param
    assert parameters["audio_format"].string_param == "mulaw"
    assert parameters["sample_rate"].int64_param == 8000
    assert parameters["keep_open"].bool_param
    assert parameters["triton_enable_empty_final_response"].bool_param
    assert tensors(request) == {
        "tokens": ("INT32", [2], b"\x07\x00\x00\x00\x2c\x01\x00\x00"),
        "prompt_tokens": ("INT32", [4], voice.prompt_tokens.astype("<i4").tobytes()),
        "prompt_mel": ("FP32", [8, 80], voice.prompt_mel.astype("<f4").tobytes()),
        "speaker_embedding": ("FP32", [192], voice.speaker_embedding.astype("<f4").tobytes()),
    }


def test_later_requests_carry_tokens_only() -> None:
    request = build_request("token2wav", "sequence", "4", as_tokens([]), end=True)
    assert tensors(request) == {"tokens": ("INT32", [0], b"")}
    assert not request.parameters["sequence_start"].bool_param
    assert request.parameters["sequence_end"].bool_param
    assert "keep_open" not in request.parameters


def test_a_chunk_is_read_and_may_be_written_to() -> None:
    answer = read_response(chunk(), "float32")
    assert answer.request_id == "3"
    assert not answer.last_of_request
    assert answer.chunk is not None
    assert (answer.chunk.index, answer.chunk.final) == (2, True)
    assert answer.chunk.audio.tolist() == [0.5, -0.5]
    assert answer.chunk.audio.flags.writeable


@pytest.mark.parametrize("samples", [3, 0])
def test_two_channels_are_two_columns(samples: int) -> None:
    audio = np.arange(2 * samples, dtype=np.int16).reshape(samples, 2)
    answer = read_response(chunk(audio=audio), "int16")
    assert answer.chunk is not None
    assert np.array_equal(answer.chunk.audio, audio)
    assert answer.chunk.duration_s == samples / 24_000


def test_the_end_of_a_request_may_sit_on_a_chunk_or_come_alone() -> None:
    with_chunk, alone = chunk(), response()
    for message in (with_chunk, alone):
        message.infer_response.parameters["triton_final_response"].bool_param = True
    answer = read_response(with_chunk, "float32")
    assert answer.last_of_request
    assert answer.chunk is not None
    answer = read_response(alone, "float32")
    assert answer.last_of_request
    assert answer.chunk is None


def test_an_error_response_carries_the_servers_words() -> None:
    message = service_pb2.ModelStreamInferResponse(
        error_message="tokens: 9001 is out of vocabulary"
    )
    with pytest.raises(ServerError, match=r"^tokens: 9001 is out of vocabulary$"):
        read_response(message, "float32")


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

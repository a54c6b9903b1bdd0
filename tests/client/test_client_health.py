"""The command `health` against servers that answer in every way they should not. Real ones: tests/server."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from token2wav_client.cli import main

Answer = Callable[[Any, npt.NDArray[Any]], Iterator[Any]]  # from the request and its true audio


class FakeServer(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """Says that it is ready, and answers an utterance with what it is told."""

    def __init__(self, answer: Answer) -> None:
        self.ready = True
        self._answer = answer

    def ModelReady(self, request: Any, context: Any) -> Any:
        return service_pb2.ModelReadyResponse(ready=self.ready)

    def ModelStreamInfer(self, requests: Iterator[Any], context: Any) -> Iterator[Any]:
        for request in requests:
            dtype = np.dtype(request.parameters["audio_format"].string_param)
            yield from self._answer(request, np.zeros(960 * 3, dtype))


def spoken(request: Any, audio: npt.NDArray[Any]) -> Iterator[Any]:
    outputs = {"audio": audio, "chunk_index": np.array([0], np.int32), "final": np.array([True])}
    types = {"float32": "FP32", "int16": "INT16", "int32": "INT32", "bool": "BOOL"}
    response = service_pb2.ModelInferResponse(id=request.id)
    response.parameters["triton_final_response"].bool_param = True
    for name, array in outputs.items():
        response.outputs.add(name=name, datatype=types[array.dtype.name], shape=array.shape)
        response.raw_output_contents.append(array.tobytes())
    yield service_pb2.ModelStreamInferResponse(infer_response=response)


def refused(message: str) -> Answer:
    def answer(request: Any, audio: npt.NDArray[Any]) -> Iterator[Any]:
        yield service_pb2.ModelStreamInferResponse(error_message=message)

    return answer


def silent(request: Any, audio: npt.NDArray[Any]) -> Iterator[Any]:
    time.sleep(0.6)
    yield from spoken(request, audio)


def one_sample_short(request: Any, audio: npt.NDArray[Any]) -> Iterator[Any]:
    yield from spoken(request, audio[:-1])


def not_finite(request: Any, audio: npt.NDArray[Any]) -> Iterator[Any]:
    audio[17] = np.nan
    yield from spoken(request, audio)


def health(answer: Answer, *arguments: str, ready: bool = True) -> int:
    with ThreadPoolExecutor(4) as pool:
        server = grpc.server(pool)
        fake = FakeServer(answer)
        fake.ready = ready
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(fake, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            return main(["health", f"--url=127.0.0.1:{port}", *arguments])
        finally:
            server.stop(0).wait()


@pytest.mark.parametrize("audio_format", ["float32", "int16"])
def test_healthy(audio_format: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert health(spoken, f"--audio-format={audio_format}") == 0
    output = capsys.readouterr()
    assert output.out.startswith("healthy: first audio after 0.")
    assert len(output.out.splitlines()) == 1
    assert output.err == ""


def test_no_room_is_no_illness(capsys: pytest.CaptureFixture[str]) -> None:
    assert health(refused("streams: all 64 are in use; try again later")) == 0
    assert capsys.readouterr().out.startswith("healthy, without room for another utterance: ")


@pytest.mark.parametrize(
    ("answer", "status", "sentence"),
    [
        (silent, 5, "the server did not speak 3 tokens within 0.3 s"),
        (one_sample_short, 4, "audio: the server sent 2879 samples for 3 tokens, expected 2880"),
        (not_finite, 4, "audio: the server sent NaN or infinite samples"),
        (refused("Stub process 'token2wav_0_0' is not healthy."), 4, "Stub process 'token2wav_0_0' is not healthy."),
        (refused("server: it is shutting down; try another one"), 6, "server: it is shutting down; try another one"),
    ],
)
def test_ill(answer: Answer, status: int, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert health(answer, "--timeout=0.3" if answer is silent else "--timeout=10") == status
    assert capsys.readouterr().err == f"token2wav-client: error: {sentence}\n"


def test_model_that_is_not_ready(capsys: pytest.CaptureFixture[str]) -> None:
    assert health(spoken, ready=False) == 6
    assert "model 'token2wav' at 127.0.0.1:" in capsys.readouterr().err

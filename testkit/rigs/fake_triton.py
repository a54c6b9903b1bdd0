"""gRPC server that answers an utterance with the responses of a function."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import np_to_triton_dtype

# A client that also cancels does so within this time after the end of its requests.
_CANCEL_SECONDS = 0.1

Answer = Callable[[Any, npt.NDArray[Any]], Iterator[Any]]  # from the request and its true audio


class FakeTriton(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """Server of an utterance of three tokens.

    Attributes:
        metadata: headers of the streams.
        half_closed: number of streams with an end of the requests, and without a cancel.
        ends_streams: whether the server ends a stream after the end of its requests. Otherwise the
            client has to cancel.
    """

    half_closed = 0
    ends_streams = True

    def __init__(self, answer: Answer) -> None:
        self.metadata: dict[str, str] = {}
        self._answer = answer

    def ModelReady(self, request: Any, context: Any) -> Any:
        return service_pb2.ModelReadyResponse(ready=True)

    def ModelStreamInfer(self, requests: Iterator[Any], context: Any) -> Iterator[Any]:
        self.metadata |= dict(context.invocation_metadata())
        gone = threading.Event()
        context.add_callback(gone.set)
        for request in requests:
            dtype = np.dtype(request.parameters["audio_format"].string_param)
            answers = list(self._answer(request, np.zeros(960 * 3, dtype)))
            yield from answers
            if not answers:  # no answer, and no end of the stream
                gone.wait()
        if not gone.wait(_CANCEL_SECONDS):
            self.half_closed += 1
        if not self.ends_streams:
            gone.wait()


def response(
    request_id: str, outputs: Mapping[str, npt.NDArray[Any]], *, last: bool = False
) -> Any:
    """Returns a response with output tensors; the last one of its request or not."""
    message = service_pb2.ModelInferResponse(id=request_id)
    message.parameters["triton_final_response"].bool_param = last
    for name, array in outputs.items():
        message.outputs.add(name=name, datatype=np_to_triton_dtype(array.dtype), shape=array.shape)
        message.raw_output_contents.append(array.tobytes())
    return service_pb2.ModelStreamInferResponse(infer_response=message)


def refused(message: str) -> Answer:
    def answer(request: Any, audio: npt.NDArray[Any]) -> Iterator[Any]:
        yield service_pb2.ModelStreamInferResponse(error_message=message)

    return answer


@contextmanager
def fake_triton(answer: Answer) -> Iterator[tuple[str, FakeTriton]]:
    """Serves on a free port; yields its host:port, and the server."""
    with ThreadPoolExecutor(4) as pool:
        server, fake = grpc.server(pool), FakeTriton(answer)
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(fake, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"127.0.0.1:{port}", fake
        finally:
            server.stop(0).wait()

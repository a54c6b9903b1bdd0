"""Server of a model in the process of a test, with the calls of Triton's gRPC port that clients
make.

The door, the requests and the replies are real, and so is gRPC. Triton, its fronts, the process of
the engine and the launcher are not here: `testkit/rigs/server_rig.py` has them.
"""

from __future__ import annotations

import json
import queue
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2, service_pb2, service_pb2_grpc

from testkit.models.golden import ROOT
from testkit.patience import until
from token2wav import Token2Wav
from token2wav.config import ServerConfig
from token2wav.errors import Token2WavError
from token2wav.serving.audio_output import AudioChunk
from token2wav.serving.door.service import Service
from token2wav.serving.observer import Observer
from token2wav.serving.utterance import Utterance
from token2wav_server.launcher.repository import prepare
from token2wav_server.replies import outputs_of
from token2wav_server.requests import message_of

_TYPES: dict[str, Any] = {
    "INT32": np.int32,
    "UINT8": np.uint8,
    "FP32": np.float32,
    "FP16": np.float16,
    "INT16": np.int16,
    "BOOL": np.bool_,
}
_NAMES = {np.dtype(kind): name for name, kind in _TYPES.items()}
_START, _END = 1, 2  # flags of a request
_THREADS = 256  # two for each gRPC stream


class _Ends(Observer):
    """Counts open utterances, and ended utterances by reason."""

    def __init__(self) -> None:
        self.open = 0
        self.reasons: Counter[str] = Counter()

    def admitted(self, open_utterances: int) -> None:
        self.open = open_utterances

    def changed(self, open_utterances: int) -> None:
        self.open = open_utterances

    def ended(self, utterance: Utterance, reason: str) -> None:
        self.reasons[reason] += 1


@dataclass(frozen=True)
class Address:
    """Address of a server, under the name that `TritonServer` has for it."""

    grpc_url: str


@dataclass(frozen=True)
class DoorServer:
    """A server under test, with the methods of `server_rig.Rig` that need no Triton."""

    server: Address
    model: Token2Wav
    _ends: _Ends

    @classmethod
    @contextmanager
    def start(
        cls, folder: Path, repository: Path, config: ServerConfig | None = None
    ) -> Iterator[DoorServer]:
        """Serves a model folder.

        Args:
            repository: empty folder for a copy of the model repository.
        """
        config, ends = config or ServerConfig(), _Ends()
        model = Token2Wav.load(folder, stream=config.stream)
        service = Service(model.pipeline, model.summary, config, ends)
        threads = ThreadPoolExecutor(_THREADS)
        server = grpc.server(threads, options=[("grpc.max_receive_message_length", -1)])
        prepare(ROOT / "model_repository", ["token2wav"], folder, repository)
        calls = _Calls(service, repository)
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(calls, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield cls(Address(f"127.0.0.1:{port}"), model, ends)
        finally:
            server.stop(None).wait()
            service.close()
            threads.shutdown()

    def ended(self) -> Counter[str]:
        """Streams that are over, by reason."""
        return self._ends.reasons.copy()

    def wait_until_empty(self) -> None:
        """Waits until no stream is open, and `ended` counts all that were."""
        until(lambda: not self.model.pipeline.open_streams and not self._ends.open)


class _Calls(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """Calls of Triton's gRPC port."""

    def __init__(self, service: Service, repository: Path) -> None:
        self._service = service
        text = (repository / "token2wav" / "config.pbtxt").read_text(encoding="utf-8")
        self._config = text_format.Parse(text, model_config_pb2.ModelConfig())

    def ModelReady(self, request: Any, context: Any) -> Any:
        return service_pb2.ModelReadyResponse(ready=request.name == "token2wav")

    def ModelConfig(self, request: Any, context: Any) -> Any:
        return service_pb2.ModelConfigResponse(config=self._config)

    def ModelMetadata(self, request: Any, context: Any) -> Any:
        answer = service_pb2.ModelMetadataResponse(name=request.name)
        for entry in self._config.input:
            name = model_config_pb2.DataType.Name(entry.data_type).removeprefix("TYPE_")
            answer.inputs.add(name=entry.name, datatype=name, shape=entry.dims)
        return answer

    def ModelStreamInfer(self, requests: Iterator[Any], context: Any) -> Iterator[Any]:
        stream = _Stream()
        if not context.add_callback(partial(self._leave, stream)):
            return  # the client has gone already
        threading.Thread(target=self._read, args=(stream, requests), daemon=True).start()
        while (answer := stream.answers.get()) is not None:
            yield answer

    def _read(self, stream: _Stream, requests: Iterator[Any]) -> None:
        try:
            for request in requests:
                reply = _Reply(stream, request.id)
                self._service.take(partial(_message, request), reply)
        except grpc.RpcError:  # the client has gone
            return
        stream.end_of_requests()

    def _leave(self, stream: _Stream) -> None:
        stream.is_gone = True
        stream.answers.put(None)
        self._service.drop_abandoned()


class _Stream:
    """gRPC stream of a client.

    Attributes:
        answers: responses in their order; None after the last one.
        is_gone: whether the stream is over.
    """

    def __init__(self) -> None:
        self.answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.is_gone = False
        self._open = 1  # replies, and one for the client that may send more requests
        self._lock = threading.Lock()

    def begin(self) -> None:
        with self._lock:
            self._open += 1

    def end_of_requests(self) -> None:
        with self._lock:
            self._open -= 1
            if not self._open:
                self.answers.put(None)


class _Reply:
    """Reply to a request, sent to its gRPC stream."""

    def __init__(self, stream: _Stream, request_id: str) -> None:
        self._stream, self._id = stream, request_id
        stream.begin()

    def send(self, chunk: AudioChunk) -> None:
        self._answer(outputs_of(chunk), final=False)

    def finish(self) -> None:
        self._answer({}, final=True)
        self._stream.end_of_requests()

    def fail(self, error: Token2WavError) -> None:
        answer = service_pb2.ModelStreamInferResponse(error_message=str(error))
        answer.infer_response.id = self._id
        self._stream.answers.put(answer)
        self._stream.end_of_requests()

    def is_cancelled(self) -> bool:
        return self._stream.is_gone

    def _answer(self, outputs: dict[str, np.ndarray[Any, Any]], *, final: bool) -> None:
        answer = service_pb2.ModelStreamInferResponse()
        response = answer.infer_response
        response.id = self._id
        response.parameters["triton_final_response"].bool_param = final
        for name, array in outputs.items():
            response.outputs.add(name=name, datatype=_NAMES[array.dtype], shape=array.shape)
            response.raw_output_contents.append(array.tobytes())
        self._stream.answers.put(answer)


def _message(request: Any) -> Any:
    """Reads a request into a message."""
    values = {
        name: getattr(value, value.WhichOneof("parameter_choice"))
        for name, value in request.parameters.items()
    }
    inputs = {
        entry.name: np.frombuffer(content, _TYPES[entry.datatype]).reshape(entry.shape)
        for entry, content in zip(request.inputs, request.raw_input_contents, strict=True)
    }
    flags = _START * bool(values.get("sequence_start")) | _END * bool(values.get("sequence_end"))
    return message_of(values.get("sequence_id", 0), flags, json.dumps(values), inputs)

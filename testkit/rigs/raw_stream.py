"""Raw gRPC stream that sends any message, including messages that our own client rejects."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from types import TracebackType
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2_grpc

from token2wav_client.audio import AudioFormat
from token2wav_client.wire import Opening, build_request, read_response

PATIENCE_SECONDS = 120.0  # timeout of one whole stream
# Keeps few unread responses in flight to the client.
SMALL_WINDOW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65536))

Spoil = Callable[[Any], None]


@dataclass
class Answers:
    """Answers to some requests: audio of each chunk, and errors."""

    audio: list[NDArray[Any]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


class RawStream:
    """One gRPC stream on its own connection, for one utterance.

    The stream reads nothing before `answers` is called.

    Args:
        url: host:port.
        sequence: sequence id; empty for whole utterances.
        stream_key: secret of the utterance; empty for none.
    """

    def __init__(
        self,
        url: str,
        sequence: str = "",
        options: tuple[tuple[str, int], ...] = (),
        *,
        stream_key: str = "",
    ) -> None:
        self._sequence = sequence
        self._stream_key = stream_key
        self._format: AudioFormat = "float32"
        self._requests = 0
        self._outbox: SimpleQueue[Any] = SimpleQueue()
        self._channel = grpc.insecure_channel(
            url, options=[("grpc.use_local_subchannel_pool", 1), *options]
        )
        stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._call = stub.ModelStreamInfer(iter(self._outbox.get, None), timeout=PATIENCE_SECONDS)

    def send(
        self,
        tokens: NDArray[np.int32],
        opening: Opening | None = None,
        *,
        end: bool = False,
        spoil: Spoil = lambda _: None,
    ) -> None:
        """Sends a request after `spoil` has changed it."""
        if opening is not None:
            self._format = opening.audio_format
        message = build_request(
            "token2wav",
            self._sequence,
            str(self._requests),
            tokens,
            stream_key=self._stream_key,
            opening=opening,
            end=end,
        )
        spoil(message)
        self._requests += 1
        self._outbox.put(message)

    def read(self, answers: Answers) -> bool:
        """Waits for one response and adds it to the answers; returns whether it ends a request.

        Raises:
            grpc.RpcError: the server ended the stream, or was silent for too long.
        """
        message = next(self._call)
        if message.error_message:
            answers.errors.append(message.error_message)
            return True
        response = read_response(message, self._format)
        if response.chunk is not None:
            answers.audio.append(response.chunk.audio)
        return response.last_of_request

    def answers(self, requests: int = 1) -> Answers:
        """Reads until `requests` requests have ended."""
        answers = Answers()
        while requests:
            requests -= self.read(answers)
        return answers

    def close(self) -> None:
        """Drops the connection at once, without a message to the server."""
        self._channel.close()
        self._outbox.put(None)  # releases gRPC's thread that waits for requests

    def __enter__(self) -> RawStream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()


def fewer_bytes(message: Any) -> None:
    """Sends fewer bytes of the first input than its shape needs."""
    message.raw_input_contents[0] = message.raw_input_contents[0][:-3]

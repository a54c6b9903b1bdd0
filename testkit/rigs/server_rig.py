"""A running server and the plainest possible client: requests as anyone's gRPC client would send
them.

Our own client checks its arguments before it sends them; here everything is sent as it is.
"""

from __future__ import annotations

import queue
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as triton
from numpy.typing import NDArray

from testkit.patience import PATIENCE_SECONDS, until
from testkit.rigs.metrics import labelled, scrape
from testkit.rigs.settings import comparable
from token2wav import Voice
from token2wav_server import ServerStartError
from token2wav_server.launcher.access import Access
from token2wav_server.launcher.binaries import wheel_has_stub
from token2wav_server.launcher.ports import Ports
from token2wav_server.launcher.process import TritonServer

_TYPES = {
    "uint8": "UINT8",
    "int32": "INT32",
    "int64": "INT64",
    "float16": "FP16",
    "float32": "FP32",
    "float64": "FP64",
}
_START_SECONDS = 150.0
# The ensemble is a Python model, which does not run with Python 3.14.
BOTH_MODELS = ("token2wav", "token2wav_ensemble")[: 2 if wheel_has_stub() else 1]


@dataclass(frozen=True)
class Rig:
    """A server under test."""

    server: TritonServer

    @classmethod
    @contextmanager
    def start(
        cls,
        model: Path,
        folder: Path,
        settings: str | None = None,
        access: Access | None = None,
        models: Sequence[str] = (),
        repository: Path | None = None,
    ) -> Iterator[Rig]:
        """Starts a server. Unless the settings describe streams, streams wait for whole blocks, so
        that audio can be compared.
        """
        config = folder / "server.yaml"
        config.write_text(comparable(settings or ""))
        server = TritonServer(
            model,
            config=config,
            model_repository=repository,
            models=models,
            ports=Ports.free(),
            access=access,
            log_file=folder / "triton.log",
            ready_timeout_s=_START_SECONDS,
        )
        try:
            try:
                server.start()
            except ServerStartError as error:
                if "was not ready" not in str(error) and "killed by SIGABRT" not in str(error):
                    raise
                # On a busy machine Triton's Python backend aborts in 1 of 200 starts (2.51:
                # "lock_exception"), and hung once in thousands: to be read by people, but no test
                # of theirs.
                warnings.warn(f"a server started at the second try only: {error}", stacklevel=2)
                server.start()
            yield cls(server)
        finally:
            server.stop()

    def metrics(self) -> dict[str, float]:
        """Returns the values of the metrics port."""
        return scrape(self.server.metrics_url)

    def open_streams(self) -> dict[str, float]:
        """Returns the gauges of the parts of the server."""
        return labelled(self.metrics(), "token2wav_open_streams")

    def wait_until_empty(self) -> None:
        until(lambda: set(self.open_streams().values()) == {0})

    def ended(self) -> Counter[str]:
        """Streams that are over, by reason."""
        counts = labelled(self.metrics(), "token2wav_streams_ended_total")
        return Counter({reason: int(count) for reason, count in counts.items()})

    def connect(
        self, model: str = "token2wav", headers: dict[str, str] | None = None
    ) -> AbstractContextManager[Connection]:
        return Connection.open(self.server.grpc_url, model, headers)


@dataclass
class Answers:
    """All responses to one request, or to several of an utterance."""

    chunks: list[tuple[int, bool, NDArray[Any]]] = field(default_factory=list)
    # first token and number of tokens of every chunk
    spoken: list[tuple[int, int]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    @property
    def audio(self) -> NDArray[Any]:
        # Triton may swap responses to different requests of a stream.
        return np.concatenate(
            [audio for _, _, audio in sorted(self.chunks, key=lambda chunk: chunk[0])]
        )


@dataclass
class Connection:
    """One gRPC stream."""

    client: triton.InferenceServerClient
    model: str
    inbox: queue.Queue[tuple[Any, Any]] = field(default_factory=queue.Queue)

    @classmethod
    @contextmanager
    def open(
        cls, url: str, model: str = "token2wav", headers: dict[str, str] | None = None
    ) -> Iterator[Connection]:
        client = triton.InferenceServerClient(url)
        connection = cls(client, model)
        client.start_stream(
            lambda result, error: connection.inbox.put((result, error)), headers=headers
        )
        try:
            yield connection
        finally:
            connection.cancel()
            client.close()

    def cancel(self) -> None:
        self.client.stop_stream(cancel_requests=True)

    def send(
        self,
        tokens: Any,
        voice: Voice | dict[str, NDArray[Any]] | None = None,
        sequence: int | str = 0,
        *,
        start: bool = False,
        end: bool = False,
        parameters: dict[str, Any] | None = None,
        field: str = "tokens",
        name: str = "",
    ) -> None:
        inputs = {field: tokens if isinstance(tokens, np.ndarray) else np.array(tokens, np.int32)}
        if isinstance(voice, Voice):
            inputs |= voice_inputs(voice)
        elif voice is not None:
            inputs |= voice
        self.client.async_stream_infer(
            self.model,
            [request_input(name, array) for name, array in inputs.items()],
            sequence_id=sequence,
            sequence_start=start,
            sequence_end=end,
            request_id=name,
            enable_empty_final_response=True,
            parameters=parameters,
        )

    def receive(self) -> Any:
        """Waits for a response."""
        result, error = self.inbox.get(timeout=PATIENCE_SECONDS)
        assert error is None, error
        return result

    def error(self) -> str:
        """Waits for a response that is an error."""
        _, error = self.inbox.get(timeout=PATIENCE_SECONDS)
        assert error is not None
        message: str = error.message()
        return message

    def answers(self, requests: int = 1) -> Answers:
        """Reads until `requests` requests are finished or failed."""
        answers = Answers()
        while requests:
            requests -= self._read(answers)
        return answers

    def first_chunk(self) -> Answers:
        """Reads until there is a chunk, before the request that it answers is finished."""
        answers = Answers()
        while not answers.chunks:
            assert not self._read(answers), answers.errors
        return answers

    def _read(self, answers: Answers) -> bool:
        """Reads one response; returns whether its request is finished or failed."""
        result, error = self.inbox.get(timeout=PATIENCE_SECONDS)
        if error is not None:
            answers.errors.append(error.message())
            return True
        response = result.get_response()
        if response.outputs:
            index, final = (int(result.as_numpy(name).item()) for name in ("chunk_index", "final"))
            answers.chunks.append((index, bool(final), result.as_numpy("audio").copy()))
            first, count = (
                int(result.as_numpy(name).item()) for name in ("first_token", "token_count")
            )
            answers.spoken.append((first, count))
        return is_final(result)


def is_final(result: Any) -> bool:
    """Returns whether a response is the last one to its request."""
    return bool(result.get_response().parameters["triton_final_response"].bool_param)


def voice_inputs(voice: Voice) -> dict[str, NDArray[Any]]:
    return {
        "prompt_tokens": voice.prompt_tokens,
        "prompt_mel": voice.prompt_mel,
        "speaker_embedding": voice.speaker_embedding,
    }


def request_input(name: str, array: NDArray[Any]) -> triton.InferInput:
    value = triton.InferInput(name, list(array.shape), _TYPES[array.dtype.name])
    value.set_data_from_numpy(array)
    return value

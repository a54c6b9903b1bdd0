"""Scheduling model of the ensemble, and its stand-ins for the stages."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton_python_backend_utils as pb_utils

from token2wav.assembly import withheld_samples
from token2wav.config import ServerConfig
from token2wav.config.model_config import StageName
from token2wav.errors import BackendError, ConfigError, LimitError, attempt
from token2wav.published.registry import read_config
from token2wav.serving.audio_mark import load_mark
from token2wav.serving.door.message import Message
from token2wav.serving.door.service import Service
from token2wav.serving.pipeline import Pipeline
from token2wav.stages.stage import DEFAULT_OPTIONS, Stage, StageSummary, StreamOptions
from token2wav.voice import FIELDS, Voice
from token2wav_server.ensemble.calls import (
    CALL,
    REPLY,
    Arrays,
    Call,
    Chunk,
    advance_call,
    call_bytes,
    outputs_in,
    results_in,
)
from token2wav_server.metrics import ServerMetrics
from token2wav_server.model_process import CANARY_VARIABLE, check_not_draining, is_canary
from token2wav_server.requests import message_of
from token2wav_server.triton_reply import TritonReply
from token2wav_server.triton_tensors import array_of, inputs_of, tensor_of

_WORKERS = 2  # while the vocoder computes one batch, the flow computes another
_NO_BACKEND = StageSummary("torch", "float32", "cpu")  # this process computes nothing


class RemoteStage(Stage[None]):
    """Stage that another model of Triton computes.

    The calls of Triton are possible only after the models are loaded.

    Args:
        name: name of the model, which is that of the stage.

    Attributes:
        is_loaded: whether calls are possible.
    """

    def __init__(self, name: StageName, key: str, withheld_samples: int) -> None:
        super().__init__()
        self._name, self._key = name, key
        self._withheld_samples = withheld_samples
        self.is_loaded = False
        # The end of a stream does not wait for the batch that the stage computes.
        self._closer = ThreadPoolExecutor(1, "close")

    @property
    def withheld_samples(self) -> int:
        return self._withheld_samples

    def open(self, voice: Voice, options: StreamOptions = DEFAULT_OPTIONS) -> int:
        arrays = {name: getattr(voice, name) for name in FIELDS}
        handle = int(self._call(Call("open", astuple(options), arrays))["handle"].item())
        self._streams[handle] = None
        return handle

    def advance(self, batch: Sequence[tuple[int, Chunk]]) -> list[torch.Tensor]:
        return results_in(self._call(advance_call(batch)))

    def close(self, handle: int) -> None:
        if handle in self._streams:
            super().close(handle)
            self._closer.submit(attempt, self._close, handle)

    def stop(self) -> None:
        """Waits until the ends of all streams are sent."""
        self._closer.shutdown()

    def _close(self, handle: int) -> None:
        self._call(Call("close", handle, {}))

    def _call(self, call: Call) -> Arrays:
        if not self.is_loaded:
            raise LimitError(f"{self._name}: it is not loaded yet; try again later")
        tensor = tensor_of(CALL, call_bytes(self._key, call))
        response = pb_utils.InferenceRequest(
            model_name=self._name, requested_output_names=[REPLY], inputs=[tensor]
        ).exec()
        if response.has_error():
            raise BackendError(f"backend: {self._name}: {response.error().message()}")
        return outputs_in(array_of(pb_utils.get_output_tensor_by_name(response, REPLY)))


class Ensemble:
    """Service behind the Triton model `token2wav_ensemble`."""

    def __init__(self, folder: Path, server: ServerConfig) -> None:
        key = os.environ.get(CANARY_VARIABLE)
        if not key:
            raise ConfigError(f"{CANARY_VARIABLE}: not set; `token2wav serve` sets it")
        config = read_config(folder).with_stream_settings(server.stream)
        config.check(server.stream)
        withheld = withheld_samples(config, server.stream)
        self._stages = {name: RemoteStage(name, key, withheld) for name in config.stages}
        mark = load_mark(server.stream.mark) if server.stream.mark is not None else None
        pipeline = Pipeline(config, self._stages, server.stream, mark=mark)
        self._service = Service(
            pipeline,
            _NO_BACKEND,
            replace(server, runtime=replace(server.runtime, workers=_WORKERS)),
            ServerMetrics(pipeline),
            check_admission=check_not_draining,
            is_canary=is_canary,
        )
        for stage in self._stages.values():
            stage.is_loaded = True

    def execute(self, requests: list[Any]) -> None:
        """Queues the tokens of requests. Other threads send their responses later."""
        for request in requests:
            self._service.take(partial(_message, request), TritonReply(request))

    def close(self) -> None:
        """Ends all utterances."""
        self._service.close()
        for stage in self._stages.values():
            stage.stop()


def _message(request: Any) -> Message:
    """Reads a request. The arrays of the message are views of Triton's memory."""
    return message_of(
        request.correlation_id(), request.flags(), request.parameters(), inputs_of(request)
    )

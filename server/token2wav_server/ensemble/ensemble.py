"""Scheduling model of the ensemble, and its stand-ins for the stages."""

from __future__ import annotations

import json
import os
import secrets
import threading
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
from token2wav.errors import BackendError, ConfigError, LimitError, Token2WavError, attempt
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
    batch_arguments,
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


class RemoteStage(Stage[list[Any]]):
    """Stage that another model of Triton computes.

    A call also lists the streams that have ended. The stage frees their memory before it opens new
    streams. A stream is listed until such a call has succeeded, because calls may fail or overtake
    each other. A stage ignores the end of a stream that it does not know.

    A model computes one call after another, so an opening waits for the batch of other streams. A
    stage that does not use the voice therefore opens a stream together with its first chunk.

    Args:
        model: name of the model.
        key: secret of the server, which tells calls of the ensemble from those of clients.
        withheld_samples: samples that the last stage withholds.
        uses_voice: whether the stage computes the prompt of the voice. It is then called at once
            when a stream opens, because its cache may have no room.

    Attributes:
        is_reachable: whether the stage can be called. Triton refuses calls before all models are
            loaded, and calls of a model that it unloads.
    """

    def __init__(self, model: str, key: str, withheld_samples: int, *, uses_voice: bool) -> None:
        # `state` of a stream is its opening (handle and options) until a call has sent it, then [].
        super().__init__()
        self._model, self._key, self._uses_voice = model, key, uses_voice
        self._withheld_samples = withheld_samples
        self.is_reachable = False
        self._lock = threading.Lock()  # guards `_ended`
        self._ended: set[int] = set()  # streams of whose end the stage may not know yet
        # The end of a stream does not wait for the batch that the stage computes.
        self._closer = ThreadPoolExecutor(1, "close")

    @property
    def withheld_samples(self) -> int:
        return self._withheld_samples

    def open(self, voice: Voice, options: StreamOptions = DEFAULT_OPTIONS) -> int:
        # The handle is chosen here, so that the stream can be ended even if the reply is lost. It
        # is random, so that a process that was started again reuses no handle of an open stream.
        handle = secrets.randbits(62)
        self._streams[handle] = [handle, *astuple(options)]
        if self._uses_voice:
            arrays = {name: getattr(voice, name) for name in FIELDS}
            try:
                self._call("open", None, arrays, [handle])
            except Token2WavError:
                self.close(handle)
                raise
        return handle

    def advance(self, batch: Sequence[tuple[int, Chunk]]) -> list[torch.Tensor]:
        handles = [handle for handle, _ in batch]
        return results_in(self._call("advance", *batch_arguments(batch), handles))

    def close(self, handle: int) -> None:
        if handle in self._streams:
            super().close(handle)
            with self._lock:
                self._ended.add(handle)
            self._closer.submit(attempt, self._send_ends)

    def stop(self) -> None:
        """Makes no further calls. The streams end with the process of the stage."""
        self.is_reachable = False
        self._closer.shutdown(wait=False, cancel_futures=True)

    def _send_ends(self) -> None:
        if self._ended and self.is_reachable:
            self._call("close", None, {})

    def _call(self, method: str, facts: Any, arrays: Arrays, handles: Sequence[int] = ()) -> Arrays:
        """Calls the stage, which first opens the streams of `handles` that it does not have."""
        if not self.is_reachable:
            raise LimitError(f"{self._model}: it is being loaded or unloaded; try again later")
        opened = [opening for handle in handles if (opening := self.state(handle))]
        with self._lock:
            ended = [*self._ended]
        tensor = tensor_of(CALL, call_bytes(self._key, Call(method, facts, arrays, ended, opened)))
        response = pb_utils.InferenceRequest(
            model_name=self._model, requested_output_names=[REPLY], inputs=[tensor]
        ).exec()
        if response.has_error():
            raise BackendError(f"backend: {self._model}: {response.error().message()}")
        with self._lock:
            self._ended.difference_update(ended)
        self._streams.update((handle, []) for handle in handles)
        return outputs_in(array_of(pb_utils.get_output_tensor_by_name(response, REPLY)))


class Ensemble:
    """Service behind the Triton model `token2wav_ensemble`.

    Args:
        models: names of the models of the stages, in their order.
    """

    def __init__(self, folder: Path, server: ServerConfig, models: Sequence[str]) -> None:
        key = os.environ.get(CANARY_VARIABLE)  # the secret of the server
        if not key:
            raise ConfigError(f"{CANARY_VARIABLE}: not set; `token2wav serve` sets it")
        config = read_config(folder).with_stream_settings(server.stream)
        config.check(server.stream)
        withheld = withheld_samples(config, server.stream)
        if len(models) != len(config.stages):
            raise ConfigError(f"stages: {len(models)} models, but {len(config.stages)} are needed")
        self._stages = {
            name: RemoteStage(model, key, withheld, uses_voice=name == "flow")
            for name, model in zip(config.stages, models, strict=True)
        }
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
            stage.is_reachable = True

    def execute(self, requests: list[Any]) -> None:
        """Queues the tokens of requests. Other threads send their responses later."""
        for request in requests:
            self._service.take(partial(_message, request), TritonReply(request))

    def close(self) -> None:
        """Ends all utterances."""
        for stage in self._stages.values():
            stage.stop()
        self._service.close()


def stage_models(model_config: str) -> list[str]:
    """Returns the names of the models of the stages, from the parameter `stages` of the
    configuration of Triton's model, in JSON.
    """
    names = str(json.loads(model_config)["parameters"]["stages"]["string_value"])
    return [name.strip() for name in names.split(",")]


def _message(request: Any) -> Message:
    """Reads a request. The arrays of the message are views of Triton's memory."""
    return message_of(
        request.correlation_id(), request.flags(), request.parameters(), inputs_of(request)
    )

"""Stage of the ensemble as a model of Triton, in a process of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton_python_backend_utils as pb_utils
from numpy.typing import NDArray

from token2wav.config import ServerConfig
from token2wav.config.model_config import StageName
from token2wav.errors import ConfigError, DeviceLostError, to_public_error
from token2wav.execution.device import cpu_threads
from token2wav.model import Token2Wav
from token2wav.published.registry import read_config
from token2wav.stages.stage import StreamOptions
from token2wav.voice import FIELDS, Voice
from token2wav_server.ensemble.calls import (
    CALL,
    REPLY,
    Arrays,
    Call,
    batch_in,
    call_in,
    error_bytes,
    reply_bytes,
    result_outputs,
)
from token2wav_server.metrics import OPEN_STREAMS
from token2wav_server.model_process import end_process, read_environment
from token2wav_server.triton_tensors import inputs_of, tensor_of

_UNKNOWN = 0  # handle that no stream of a stage has


class StageModel:
    """Model of one stage, which answers the calls of the ensemble one after another."""

    def __init__(self, name: StageName) -> None:
        self._pipeline = load_stage(*read_environment(), name).pipeline
        self._stage: Any = self._pipeline.stages[name]
        self._handles: dict[int, int] = {}  # of the stage, by the handles of the ensemble
        # Without a registry, because the launcher alone exports the metrics of a stage.
        self._open = OPEN_STREAMS(registry=None).labels(name)

    def execute(self, requests: list[Any]) -> list[Any]:
        """Returns the replies to calls."""
        return [self._response(request) for request in requests]

    def close(self) -> None:
        """Does nothing, because the end of the process frees the streams."""

    def _response(self, request: Any) -> Any:
        try:
            call = call_in(inputs_of(request)[CALL])
        except Exception as error:  # of a client that calls the stage directly
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error)))
        return pb_utils.InferenceResponse([tensor_of(REPLY, self._reply(call))])

    def _reply(self, call: Call) -> NDArray[np.uint8]:
        try:
            with self._pipeline.running():
                return reply_bytes(self._outputs(call))
        except Exception as error:
            public_error = to_public_error(error)
            if isinstance(public_error, DeviceLostError):
                end_process()
            return error_bytes(public_error)
        finally:
            self._open.set(self._stage.open_streams)

    def _outputs(self, call: Call) -> Arrays:
        for handle in call.ended:
            self._stage.close(self._handles.pop(handle, _UNKNOWN))
        voice = Voice(*(call.arrays[name] for name in FIELDS)) if call.method == "open" else None
        for handle, *options in call.opened:
            if handle not in self._handles:  # it has it if a call failed after the opening
                self._handles[handle] = self._stage.open(voice, StreamOptions(*options))
        if call.method == "advance":
            batch = [(self._handles.get(name, _UNKNOWN), chunk) for name, chunk in batch_in(call)]
            return result_outputs([result.cpu().numpy() for result in self._stage.advance(batch)])
        return {}


def load_stage(folder: Path, server: ServerConfig, stage: StageName) -> Token2Wav:
    """Loads one stage of a model folder, and halves torch's threads.

    Flow and vocoder compute at the same time, in two processes. So each gets half of the cores.
    """
    config = read_config(folder)
    problem = None
    if stage not in config.stages:
        problem = f"has no {stage} stage, only {', '.join(config.stages)}"
    elif config.channels > 1:
        problem = f"has {config.channels} channels, but the ensemble has 1"
    if problem is not None:
        raise ConfigError(
            f"{folder}: {problem}; serve it without the ensemble, with the model token2wav"
        )
    torch.set_num_threads(max(1, cpu_threads() // 2))
    model = Token2Wav.load(
        folder,
        stream=server.stream,
        runtime=server.runtime,
        streams=server.limits.streams,
        stages=(stage,),
    )
    model.pipeline.limit_chunks(server.limits.batch_streams)
    return model

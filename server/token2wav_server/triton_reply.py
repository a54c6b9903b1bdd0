"""Replies to Triton requests: audio, the end of a reply, and errors with their status codes.

This module runs only inside Triton's Python backend, which provides
`triton_python_backend_utils`. Tensors are passed as DLPack, for the reason given in
`triton_request.py`.
"""

from __future__ import annotations

import threading
from concurrent.futures import Executor
from typing import Any

import numpy as np
import torch
import triton_python_backend_utils as pb_utils
from torch.utils.dlpack import to_dlpack  # type: ignore[attr-defined]

from token2wav.errors import BackendError, InputError, LimitError, StreamClosedError, Token2WavError
from token2wav.serving.audio_output import AudioChunk
from token2wav.serving.end_limits import EndReason

# Status code of Triton for each class of error, subclasses included. The codes are attribute names
# of `pb_utils.TritonError`, because Triton sets these attributes only after it has imported this
# module.
STATUS: dict[type[Token2WavError], str] = {
    InputError: "INVALID_ARG",
    StreamClosedError: "NOT_FOUND",
    LimitError: "UNAVAILABLE",
    BackendError: "INTERNAL",
}
# Number of each reason on the wire; 0 in all chunks of a stream that its client ends.
END_REASONS = {None: 0, EndReason.REPEATS: 1, EndReason.SILENCE: 2}


class TritonReply:
    """Reply to one request, sent through Triton's response sender. It is thread-safe.

    Args:
        finishers: threads that send the final response of a request without an error. The sender
            waits until Triton has acknowledged it, and most requests of a stream have no other
            response. So the thread that takes in requests should not send it. None: the caller of
            `finish` sends it.
    """

    def __init__(self, request: Any, finishers: Executor | None = None) -> None:
        self._sender = request.get_response_sender()
        self._finishers = finishers
        # After the final response Triton frees the memory that the sender refers to. Later calls of
        # the sender, including `is_cancelled`, crash tritonserver. The lock and `_over` prevent
        # these calls.
        self._lock = threading.Lock()
        self._over = False

    def send(self, chunk: AudioChunk) -> None:
        outputs = {
            "audio": chunk.audio,
            "chunk_index": np.array([chunk.index], np.int32),
            "final": np.array([chunk.final]),
            "sample_rate": np.array([chunk.sample_rate], np.int32),
            "samples_per_token": np.array([chunk.samples_per_token], np.int32),
            "samples_trimmed": np.array([chunk.samples_trimmed], np.int32),
            "first_token": np.array([chunk.first_token], np.int32),
            "token_count": np.array([chunk.token_count], np.int32),
            "end_reason": np.array([END_REASONS[chunk.end_reason]], np.int32),
        }
        tensors = [
            # A capsule takes a third of the time that `from_dlpack` needs for a tensor.
            pb_utils.Tensor.from_dlpack(name, to_dlpack(torch.from_numpy(array)))
            for name, array in outputs.items()
        ]
        with self._lock:
            if not self._over:  # false if the utterance was cancelled while the chunk was computed
                self._sender.send(pb_utils.InferenceResponse(tensors))

    def finish(self) -> None:
        if self._finishers is None:
            self._send_final()
        else:
            self._finishers.submit(self._send_final)

    def fail(self, error: Token2WavError) -> None:
        name = next((name for kind, name in STATUS.items() if isinstance(error, kind)), "INTERNAL")
        status = getattr(pb_utils.TritonError, name)
        self._send_final(pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error), status)))

    def is_cancelled(self) -> bool:
        with self._lock:
            return not self._over and self._sender.is_cancelled()

    def _send_final(self, *response: Any) -> None:
        with self._lock:
            if not self._over:
                self._over = True
                self._sender.send(*response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

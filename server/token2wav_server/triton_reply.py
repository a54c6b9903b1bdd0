"""Replies to Triton requests, sent through the response senders of Triton's Python backend."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import triton_python_backend_utils as pb_utils
from numpy.typing import NDArray

from token2wav.errors import Token2WavError
from token2wav.serving.audio_output import AudioChunk
from token2wav_server.replies import outputs_of, status_of
from token2wav_server.triton_tensors import tensor_of


class TritonReply:
    """Reply to one request of Triton. It is thread-safe."""

    def __init__(self, request: Any) -> None:
        self._sender = request.get_response_sender()
        # After the final response Triton frees the memory that the sender refers to. Later calls of
        # the sender, including `is_cancelled`, crash tritonserver. The lock and `_over` prevent
        # these calls.
        self._lock = threading.Lock()
        self._over = False

    def send(self, chunk: AudioChunk) -> None:
        self.send_outputs(outputs_of(chunk))

    def send_outputs(self, outputs: Mapping[str, NDArray[Any]]) -> None:
        """Sends a response with output tensors by name, unless the reply is over."""
        response = pb_utils.InferenceResponse([tensor_of(*item) for item in outputs.items()])
        with self._lock:
            if not self._over:  # true if the utterance was cancelled while the chunk was computed
                self._sender.send(response)

    def finish(self) -> None:
        self._send_final()

    def fail(self, error: Token2WavError) -> None:
        self.fail_with(status_of(error), str(error))

    def fail_with(self, status: str, text: str) -> None:
        """Ends the reply with an error.

        Args:
            status: name of Triton's status code. The codes are looked up late, because Triton sets
                these attributes only after it has imported this module.
        """
        error = pb_utils.TritonError(text, getattr(pb_utils.TritonError, status))
        self._send_final(pb_utils.InferenceResponse(error=error))

    def is_cancelled(self) -> bool:
        with self._lock:
            return not self._over and bool(self._sender.is_cancelled())

    def _send_final(self, *response: Any) -> None:
        with self._lock:
            if not self._over:
                self._over = True
                self._sender.send(*response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

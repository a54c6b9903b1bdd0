"""Replies on the wire: the output tensors of a chunk, and the status of an error."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from token2wav.errors import BackendError, InputError, LimitError, StreamClosedError, Token2WavError
from token2wav.serving.audio_output import AudioChunk
from token2wav.serving.end_limits import EndReason

# Status code of Triton for each class of error, subclasses included. The codes are attribute names
# of `pb_utils.TritonError`.
_STATUS: dict[type[Token2WavError], str] = {
    InputError: "INVALID_ARG",
    StreamClosedError: "NOT_FOUND",
    LimitError: "UNAVAILABLE",
    BackendError: "INTERNAL",
}
# Number of each reason on the wire; 0 in all chunks of a stream that its client ends.
END_REASONS = {None: 0, EndReason.REPEATS: 1, EndReason.SILENCE: 2}


def outputs_of(chunk: AudioChunk) -> dict[str, NDArray[Any]]:
    """Returns the output tensors of a chunk by name, as `config.pbtxt` describes them."""
    return {
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


def status_of(error: Token2WavError) -> str:
    """Returns the name of Triton's status code for an error."""
    return next((name for kind, name in _STATUS.items() if isinstance(error, kind)), "INTERNAL")

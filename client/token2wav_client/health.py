"""Health as a caller would feel it: a tiny utterance, spoken for real and checked.

What a server says of itself is not enough: Triton stays ready when the process that runs the model has died or hangs.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import numpy as np

from token2wav_client.errors import ModelNotReadyError, ProtocolError, ResponseTimeoutError, ServerError
from token2wav_client.stream import Utterance
from token2wav_client.voice import MEL_BINS, SPEAKER_SIZE, ClientVoice

TOKENS = (0, 1, 2)
# A speaker without a recording: no prompt has to be computed, and a server that keeps voices keeps one small one.
VOICE = ClientVoice(
    prompt_tokens=np.zeros(0, np.int32),
    prompt_mel=np.zeros((0, MEL_BINS), np.float32),
    speaker_embedding=np.ones(SPEAKER_SIZE, np.float32),
)

# How the server's refusals end and begin (docs/architecture.md): both are answers of a model process that works.
_NO_ROOM = "try again later"
_SHUTTING_DOWN = "server: it is shutting down"


@dataclass(frozen=True, slots=True)
class Health:
    """What a tiny utterance showed.

    Attributes:
        first_audio_s: seconds from the sending of its tokens to its first audio; None from a server that has no room
            for another utterance now, and said so.
        total_s: seconds to the end of the answer.
    """

    first_audio_s: float | None
    total_s: float


def speak_a_little(utterance: Utterance, timeout_s: float) -> Health:
    """Speak three tokens in an utterance that was just opened, and check what comes back.

    Args:
        utterance: of `VOICE`; it is closed.
        timeout_s: seconds for all of it.

    Raises:
        ModelNotReadyError: the server is shutting down.
        ResponseTimeoutError: it was not done in time.
        ProtocolError: the audio has not 960 samples per token, or is not finite.
        ClientError: any other failure of an utterance.
    """
    began = time.monotonic()
    late = ResponseTimeoutError(f"the server did not speak {len(TOKENS)} tokens within {timeout_s:.2g} s")
    deadline = threading.Timer(timeout_s, utterance.fail, [late])
    deadline.daemon = True
    deadline.start()
    first_audio_s = None
    try:
        with utterance:
            utterance.finish(TOKENS)
            for chunk in utterance:
                if not np.isfinite(chunk.audio).all():
                    raise ProtocolError("audio: the server sent NaN or infinite samples")
                first_audio_s = chunk.arrival_s if first_audio_s is None else first_audio_s
    except ServerError as error:
        if str(error).startswith(_SHUTTING_DOWN):
            raise ModelNotReadyError(str(error)) from None
        if not str(error).endswith(_NO_ROOM):
            raise
    finally:
        deadline.cancel()
    return Health(first_audio_s, time.monotonic() - began)

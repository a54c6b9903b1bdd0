"""Streaming gRPC client of the Triton model `token2wav`: sends tokens and receives audio.

    from token2wav_client import Client, ClientVoice

    voice = ClientVoice.load("voice.npz")
    with Client("localhost:8001") as client:
        for chunk in client.synthesize(token_batches, voice):   # sends while it receives
            play(chunk.audio)

The published models produce audio at 24 kHz. `AsyncClient` offers the same methods for asyncio. If
your code produces tokens in callbacks, use `Client.open`: it returns an utterance with the methods
`push` and `finish`.

The package does not need the library `token2wav`. It imports only numpy, soundfile, tqdm,
safetensors, tenacity and tritonclient.
"""

from __future__ import annotations

__version__ = "0.1.0"

from token2wav_client.aio_client import AsyncClient, AsyncUtterance
from token2wav_client.audio import SAMPLE_RATE, SAMPLES_PER_TOKEN, AudioChunk, frames
from token2wav_client.client import Client, Utterance
from token2wav_client.code_aligner import CodeAligner
from token2wav_client.code_order import flatten_codebooks
from token2wav_client.connection import Tls
from token2wav_client.errors import (
    AccessError,
    ClientError,
    InputError,
    ModelNotReadyError,
    OutputError,
    ProtocolError,
    ResponseTimeoutError,
    ServerError,
    ServerUnavailable,
    TokenError,
    TransientServerError,
    UtteranceClosedError,
    VoiceError,
)
from token2wav_client.health import Health
from token2wav_client.tokens import TokenParser
from token2wav_client.voice import ClientVoice
from token2wav_client.wire import SpeechOptions

__all__ = [
    "SAMPLES_PER_TOKEN",
    "SAMPLE_RATE",
    "AccessError",
    "AsyncClient",
    "AsyncUtterance",
    "AudioChunk",
    "Client",
    "ClientError",
    "ClientVoice",
    "CodeAligner",
    "Health",
    "InputError",
    "ModelNotReadyError",
    "OutputError",
    "ProtocolError",
    "ResponseTimeoutError",
    "ServerError",
    "ServerUnavailable",
    "SpeechOptions",
    "Tls",
    "TokenError",
    "TokenParser",
    "TransientServerError",
    "Utterance",
    "UtteranceClosedError",
    "VoiceError",
    "flatten_codebooks",
    "frames",
]

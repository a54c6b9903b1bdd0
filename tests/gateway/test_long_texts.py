"""Long texts are whole at any pace of the language model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from testkit.models.golden import TINY
from testkit.rigs.door_server import DoorServer
from testkit.rigs.gateway_rig import TOKENS_OF_A_WORD, GatewayRig, serving, tokens_of
from testkit.rigs.gateway_speech import body
from token2wav import Token2Wav, Voice
from token2wav.config import ServerConfig, StreamConfig
from token2wav_client import ClientVoice
from token2wav_server.demo import language_model

TEXT = "word " * (4096 // TOKENS_OF_A_WORD)
# So that 64 long streams fit into the cache.
STREAM = StreamConfig(first_tokens=0, left_blocks=4)
SAME_AUDIO = 1e-3  # batches sum in another order than single streams
# Chunks that end elsewhere round the mel in another way, and the vocoder adds up F0: in 40 s this
# moves single samples by up to 2e-2. The text has 164 s. A chunk that is lost or comes twice moves
# half of the later samples by 1.7e-2 or more, and single ones by 1.
ROUNDING_OF_LONG_TEXTS = 0.1


@pytest.fixture(scope="module")
def windowed() -> Token2Wav:
    """The library with the settings of the server, to compare the server with."""
    return Token2Wav.load(TINY, stream=STREAM)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DoorServer]:
    folder = tmp_path_factory.mktemp("repository")
    with DoorServer.start(TINY, folder, ServerConfig(STREAM)) as server:
        yield server


@pytest.mark.parametrize(
    ("texts", "tokens_per_second"),
    [
        (2, 1000.0),
        pytest.param(64, 25.0, marks=pytest.mark.slow),
        pytest.param(64, 100.0, marks=pytest.mark.slow),
        pytest.param(64, 1e9, marks=pytest.mark.slow),
    ],
)
def test_long_texts_are_whole_at_any_pace(
    server: DoorServer,
    windowed: Token2Wav,
    voice: ClientVoice,
    tmp_path: Path,
    texts: int,
    tokens_per_second: float,
) -> None:
    async def speak(gateway: GatewayRig) -> list[bytes]:
        async with gateway.asynchronous_http() as http:
            posts = (http.post("/v1/audio/speech", json=body(input=TEXT)) for _ in range(texts))
            return [answer.content for answer in await asyncio.gather(*posts)]

    with (
        serving(language_model.create_app(tokens_of, tokens_per_second)) as port,
        GatewayRig.start(
            tmp_path,
            grpc_url=server.server.grpc_url,
            language_model_url=f"http://127.0.0.1:{port}/v1",
            voice=voice,
            settings={"limits": {"seconds": 1200}},
        ) as gateway,
    ):
        contents = asyncio.run(speak(gateway))
    library_voice = Voice(voice.prompt_tokens, voice.prompt_mel, voice.speaker_embedding)
    expected = windowed.synthesize(np.array(tokens_of(TEXT), np.int32), library_voice)
    for content in contents:
        audio = np.frombuffer(content, np.int16) / 32767
        assert audio.shape == expected.shape
        error = np.abs(audio - expected)
        assert np.median(error) <= SAME_AUDIO
        assert error.max() <= ROUNDING_OF_LONG_TEXTS

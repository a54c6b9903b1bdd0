"""Trimmed silence and speeds on a real server with the demo voice, in one process and as an
ensemble. `tests/serving/door/test_options.py` has formats, rates and speeds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import soxr
from numpy.typing import NDArray

from examples import demo
from examples.demo_voice.recordings import SENTENCE
from testkit.models.golden import snr_db
from testkit.rigs.server_rig import BOTH_MODELS, Rig
from token2wav import Token2Wav, Voice
from token2wav_client import Client, ClientVoice, frames
from token2wav_client.audio import decoded
from token2wav_voice import FrontEnd, Recording

TRIM_MS = 3000
SILENT_TOKENS = 50  # 2 s: whole chunks of nothing
G711_DB = 30  # 8 bits of a sample


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    settings = f"stream: {{first_tokens: 0, trim_silence_ms: {TRIM_MS}}}"
    with Rig.start(
        demo.MODEL, tmp_path_factory.mktemp("served"), settings, models=BOTH_MODELS
    ) as rig:
        yield rig


@pytest.fixture(scope="module")
def silence(front_end: FrontEnd) -> NDArray[np.int32]:
    samples = np.zeros(SILENT_TOKENS * 960, np.float32)
    return front_end.tokens(replace(Recording.load(SENTENCE), samples=samples))


@pytest.fixture(scope="module")
def tokens(silence: NDArray[np.int32], front_end: FrontEnd) -> NDArray[np.int32]:
    """Two seconds of silence, and a sentence."""
    return np.concatenate((silence, front_end.tokens(Recording.load(SENTENCE))))


def test_telephony_without_the_silence_at_the_start(
    served: Rig, name: str, spoken: ClientVoice, tokens: NDArray[np.int32]
) -> None:
    with Client(served.server.grpc_url, model=name) as client:
        portions = np.split(tokens, [3, 40, 41, 100])
        options = {"audio_format": "mulaw", "sample_rate": 8000}
        chunks = list(client.synthesize(portions, spoken, **options))  # type: ignore[arg-type]
    trimmed, codes = chunks[-1].samples_trimmed, np.concatenate([one.audio for one in chunks])
    assert 8000 * SILENT_TOKENS / 25 <= trimmed <= 8000 * TRIM_MS / 1000
    assert chunks[0].first_token == trimmed // 320
    assert chunks[-1].first_token + chunks[-1].token_count == len(tokens)
    voice = Voice(spoken.prompt_tokens, spoken.prompt_mel, spoken.speaker_embedding)
    whole = Token2Wav.load(demo.MODEL).synthesize(tokens, voice)
    expected = soxr.resample(whole[3 * trimmed :], 24_000, 8000)[: len(codes)]
    assert snr_db(decoded(codes, "mulaw") / np.float32(32767), expected) > G711_DB
    packets = list(frames(chunks))
    assert {(packet.dtype, len(packet)) for packet in packets} == {(np.dtype(np.uint8), 160)}
    assert np.array_equal(np.concatenate(packets)[: len(codes)], codes)
    served.wait_until_empty()

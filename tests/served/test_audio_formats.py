"""Formats, rates, speeds and trimmed silence on a real server with the demo voice, in one process
and as an ensemble.
"""

from __future__ import annotations

import asyncio
import io
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import soundfile
import soxr
from numpy.typing import NDArray

from examples import demo
from examples.demo_voice.recordings import SENTENCE
from testkit.patience import PATIENCE_SECONDS
from testkit.rigs.serve_command import synth
from testkit.rigs.server_rig import BOTH_MODELS, Rig
from token2wav import Token2Wav, UtteranceOptions, Voice
from token2wav_client import AsyncClient, AudioChunk, Client, ClientVoice, ServerError, frames
from token2wav_client import audio as client_audio
from token2wav_client.voice import FIELDS
from token2wav_voice import FrontEnd, Recording

TRIM_MS = 3000
SILENT_TOKENS = 50  # 2 s: whole chunks of nothing
NEAR_DB = 40.0  # tolerance: batches on a server sum in another order


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    settings = f"stream: {{first_tokens: 0, trim_silence_ms: {TRIM_MS}}}"
    with Rig.start(
        demo.MODEL, tmp_path_factory.mktemp("served"), settings, models=BOTH_MODELS
    ) as rig:
        yield rig


@pytest.fixture(autouse=True)
def _nothing_is_left(served: Rig) -> Iterator[None]:
    yield
    served.wait_until_empty()


@pytest.fixture(scope="module")
def silence() -> NDArray[np.int32]:
    recording = replace(Recording.load(SENTENCE), samples=np.zeros(SILENT_TOKENS * 960, np.float32))
    return FrontEnd(demo.MODEL).tokens(recording)


@pytest.fixture(scope="module")
def tokens(silence: NDArray[np.int32]) -> NDArray[np.int32]:
    """Two seconds of silence, and a sentence."""
    return np.concatenate((silence, FrontEnd(demo.MODEL).tokens(Recording.load(SENTENCE))))


@pytest.fixture(scope="module")
def synthesize(
    spoken: ClientVoice, tokens: NDArray[np.int32]
) -> Callable[[float], NDArray[np.float32]]:
    """Returns the audio of the tokens at a speed, by the library."""
    voice = Voice(spoken.prompt_tokens, spoken.prompt_mel, spoken.speaker_embedding)
    model = Token2Wav.load(demo.MODEL)
    return lambda speed: model.synthesize(tokens, voice, UtteranceOptions(speed=speed))


@pytest.fixture(scope="module")
def whole(synthesize: Callable[[float], NDArray[np.float32]]) -> NDArray[np.float32]:
    return synthesize(1)


def joined(chunks: list[AudioChunk]) -> NDArray[np.float32]:
    audio = np.concatenate(
        [client_audio.decoded(chunk.audio, chunk.audio_format) for chunk in chunks]
    )
    return audio if audio.dtype == np.float32 else audio / np.float32(32768)


def near(audio: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    assert audio.shape == expected.shape
    return 20 * np.log10(np.std(expected) / max(np.std(audio - expected), 1e-9))


@pytest.mark.parametrize(
    ("audio_format", "sample_rate"),
    [("mulaw", 8000), ("alaw", 16_000), ("int16", 22_050), ("float32", 48_000)],
)
def test_sent_audio_equals_a_conversion_of_the_whole(
    served: Rig,
    name: str,
    spoken: ClientVoice,
    tokens: NDArray[np.int32],
    whole: NDArray[np.float32],
    audio_format: client_audio.AudioFormat,
    sample_rate: int,
) -> None:
    with Client(served.server.grpc_url, model=name) as client:
        portions = np.split(tokens, [3, 40, 41, 100])
        chunks = list(
            client.synthesize(portions, spoken, audio_format=audio_format, sample_rate=sample_rate)
        )
    assert {(chunk.audio.dtype, chunk.sample_rate) for chunk in chunks} == {
        (client_audio.DTYPES[audio_format], sample_rate)
    }
    trimmed = chunks[-1].samples_trimmed
    assert sample_rate * SILENT_TOKENS / 25 <= trimmed <= sample_rate * TRIM_MS / 1000
    rest = whole[trimmed * 24_000 // sample_rate :]
    expected = soxr.resample(rest, 24_000, sample_rate)[: sum(len(chunk.audio) for chunk in chunks)]
    assert near(joined(chunks), expected) > (30 if "law" in audio_format else NEAR_DB)


@pytest.mark.parametrize("speed", [0.8, 1.3])
def test_a_speed_changes_the_duration(
    served: Rig,
    spoken: ClientVoice,
    tokens: NDArray[np.int32],
    synthesize: Callable[[float], NDArray[np.float32]],
    speed: float,
) -> None:
    with Client(served.server.grpc_url) as client:
        portions = np.split(tokens, [3, 40, 41, 100])
        chunks = list(client.synthesize(portions, spoken, speed=speed, sample_rate=16_000))
    trimmed, sent = chunks[-1].samples_trimmed, sum(len(chunk.audio) for chunk in chunks)
    assert trimmed + sent == int(2 * len(tokens) / speed) * 320  # mel frames of 20 ms
    rest = synthesize(speed)[trimmed * 24_000 // 16_000 :]
    assert near(joined(chunks), soxr.resample(rest, 24_000, 16_000)[:sent]) > NEAR_DB
    assert chunks[0].first_token == int(trimmed * speed) // 640
    assert all(
        one.first_token + one.token_count - 1 <= next_one.first_token
        for one, next_one in pairwise(chunks)
    )
    assert chunks[-1].first_token + chunks[-1].token_count == len(tokens)


def test_nothing_but_silence_ends_with_an_empty_chunk(
    served: Rig, name: str, spoken: ClientVoice, silence: NDArray[np.int32]
) -> None:
    async def speak() -> list[AudioChunk]:
        async with AsyncClient(served.server.grpc_url, model=name) as client:
            return [
                chunk async for chunk in client.synthesize([silence], spoken, sample_rate=16_000)
            ]

    [only] = asyncio.run(speak())
    assert (only.final, len(only.audio), only.samples_trimmed) == (True, 0, SILENT_TOKENS * 640)


def test_telephony(served: Rig, name: str, spoken: ClientVoice, tokens: NDArray[np.int32]) -> None:
    with Client(served.server.grpc_url, model=name) as client:
        chunks = list(client.synthesize([tokens], spoken, audio_format="mulaw", sample_rate=8000))
    packets = list(frames(chunks))
    assert {(packet.dtype, len(packet)) for packet in packets} == {(np.dtype(np.uint8), 160)}
    sent = sum(len(chunk.audio) for chunk in chunks)
    assert len(packets) == -(-sent // 160)
    assert (
        np.concatenate(packets)[:sent].tolist()
        == np.concatenate([chunk.audio for chunk in chunks]).tolist()
    )


def test_unavailable_formats_and_rates_are_refused(
    served: Rig, name: str, spoken: ClientVoice
) -> None:
    with Client(served.server.grpc_url, model=name) as client:
        with pytest.raises(
            ServerError,
            match=r"sample_rate: 11025 is not one of 8000, 16000, 22050, 24000, 44100, 48",
        ):
            list(client.synthesize([1], spoken, sample_rate=11_025))
        if name.endswith("ensemble"):
            with pytest.raises(ServerError, match="speed: only 1 is possible in the ensemble"):
                list(client.synthesize([1], spoken, speed=2))
        assert len(list(client.synthesize([1], spoken))) == 1
    with served.connect(name) as connection:
        voice = Voice(spoken.prompt_tokens, spoken.prompt_mel, spoken.speaker_embedding)
        for field, value in (("audio_format", 7), ("sample_rate", "8000"), ("sample_rate", True)):
            connection.send([1], voice, parameters={field: value})
            [error] = connection.answers().errors
            assert f"{field}: {value!r} is not one of " in error


def test_the_command_writes_and_reports(
    served: Rig, spoken: ClientVoice, tokens: NDArray[np.int32], tmp_path: Path
) -> None:
    np.save(tmp_path / "tokens.npy", tokens)
    np.savez(tmp_path / "voice.npz", **{name: getattr(spoken, name) for name in FIELDS})
    arguments = ["--tokens=tokens.npy", "--voice=voice.npz", "--audio-format=mulaw"]
    program = synth(served.server.grpc_url, *arguments, "--sample-rate=8000", "--speed=1.25")
    heard = heard_sounds(served)
    reports = []
    for out in (["out.opus"], ["-", "--format", "wav"]):
        done = subprocess.run(
            [*program, "--out", *out],
            cwd=tmp_path,
            capture_output=True,
            timeout=PATIENCE_SECONDS,
            check=True,
        )
        reports.append(done.stderr if out[0] == "-" else done.stdout)
    assert all(b" s of silence trimmed\n" in report for report in reports)
    written, piped = soundfile.info(tmp_path / "out.opus"), soundfile.info(io.BytesIO(done.stdout))
    assert (written.samplerate, written.subtype, piped.samplerate, piped.subtype) == (
        8000,
        "OPUS",
        8000,
        "ULAW",
    )
    assert 2.4 < written.duration == piped.duration < 3.6
    assert heard_sounds(served) == heard + 2


def heard_sounds(served: Rig) -> int:
    """Utterances of which the server knows when they were first heard."""
    return int(re.findall(r"token2wav_first_sound_seconds_count (\d+)", served.metrics())[0])

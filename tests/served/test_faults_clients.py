"""Clients that misuse streams and voices within the rules: others are not harmed, and nothing is
left.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from testkit.models.golden import GoldenSet
from testkit.patience import PATIENCE_SECONDS
from testkit.rigs.processes import entries
from testkit.rigs.raw_stream import SMALL_WINDOW, Answers, RawStream
from testkit.rigs.server_rig import Rig
from testkit.rigs.traces import Traces
from tests.served.test_streaming import SERVER_EQUALS_LIBRARY
from token2wav import Voice
from token2wav_client import Client, ClientVoice
from token2wav_client.wire import Opening

ONE_TOKEN_REQUESTS, TOKENS_OF_A_STREAM = 600, 40
FAR_TOO_MANY = 10_000_000
PROMPT_TOKENS = 625  # 25 s, in a voice of 400 kB
# The server with small limits keeps 8 voices. All others after the first ones would be over 90 MiB.
FIRST_VOICES, VOICES, GROWTH_MIB = 16, 250, 60.0


def test_a_client_that_stops_reading(
    rig: Rig, golden: GoldenSet, whole: NDArray[np.float32], voice: ClientVoice
) -> None:
    """Its audio fills the connection's window and waits in the server.

    The model goes on, and other clients are served.
    """
    tokens = np.tile(golden.tokens, 4)[:500]
    opening, heard = Opening(voice, "float32", keep_open=True), Answers()
    with RawStream(rig.server.grpc_url, "deaf", SMALL_WINDOW) as stream:
        stream.send(tokens, opening, end=True)
        stream.read(heard)
        assert not heard.errors
        with Client(rig.server.grpc_url) as client:
            audio = np.concatenate(
                [chunk.audio for chunk in client.synthesize([golden.tokens], voice)]
            )
        assert np.abs(audio - whole).max() <= SERVER_EQUALS_LIBRARY
        rig.wait_until_empty()  # although the client still has not read
    with Client(rig.server.grpc_url) as client:
        assert client.health(timeout_s=PATIENCE_SECONDS).first_audio_s is not None


def test_hundreds_of_requests_of_one_token(rig: Rig, golden: GoldenSet) -> None:
    """Each request is answered before the next one is sent."""
    tokens = np.resize(golden.tokens, ONE_TOKEN_REQUESTS)
    before = resources(rig)
    samples = 0
    with rig.connect() as connection:
        for index, token in enumerate(tokens):
            place = index % TOKENS_OF_A_STREAM
            first, last = place == 0, place == TOKENS_OF_A_STREAM - 1
            connection.send(
                [token], golden.voice if first else None, "drop by drop", start=first, end=last
            )
            answers = connection.answers()
            assert not answers.errors
            samples += sum(len(audio) for _, _, audio in answers.chunks)
    assert samples == 960 * ONE_TOKEN_REQUESTS
    rig.wait_until_empty()
    after = resources(rig)
    assert after["segments"] == before["segments"]
    assert after["files"] <= before["files"] + 8
    assert after["threads"] <= before["threads"] + 8


def test_too_large_requests_take_shared_memory_once(rig: Rig, golden: GoldenSet) -> None:
    """Triton's pool never shrinks: later requests reuse the memory that the first ones took."""
    taken = []
    with rig.connect() as connection:
        for _ in range(3):
            connection.send(np.zeros(FAR_TOO_MANY, np.int32), golden.voice, start=True)
            assert connection.answers().errors == [
                "tokens: the utterance would exceed 15000 tokens, the limit of one stream"
            ]
            taken.append(resources(rig)["shared bytes"])
        connection.send(golden.tokens, golden.voice)
        assert connection.answers().audio.shape == (960 * len(golden.tokens),)
    assert taken[-1] < taken[0] + 2 * 2**20


def test_many_voices_take_bounded_memory(limited: Rig, golden: GoldenSet) -> None:
    """Large voices, each with an utterance that is refused: to compute their prompts would take
    minutes.
    """
    voice, process = golden.voice, limited.server.engine_pid
    prompt = np.resize(voice.prompt_tokens, PROMPT_TOKENS)
    mel = np.resize(voice.prompt_mel, (2 * PROMPT_TOKENS, voice.prompt_mel.shape[1]))
    before = 0.0
    with limited.connect() as connection:
        for number in range(FIRST_VOICES + VOICES):
            embedding = voice.speaker_embedding + np.float32(number / 64)
            connection.send([100_000], Voice(prompt, mel, embedding))
            [error] = connection.answers().errors
            assert "is outside the vocabulary" in error
            if number == FIRST_VOICES:
                before = anonymous_mib(process)
    assert anonymous_mib(process) - before <= GROWTH_MIB


def anonymous_mib(process: int) -> float:
    """Returns the memory of a process without file-backed and shared memory."""
    status = Path(f"/proc/{process}/status").read_text()
    [kilobytes] = re.findall(r"^RssAnon:\s+(\d+) kB$", status, re.MULTILINE)
    return int(kilobytes) / 1024


def resources(rig: Rig) -> dict[str, int]:
    """Returns the number of each resource that the engine holds, and the shared memory."""
    traces = Traces.of(rig.server.pid)
    segments = list(Path("/dev/shm").glob(f"{traces.shm_prefix}*"))
    return {
        "segments": len(segments),
        "shared bytes": sum(segment.stat().st_blocks for segment in segments) * 512,
        "files": entries(traces.engine, "fd"),
        "threads": entries(traces.engine, "task"),
    }

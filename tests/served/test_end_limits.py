"""Limits that end a stream, on a real server with the demo voice, for all kinds of clients."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import subprocess
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from examples import demo
from examples.demo_voice.recordings import SENTENCE
from testkit.patience import PATIENCE_SECONDS, until
from testkit.rigs.serve_command import synth
from testkit.rigs.server_rig import BOTH_MODELS, Rig, voice_inputs
from token2wav import Token2Wav, Voice
from token2wav_client import AsyncClient, AudioChunk, Client, ClientVoice, ServerError
from token2wav_client.errors import UtteranceClosedError
from token2wav_server.launcher.access import Access
from token2wav_voice import FrontEnd, Recording

REPEATS, SILENCE_S = 30, 1.5
SILENT_TOKENS = 300  # 12 s
NEAR_DB = 40.0  # tolerance: batches on a server sum in another order
ENDED = (
    f"stream: {REPEATS} equal tokens in a row (end_after_repeats) ended it, so it accepts no more "
    "tokens"
)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with Rig.start(
        demo.MODEL,
        tmp_path_factory.mktemp("served"),
        models=BOTH_MODELS,
        access=Access(http_inference=True),
    ) as rig:
        yield rig


@pytest.fixture(autouse=True)
def _nothing_is_left(served: Rig) -> Iterator[None]:
    yield
    served.wait_until_empty()


@pytest.fixture(scope="module")
def sentence(front_end: FrontEnd) -> NDArray[np.int32]:
    return front_end.tokens(Recording.load(SENTENCE))


@pytest.fixture(scope="module")
def silence(front_end: FrontEnd) -> NDArray[np.int32]:
    """Tokens of silence, of which no two neighbours are equal."""
    recording = replace(Recording.load(SENTENCE), samples=np.zeros(SILENT_TOKENS * 960, np.float32))
    return front_end.tokens(recording)


@pytest.fixture(scope="module")
def loop(sentence: NDArray[np.int32]) -> NDArray[np.int32]:
    """A sentence whose last token is repeated."""
    return np.concatenate((sentence, np.full(200, sentence[-1])))


@pytest.fixture(scope="module")
def model() -> Token2Wav:
    return Token2Wav.load(demo.MODEL)


def near(audio: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    assert audio.shape == expected.shape
    return 20 * np.log10(np.std(expected) / max(np.std(audio - expected), 1e-9))


def of_the_library(spoken: ClientVoice) -> Voice:
    return Voice(spoken.prompt_tokens, spoken.prompt_mel, spoken.speaker_embedding)


def test_a_loop_that_never_ends_ends(
    served: Rig, spoken: ClientVoice, sentence: NDArray[np.int32], model: Token2Wav
) -> None:
    """A language model that repeats a token for ever, at 100 tokens a second."""
    sent, stopped = itertools.count(), threading.Event()

    async def tokens() -> AsyncIterator[NDArray[np.int32]]:
        try:
            yield sentence
            while True:
                next(sent)
                yield sentence[-1:]
                await asyncio.sleep(0.01)
        finally:
            stopped.set()

    async def speak() -> list[AudioChunk]:
        async with AsyncClient(served.server.grpc_url) as client:
            return [
                chunk
                async for chunk in client.synthesize(tokens(), spoken, end_after_repeats=REPEATS)
            ]

    before = served.ended()
    chunks = asyncio.run(speak())
    assert stopped.is_set()  # so the language model is no longer asked
    assert [chunk.end_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert (chunks[-1].final, chunks[-1].end_reason) == (True, "repeats")
    spoken_tokens = len(sentence) - equal_at_the_end(sentence) + REPEATS
    expected = model.synthesize(
        np.concatenate((sentence, np.full(REPEATS, sentence[-1])))[:spoken_tokens],
        of_the_library(spoken),
    )
    assert near(np.concatenate([chunk.audio for chunk in chunks]), expected) > NEAR_DB
    assert served.ended() - before == {"repeats": 1}


def equal_at_the_end(tokens: NDArray[np.int32]) -> int:
    return int(np.flatnonzero(tokens[::-1] != tokens[-1])[0])


def test_silence_ends_an_utterance(
    served: Rig,
    spoken: ClientVoice,
    sentence: NDArray[np.int32],
    silence: NDArray[np.int32],
    model: Token2Wav,
) -> None:
    tokens, before = np.concatenate((sentence, silence)), served.ended()
    with (
        Client(served.server.grpc_url) as client,
        client.open(spoken, end_after_silence_s=SILENCE_S) as utterance,
    ):
        utterance.push(tokens)
        chunks = list(utterance)  # ends, although the client never ends the utterance
        assert (utterance.complete, utterance.end_reason) == (True, "silence")
        with pytest.raises(UtteranceClosedError, match="because of silence"):
            utterance.push([1])
    audio = np.concatenate([chunk.audio for chunk in chunks])
    whole = model.synthesize(tokens, of_the_library(spoken))
    assert near(audio, whole[: len(audio)]) > NEAR_DB
    seconds = len(audio) / 24_000
    assert len(sentence) / 25 < seconds < len(sentence) / 25 + SILENCE_S + 0.2
    assert served.ended() - before == {"silence": 1}


@pytest.mark.parametrize("keep_open", [True, False])
def test_later_requests_get_one_clear_sentence(
    served: Rig, spoken: ClientVoice, loop: NDArray[np.int32], keep_open: bool
) -> None:
    voice = of_the_library(spoken)
    with served.connect() as connection:
        parameters = {"end_after_repeats": REPEATS, "keep_open": keep_open}
        connection.send(loop, voice, "loops", start=True, parameters=parameters)
        answers = connection.answers()
        assert [final for _, final, _ in answers.chunks].count(True) == 1
        assert answers.errors == []
        for end in (False, True):
            connection.send([1], None, "loops", end=end)
            assert connection.answers().errors == [ENDED]
        connection.send(loop[:30], voice, "loops", start=True, end=True)  # the id is free again
        assert len(connection.answers().audio) == 960 * 30


def test_a_request_without_a_limit_has_no_reason(
    served: Rig, spoken: ClientVoice, loop: NDArray[np.int32]
) -> None:
    with Client(served.server.grpc_url) as client:
        chunks = list(client.synthesize([loop], spoken))
    assert {chunk.end_reason for chunk in chunks} == {None}
    assert sum(len(chunk.audio) for chunk in chunks) == 960 * len(loop)


def test_the_report_of_synth(
    served: Rig, spoken: ClientVoice, loop: NDArray[np.int32], tmp_path: Path
) -> None:
    np.save(tmp_path / "tokens.npy", loop)
    inputs: dict[str, Any] = voice_inputs(of_the_library(spoken))
    np.savez(tmp_path / "voice.npz", **inputs)
    command = synth(
        served.server.grpc_url,
        f"--tokens={tmp_path / 'tokens.npy'}",
        f"--voice={tmp_path / 'voice.npz'}",
        f"--out={tmp_path / 'out.wav'}",
        f"--end-after-repeats={REPEATS}",
    )
    run = {
        name: subprocess.run(
            [*command, *options],
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
            check=True,
        )
        for name, options in (("table", ()), ("json", ("--json",)))
    }
    assert run["table"].stdout.splitlines()[-1] == "ended by the server  repeats"
    report = json.loads(run["json"].stdout)
    assert report["end_reason"] == "repeats"
    assert [chunk["end_reason"] for chunk in report["chunks"]][-1] == "repeats"
    assert re.search(
        r"the server ended the utterance after \d+\.\d\d s of audio: equal tokens in a row$",
        run["json"].stderr.strip(),
    )


def test_the_limits_over_http(
    served: Rig, spoken: ClientVoice, sentence: NDArray[np.int32], silence: NDArray[np.int32]
) -> None:
    inputs = {
        "tokens": np.concatenate((sentence, silence)),
        **voice_inputs(of_the_library(spoken)),
    }
    body = {name: array.ravel().tolist() for name, array in inputs.items()}
    answer = httpx.post(
        f"http://{served.server.http_url}/v2/models/token2wav/generate_stream",
        json=body | {"end_after_silence_s": SILENCE_S},
        timeout=PATIENCE_SECONDS,
    )
    events = [
        json.loads(line.removeprefix("data:"))
        for line in answer.text.splitlines()
        if line.startswith("data:")
    ]
    assert [event["end_reason"] for event in events] == [0] * (len(events) - 1) + [2]
    assert events[-1]["final"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"end_after_repeats": 1}, "end_after_repeats: 1 is not 0 or an integer from 2 to 1000000"),
        ({"end_after_silence_s": 1e6}, "end_after_silence_s: 1000000.0 is not a number from 0"),
    ],
)
def test_wrong_limits_are_refused(
    served: Rig, spoken: ClientVoice, options: dict[str, float], words: str
) -> None:
    with served.connect() as connection:
        connection.send([1], of_the_library(spoken), "w", start=True, end=True, parameters=options)
        [error] = connection.answers().errors
    assert words in error


def test_the_ensemble_refuses_both_limits(served: Rig, spoken: ClientVoice) -> None:
    with Client(served.server.grpc_url, model="token2wav_ensemble") as client:
        for name, value in (("end_after_repeats", 5), ("end_after_silence_s", 2.5)):
            with pytest.raises(ServerError, match=f"{name}: the ensemble cannot end a stream"):
                list(client.synthesize([[1, 2]], spoken, **{name: value}))  # type: ignore[arg-type]
        chunks = list(client.synthesize([[1, 2]], spoken, end_after_repeats=0))
    assert chunks[-1].end_reason is None


def test_memory_is_freed_while_the_client_stays(
    served: Rig, spoken: ClientVoice, loop: NDArray[np.int32]
) -> None:
    with (
        Client(served.server.grpc_url) as client,
        client.open(spoken, end_after_repeats=REPEATS) as utterance,
    ):
        utterance.push(loop)
        until(lambda: utterance.end_reason == "repeats")
        served.wait_until_empty()
        assert sum(len(chunk.audio) for chunk in utterance) < 960 * len(loop)

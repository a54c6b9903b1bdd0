"""Streams that ask for their number of ODE steps, on a real server that allows two by
configuration.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import soundfile

from testkit.models.golden import DATA, TINY, GoldenSet, snr_db
from testkit.patience import PATIENCE_SECONDS
from testkit.rigs.serve_command import synth
from testkit.rigs.server_rig import BOTH_MODELS, Rig
from tests.families.cosyvoice3.tolerances import SNR_DB
from token2wav import StreamConfig, Token2Wav, UtteranceOptions
from token2wav_client import Client, ClientVoice, InputError, ServerError


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    settings = "stream: {first_tokens: 0, steps: [10, 3]}"
    with Rig.start(TINY, tmp_path_factory.mktemp("rig"), settings, models=BOTH_MODELS) as rig:
        yield rig


@pytest.fixture(scope="module")
def both() -> Token2Wav:
    """The library with the same setting."""
    return Token2Wav.load(TINY, stream=StreamConfig(steps=(10, 3)))


def test_each_stream_has_its_own_number(
    served: Rig, name: str, both: Token2Wav, golden: GoldenSet, voice: ClientVoice
) -> None:
    """The streams run at once in one voice, so chunks share batches and prompts share one cache."""

    def speak(steps: int | None) -> np.ndarray:
        chunks = client.synthesize(np.array_split(golden.tokens, 6), voice, steps=steps)
        return np.concatenate([chunk.audio for chunk in chunks])

    asked = [3, None, 10, 3]
    with (
        Client(served.server.grpc_url, model=name) as client,
        ThreadPoolExecutor(len(asked)) as pool,
    ):
        heard = list(pool.map(speak, asked))
    for audio, steps in zip(heard, asked, strict=True):
        assert (
            snr_db(
                audio, both.synthesize(golden.tokens, golden.voice, UtteranceOptions(steps or 0))
            )
            >= SNR_DB
        )
    assert snr_db(heard[0], heard[1]) < SNR_DB  # the numbers of steps give different audio
    served.wait_until_empty()


def test_the_command_asks_for_them(
    served: Rig, name: str, both: Token2Wav, golden: GoldenSet, tmp_path: Path
) -> None:
    arguments = [f"--tokens={DATA}/demo/tokens.npy", f"--voice={DATA}/demo/voice.safetensors"]
    arguments += ["--out=out.wav", "--audio-format=float32", "--json"]
    command = synth(served.server.grpc_url, f"--model={name}", *arguments, "--steps")
    done = subprocess.run(
        [*command, "3"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=True,
    )
    assert json.loads(done.stdout)["audio_s"] > 0
    assert np.isfinite(soundfile.read(tmp_path / "out.wav")[0]).all()
    refused = subprocess.run(
        [*command, "4"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert refused.returncode == 4
    assert "steps: 4 is not one of 10, 3" in refused.stderr


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (5, "steps: 5 is not one of 10, 3"),
        (0, "steps: 0 is not an integer of at least 1"),
        ("3", "steps: '3' is not an integer of at least 1"),
        (True, "steps: True is not an integer of at least 1"),
    ],
)
def test_other_steps_are_refused_before_work_starts(
    served: Rig, name: str, golden: GoldenSet, value: object, message: str
) -> None:
    with served.connect(name) as connection:
        connection.send(golden.tokens, golden.voice, parameters={"steps": value})
        answers = connection.answers()
    assert len(answers.errors) == 1
    assert message in answers.errors[0]
    assert not answers.chunks
    served.wait_until_empty()


def test_a_client_refuses_impossible_numbers_of_steps(
    served: Rig, name: str, voice: ClientVoice
) -> None:
    with Client(served.server.grpc_url, model=name) as client:
        with pytest.raises(InputError, match="steps: 0 is outside 1 to"):
            client.open(voice, steps=0)
        with pytest.raises(ServerError, match="steps: 7 is not one of 10, 3"):
            list(client.synthesize([[1, 2, 3]], voice, steps=7))

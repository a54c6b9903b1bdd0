"""A codec of latents on a real server: the input `latents` in place of `tokens`.
`tests/serving/door/test_models.py` has all codecs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import soundfile
from numpy.typing import NDArray

from testkit.models.codec_models import CODECS
from testkit.models.family_golden import FamilyGolden
from testkit.rigs.server_rig import Rig
from testkit.utterances import random_portions
from token2wav import Token2Wav, commands
from token2wav_client import Client, ServerError

STREAMS, COUNT = 32, 30
AUDIO = 1e-5  # of the spread of the audio: batches sum in another order than single streams


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Rig, Token2Wav]]:
    golden = FamilyGolden("vibevoice", "tiny")
    folder = CODECS["vibevoice"].write(tmp_path_factory.mktemp("model"), golden)
    with Rig.start(folder, tmp_path_factory.mktemp("server")) as rig:
        yield rig, Token2Wav.load(folder)


@pytest.fixture
def latents(served: tuple[Rig, Token2Wav]) -> NDArray[np.float32]:
    [size] = served[1].config.tokens.shape
    return np.random.default_rng(0).normal(size=(COUNT, size)).astype(np.float32)


def test_streams_at_once_in_random_portions(
    served: tuple[Rig, Token2Wav], latents: NDArray[np.float32]
) -> None:
    rig, model = served
    whole = model.synthesize(latents)

    def synthesize(seed: int) -> NDArray[np.float32]:
        with Client(rig.server.grpc_url) as client:
            chunks = list(client.synthesize(random_portions(latents, seed % 8)))
        return np.concatenate([np.asarray(chunk.audio, np.float32) for chunk in chunks])

    with ThreadPoolExecutor(STREAMS) as pool:
        for audio in pool.map(synthesize, range(STREAMS)):
            assert audio.shape == whole.shape
            assert np.abs(audio - whole).max() <= AUDIO * whole.std()
    rig.wait_until_empty()


def test_bench_draws_latents(served: tuple[Rig, Token2Wav], tmp_path: Path) -> None:
    rig, model = served
    out, seconds = tmp_path / "bench.json", 20 / model.config.token_frame_rate
    options = ["--streams", "2", "--rounds", "2", "--utterance-seconds", str(seconds), "--quiet"]
    arguments = ["bench", "--url", rig.server.grpc_url, "--out", str(out), *options]
    assert commands.main(arguments) == 0
    [row] = json.loads(out.read_text())["rows"]
    assert (row["complete"], row["failed"]) == (4, 0), row["errors"]


def test_half_precision_is_accepted(
    served: tuple[Rig, Token2Wav], latents: NDArray[np.float32]
) -> None:
    rig, model = served
    halves = latents.astype(np.float16)
    with Client(rig.server.grpc_url) as client:
        audio = np.concatenate([chunk.audio for chunk in client.synthesize([halves])])
    for whole in (model.synthesize(halves), model.synthesize(halves.astype(np.float32))):
        assert np.abs(audio - whole).max() <= AUDIO * whole.std()


def test_a_raw_request_sends_half_precision_in_an_input_of_its_own(
    served: tuple[Rig, Token2Wav], latents: NDArray[np.float32]
) -> None:
    rig, model = served
    halves, rest = latents[:20].astype(np.float16), latents[20:]
    with rig.connect() as connection:
        connection.send(halves, sequence="halves", start=True, field="latents_fp16")
        connection.send(rest, sequence="halves", end=True, field="latents")
        audio = connection.answers(2).audio
        whole = model.synthesize(np.concatenate((halves.astype(np.float32), rest)))
        assert np.abs(audio - whole).max() <= AUDIO * whole.std()
        for field in ("latents", "latents_fp16"):
            dtype = np.float16 if field == "latents_fp16" else np.float32
            for value in (np.nan, np.inf, -np.inf):
                wrong = latents.astype(dtype)
                wrong[3, 1] = value
                connection.send(wrong, field=field)
                [error] = connection.answers().errors
                assert "latents: holds NaN or infinite values" in error
        connection.send(latents, {"latents_fp16": halves}, field="latents")
        [error] = connection.answers().errors
        assert "latents_fp16: sent together with latents; send only one of them" in error
    rig.wait_until_empty()


def test_the_command_speaks_latents_of_a_file(
    served: tuple[Rig, Token2Wav],
    latents: NDArray[np.float32],
    tmp_path: Path,
) -> None:
    rig, model = served
    np.save(tmp_path / "latents.npy", latents)
    url = f"--url={rig.server.grpc_url}"
    out = tmp_path / "out.wav"
    assert commands.main(["health", url]) == 0
    assert (
        commands.main(["synth", url, f"--tokens={tmp_path / 'latents.npy'}", f"--out={out}"]) == 0
    )
    audio, _ = soundfile.read(out, dtype="float32")
    # 16 bits round by half a step, and the file is read with 32768 steps instead of 32767.
    assert np.abs(audio - model.synthesize(latents).clip(-1, 1)).max() <= 1.6 / 32767


def test_wrong_latents_harm_no_other_stream(
    served: tuple[Rig, Token2Wav], latents: NDArray[np.float32]
) -> None:
    rig, model = served
    with Client(rig.server.grpc_url) as client, client.open() as utterance:
        utterance.push(latents[:1])
        with pytest.raises(ServerError, match="latents"):
            list(client.synthesize([latents[:, 1:]]))
        with pytest.raises(ServerError, match="latents: 20000 at index 0, 0 is outside"):
            list(client.synthesize([np.full_like(latents, 2e4)]))
        with pytest.raises(ServerError, match="tokens"):
            list(client.synthesize([np.zeros(latents.shape, np.int32)]))
        utterance.finish(latents[1:])
        audio = np.concatenate([chunk.audio for chunk in utterance])
    assert np.abs(audio - model.synthesize(latents)).max() <= AUDIO
    rig.wait_until_empty()

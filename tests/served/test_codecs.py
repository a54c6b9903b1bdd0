"""Tokens of other forms on a real server: several codes for two channels, latents in the inputs
`latents` and `latents_fp16`, and several codes for a flow with a voice, which the ensemble serves
too. `tests/serving/door/test_models.py` has all families.
"""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from numpy.typing import NDArray

from testkit.models.folders import write_folder
from testkit.models.golden import snr_db
from testkit.models.sized import a_voice
from testkit.patience import PATIENCE_SECONDS
from testkit.rigs.gateway_rig import GatewayRig
from testkit.rigs.server_rig import BOTH_MODELS, Rig
from testkit.utterances import random_portions
from token2wav import StreamConfig, Token2Wav, Voice
from token2wav.commands import main
from token2wav_client import Client, ClientVoice, token_source
from token2wav_voice import PromptVoice

STREAMS, FRAMES = 32, 30
AUDIO_SECONDS = "token2wav_audio_seconds_total"
# Batches sum in another order than single streams: of the spread of a codec's audio, and in
# decibels of a flow's, whose F0 turns rounding into phase.
CODEC_AUDIO, FLOW_DB = 1e-5, 60
WRITTEN = 1.6 / 32767  # 16 bits round by half a step; a file is read with 32768 steps, not 32767
# Early audio depends on how tokens are portioned.
EXACT = StreamConfig(first_tokens=0, lookahead_frames=0)


@dataclass(frozen=True)
class Served:
    """Server of a model, and the library to compare it with. The flow has a voice."""

    rig: Rig
    model: Token2Wav
    tokens: NDArray[Any]
    voice: ClientVoice | None

    def assert_equal(self, audio: NDArray[Any], tokens: NDArray[Any]) -> None:
        whole = self.model.synthesize(tokens, Voice(**vars(self.voice)) if self.voice else None)
        assert audio.shape == whole.shape
        if self.voice:
            assert snr_db(audio, whole) > FLOW_DB
        else:
            assert np.abs(audio - whole).max() <= CODEC_AUDIO * whole.std()


@pytest.fixture(scope="module", params=["moss_stereo", "vibevoice", "codebooks"])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """A server of codes, of latents, or of a flow as both models, by the name of its folder."""
    folder = write_folder(request.param, tmp_path_factory.mktemp("model"))
    model = Token2Wav.load(folder, stream=EXACT)
    flow = model.config.takes_voice
    models = BOTH_MODELS if flow else BOTH_MODELS[:1]
    voice = ClientVoice(**vars(a_voice(model.config))) if flow else None
    tokens = model.config.tokens.draw(FRAMES, np.random.default_rng(0))
    settings = "stream: {first_tokens: 0, lookahead_frames: 0}"
    with Rig.start(folder, tmp_path_factory.mktemp("server"), settings, models=models) as rig:
        yield Served(rig, model, tokens, voice)


of_codes = pytest.mark.parametrize("served", ["moss_stereo"], indirect=True)
of_latents = pytest.mark.parametrize("served", ["vibevoice"], indirect=True)


@pytest.fixture(autouse=True)
def _nothing_is_left(served: Served) -> Iterator[None]:
    yield
    served.rig.wait_until_empty()


def test_streams_at_once_at_pace_and_in_random_portions(served: Served) -> None:
    """Every second stream sends frame by frame at the pace of speech. The flow's streams use the
    model in one process and the ensemble in turns.
    """
    config, models = served.model.config, served.rig.server.models

    def synthesize(seed: int) -> NDArray[np.float32]:
        with Client(served.rig.server.grpc_url, model=models[seed // 2 % len(models)]) as client:
            tokens = served.tokens[seed % 4 :]
            paced = token_source.paced([frame[None] for frame in tokens], config.token_frame_rate)
            chunks = list(
                client.synthesize(
                    paced if seed % 2 else random_portions(tokens, seed % 8), served.voice
                )
            )
        assert chunks[-1].samples_trimmed == config.missing_samples  # so the length is known
        return np.concatenate([np.asarray(chunk.audio, np.float32) for chunk in chunks])

    with ThreadPoolExecutor(STREAMS) as pool:
        for seed, audio in enumerate(pool.map(synthesize, range(STREAMS))):
            served.assert_equal(audio, served.tokens[seed % 4 :])


def test_bench_draws_tokens_of_the_model(served: Served, tmp_path: Path) -> None:
    config = served.model.config
    seconds = 20 / config.token_frame_rate  # of the mean utterance
    out = tmp_path / "bench.json"
    options = ["--streams", "4", "--rounds", "1", "--utterance-seconds", str(seconds), "--quiet"]
    if served.voice:
        PromptVoice(**vars(served.voice)).save(voice := tmp_path / "voice.safetensors")
        options += ["--voice", str(voice)]
    assert main(["bench", "--url", served.rig.server.grpc_url, "--out", str(out), *options]) == 0
    [row] = json.loads(out.read_text())["rows"]
    assert (row["complete"], row["failed"]) == (4, 0), row["errors"]
    lengths = [sum(heard["samples"]) for heard in json.loads(out.read_text())["recordings"]["4"]]
    samples, missing = config.samples_per_token, config.missing_samples
    assert sorted(lengths) == [count * samples - missing for count in (10, 12, 14, 17)]


def test_health_and_metrics(served: Served) -> None:
    rig = served.rig
    with Client(rig.server.grpc_url) as client:
        assert client.health(timeout_s=PATIENCE_SECONDS).first_audio_s is not None
        rig.wait_until_empty()
        seconds, ended = rig.metrics()[AUDIO_SECONDS], rig.ended()
        samples = sum(
            len(chunk.audio) for chunk in client.synthesize([served.tokens[:9]], served.voice)
        )
    rig.wait_until_empty()
    assert rig.ended() - ended == Counter(finished=1)
    added = rig.metrics()[AUDIO_SECONDS] - seconds
    assert added == pytest.approx(samples / served.model.config.sample_rate, abs=1e-5)


@of_codes
def test_the_metadata_has_the_channels(served: Served) -> None:
    with served.rig.connect() as connection:
        metadata = connection.client.get_model_metadata("token2wav", as_json=True)
    [shape] = [item["shape"] for item in metadata["outputs"] if item["name"] == "audio"]
    assert shape == ["-1", "2"]


@of_codes
def test_the_gateway_sends_both_channels_or_their_mean(served: Served, tmp_path: Path) -> None:
    rig, codes = served.rig, served.tokens[:5]
    with Client(rig.server.grpc_url) as client:
        chunks = client.synthesize([codes], audio_format="int16", sample_rate=24_000)
        expected = np.concatenate([chunk.audio for chunk in chunks])
    voice = ClientVoice(  # of the rig; the request names none
        np.zeros(0, np.int32), np.zeros((0, 80), np.float32), np.ones(192, np.float32)
    )
    with (
        GatewayRig.start(
            tmp_path,
            grpc_url=rig.server.grpc_url,
            language_model_url="http://127.0.0.1:1/v1",
            voice=voice,
        ) as gateway,
        gateway.http() as http,
    ):
        answer = http.post("/v1/stage/run", json={"codes": codes.tolist()})
        assert answer.status_code == 200, answer.text
        assert gateway.value("audio_seconds_total") == pytest.approx(len(expected) / 24_000)
        pcm = http.post("/v1/stage/run", json={"codes": codes.tolist(), "response_format": "pcm"})
    audio, rate = soundfile.read(io.BytesIO(answer.content), dtype="int16")
    assert (audio.shape, rate) == (expected.shape, 24_000)
    assert np.abs(audio.astype(int) - expected).max() <= 1  # other batches round otherwise
    assert not np.array_equal(audio[:, 0], audio[:, 1])
    mean = np.rint(expected.mean(axis=1))  # OpenAI's pcm has one channel
    assert np.abs(np.frombuffer(pcm.content, np.int16) - mean).max() <= 1


@of_latents
def test_latents_of_half_precision(served: Served) -> None:
    """Our client and a raw request send them in an input of their own."""
    halves, rest = served.tokens[:20].astype(np.float16), served.tokens[20:]
    with Client(served.rig.server.grpc_url) as client:
        audio = np.concatenate([chunk.audio for chunk in client.synthesize([halves])])
    served.assert_equal(audio, halves)
    with served.rig.connect() as connection:
        connection.send(halves, sequence="halves", start=True, field="latents_fp16")
        connection.send(rest, sequence="halves", end=True, field="latents")
        audio = connection.answers(2).audio
        served.assert_equal(audio, np.concatenate((halves.astype(np.float32), rest)))
        for field, dtype in (("latents", np.float32), ("latents_fp16", np.float16)):
            wrong = served.tokens.astype(dtype)
            wrong[3, 1] = np.nan
            connection.send(wrong, field=field)
            [error] = connection.answers().errors
            assert "latents: holds NaN or infinite values" in error
        connection.send(rest, sequence="both", start=True, field="latents")
        assert not connection.answers().errors
        connection.send(rest, {"latents_fp16": halves}, sequence="both", field="latents")
        connection.send(rest, sequence="both", end=True, field="latents")
        error, late = connection.answers(2).errors
        both = "latents_fp16: sent together with latents; send only one of them"
        assert both in error
        assert f"stream: it failed: {both}" in late, "the tokens of the second request are missing"


@of_latents
def test_the_command_speaks_latents_of_a_file(served: Served, tmp_path: Path) -> None:
    np.save(tmp_path / "latents.npy", served.tokens)
    url, out = f"--url={served.rig.server.grpc_url}", tmp_path / "out.wav"
    assert main(["health", url]) == 0
    assert main(["synth", url, f"--tokens={tmp_path / 'latents.npy'}", f"--out={out}"]) == 0
    audio, _ = soundfile.read(out, dtype="float32")
    assert np.abs(audio - served.model.synthesize(served.tokens).clip(-1, 1)).max() <= WRITTEN

"""A codec decoder of several codes and two channels on a real server: 32 streams at once, equal to
the library. `tests/serving/door/test_models.py` has all codecs.
"""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import soundfile
from numpy.typing import NDArray

from testkit.models.codec_models import CODECS
from testkit.models.family_golden import FamilyGolden
from testkit.models.golden import ROOT
from testkit.patience import PATIENCE_SECONDS
from testkit.rigs.gateway_rig import GatewayRig
from testkit.rigs.server_rig import Rig
from testkit.utterances import random_portions
from token2wav import StreamConfig, Token2Wav
from token2wav.commands import main
from token2wav_client import Client, ClientVoice, ServerError, token_source
from token2wav_client.recordings import load_recordings

STREAMS, FRAMES = 32, 30
AUDIO = 1e-5  # of the spread of the audio: batches sum in another order than single streams

MOST_TOKENS = 20_000  # which also bounds the time that a stream is open
# Early audio depends on how tokens are portioned.
SETTINGS = f"""
stream: {{lookahead_frames: 0}}
limits: {{stream_tokens: {MOST_TOKENS}}}
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Rig, Token2Wav]]:
    golden = FamilyGolden("moss_stereo", "tiny")
    folder = CODECS["moss_stereo"].write(tmp_path_factory.mktemp("model"), golden)
    with Rig.start(folder, tmp_path_factory.mktemp("server"), SETTINGS) as rig:
        yield rig, Token2Wav.load(folder, stream=StreamConfig(lookahead_frames=0))


@contextmanager
def nothing_left(server: Rig) -> Iterator[None]:
    yield
    server.wait_until_empty()


def test_streams_at_once_at_pace_and_in_random_portions(served: tuple[Rig, Token2Wav]) -> None:
    """Every second stream sends frame by frame at the pace of speech."""
    rig, model = served
    config = model.config
    codes: NDArray[np.int32] = config.tokens.draw(FRAMES, np.random.default_rng(0))

    def synthesize(seed: int) -> NDArray[np.float32]:
        with Client(rig.server.grpc_url) as client:
            stream_codes = codes[seed % 4 :]
            frames = [[frame] for frame in stream_codes.tolist()]
            paced = token_source.paced(frames, config.token_frame_rate)
            portions = paced if seed % 2 else random_portions(stream_codes, seed % 8)
            chunks = list(client.synthesize(portions))
        assert chunks[-1].samples_trimmed == config.missing_samples  # so the length is known
        return np.concatenate([np.asarray(chunk.audio, np.float32) for chunk in chunks])

    wholes = [model.synthesize(codes[start:]) for start in range(4)]
    with nothing_left(rig), ThreadPoolExecutor(STREAMS) as pool:
        for seed, audio in enumerate(pool.map(synthesize, range(STREAMS))):
            whole = wholes[seed % 4]
            assert audio.shape == whole.shape
            assert np.abs(audio - whole).max() <= AUDIO * whole.std()


def test_bench_draws_codes_of_the_model(served: tuple[Rig, Token2Wav], tmp_path: Path) -> None:
    rig, model = served
    seconds = 20 / model.config.token_frame_rate  # of the mean utterance
    out = tmp_path / "bench.json"
    options = ["--streams", "4", "--rounds", "1", "--utterance-seconds", str(seconds), "--quiet"]
    with nothing_left(rig):
        assert main(["bench", "--url", rig.server.grpc_url, "--out", str(out), *options]) == 0
    [row] = json.loads(out.read_text())["rows"]
    assert (row["complete"], row["failed"]) == (4, 0), row["errors"]
    lengths = [int(heard.samples.sum()) for heard in load_recordings(out.with_suffix(".npz"))["4"]]
    samples, missing = model.config.samples_per_token, model.config.missing_samples
    assert sorted(lengths) == [count * samples - missing for count in (10, 12, 14, 17)]


def test_the_metadata_has_the_channels(served: tuple[Rig, Token2Wav]) -> None:
    rig, model = served
    with rig.connect() as connection:
        metadata = connection.client.get_model_metadata("token2wav", as_json=True)
    [shape] = [item["shape"] for item in metadata["outputs"] if item["name"] == "audio"]
    assert shape == ["-1", str(model.config.channels)] == ["-1", "2"]


def test_a_voice_or_a_speed_is_refused_and_harms_no_other_stream(
    served: tuple[Rig, Token2Wav],
) -> None:
    rig, model = served
    shape = model.config.tokens.shape
    codes = np.zeros((3, *shape), np.int32)
    voice = ClientVoice(
        np.zeros((0, *shape), np.int32), np.zeros((0, 80), np.float32), np.ones(192, np.float32)
    )
    with nothing_left(rig), Client(rig.server.grpc_url) as client, client.open() as utterance:
        utterance.push(codes[:1])
        with pytest.raises(ServerError, match="given, but this model takes no voice"):
            list(client.synthesize([codes], voice))
        with pytest.raises(ServerError, match="voice: given, but this model takes no voice"):
            list(client.synthesize([codes], "anna"))
        with pytest.raises(ServerError, match=r"speed: 1\.5, but this model has no mel"):
            list(client.synthesize([codes], speed=1.5))
        utterance.finish(codes[1:])
        audio = np.concatenate([chunk.audio for chunk in utterance])
    assert np.abs(audio - model.synthesize(codes)).max() <= AUDIO


def audio_seconds(server: Rig) -> float:
    """Returns the seconds of audio that the server has sent, as its metrics say."""
    [seconds] = re.findall(
        r"^token2wav_audio_seconds_total\S* (\S+)$", server.metrics(), re.MULTILINE
    )
    return float(seconds)


def test_the_gateway_sends_both_channels_or_their_mean(
    served: tuple[Rig, Token2Wav], tmp_path: Path
) -> None:
    rig, model = served
    codes = np.arange(5 * 4, dtype=np.int32).reshape(5, 4) % model.config.tokens.codebook_sizes[0]
    before = audio_seconds(rig)
    with Client(rig.server.grpc_url) as client:
        chunks = client.synthesize([codes], audio_format="int16", sample_rate=24_000)
        expected = np.concatenate([chunk.audio for chunk in chunks])
    voice = ClientVoice(  # of the rig; the request names none
        np.zeros(0, np.int32), np.zeros((0, 80), np.float32), np.ones(192, np.float32)
    )
    with (
        nothing_left(rig),
        GatewayRig.start(
            tmp_path,
            grpc_url=rig.server.grpc_url,
            language_model_url="http://127.0.0.1:1/v1",
            voice=voice,
        ) as gateway,
        gateway.http() as http,
    ):
        fast = http.post("/v1/stage/run", json={"codes": codes.tolist(), "speed": 1.5})
        assert fast.json()["error"]["param"] == "speed", fast.text
        assert "this model has no mel" in fast.json()["error"]["message"]
        answer = http.post("/v1/stage/run", json={"codes": codes.tolist()})
        assert answer.status_code == 200, answer.text
        seconds = len(expected) / 24_000
        assert gateway.value("audio_seconds_total") == pytest.approx(seconds)
        pcm = http.post("/v1/stage/run", json={"codes": codes.tolist(), "response_format": "pcm"})
    assert audio_seconds(rig) - before == pytest.approx(3 * seconds)  # of all utterances
    audio, rate = soundfile.read(io.BytesIO(answer.content), dtype="int16")
    assert (audio.shape, rate) == (expected.shape, 24_000)
    assert np.abs(audio.astype(int) - expected).max() <= 1  # other batches round otherwise
    assert not np.array_equal(audio[:, 0], audio[:, 1])
    mean = np.rint(expected.mean(axis=1))  # OpenAI's pcm has one channel
    assert np.abs(np.frombuffer(pcm.content, np.int16) - mean).max() <= 1


def test_health_limits_and_metrics(served: tuple[Rig, Token2Wav]) -> None:
    rig, model = served
    codes = np.zeros((MOST_TOKENS + 1, *model.config.tokens.shape), np.int32)
    with nothing_left(rig), Client(rig.server.grpc_url) as client:
        assert client.health(timeout_s=PATIENCE_SECONDS).first_audio_s is not None
        with pytest.raises(ServerError, match=f"would exceed {MOST_TOKENS} tokens, the limit"):
            list(client.synthesize([codes]))
        rig.wait_until_empty()
        seconds, ended = audio_seconds(rig), rig.ended()
        assert ended["finished"] > 0
        samples = sum(len(chunk.audio) for chunk in client.synthesize([codes[:9]]))
    assert rig.ended() - ended == Counter(finished=1)
    added = audio_seconds(rig) - seconds
    assert added == pytest.approx(samples / model.config.sample_rate, abs=1e-5)


def test_speaking_the_codes_that_a_language_model_prints(
    served: tuple[Rig, Token2Wav], tmp_path: Path
) -> None:
    rig, model = served
    config = model.config
    codes = config.tokens.draw(9, np.random.default_rng(1))
    out = tmp_path / "out.wav"
    command = [sys.executable, str(ROOT / "examples" / "llm_stream.py"), "--family=codes"]
    command += [f"--codebooks={codes.shape[1]}", f"--out={out}", f"--url={rig.server.grpc_url}"]
    with nothing_left(rig):
        spoken = subprocess.run(
            command,
            input=" ".join(map(str, codes.ravel())),
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
        )
    assert spoken.returncode == 0, spoken.stderr
    audio, rate = soundfile.read(out, dtype="float32")
    whole = model.synthesize(codes)
    assert (audio.shape, rate) == (whole.shape, config.sample_rate)
    # 16 bits round by half a step, and the file is read with 32768 steps instead of 32767.
    assert np.abs(audio - whole.clip(-1, 1)).max() <= 1.6 / 32767

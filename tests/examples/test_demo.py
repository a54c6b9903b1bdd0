"""The demo of the repository: its voice and its codec copy a recording, and the demo itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from numpy.typing import NDArray

pytest.importorskip("piper", reason="the recipe's tools are in the extra 'demo'")
pytest.importorskip("pocketsphinx", reason="the recipe's dictionary is in the extra 'demo'")

from examples import demo
from examples.demo_codec.codes import Encoder, features
from examples.demo_codec.encode import CodecEncoder
from examples.demo_voice.recordings import SENTENCE
from testkit.models.golden import ROOT
from testkit.rigs.processes import finished
from token2wav import StreamConfig, Token2Wav, Voice
from token2wav.families.nanocodec import NanoCodecSizes
from token2wav.layers.scalar_codes import ScalarCodes
from token2wav_voice import FrontEnd, PromptVoice, Recording
from token2wav_voice.features import prompt_mel

RECORDING = Recording.load(SENTENCE)
# Mean distance between the log-mels of the spoken audio and of the recording. It is 2 between
# unlike sentences.
BANDS_APART = 0.6


@pytest.fixture(scope="module")
def voice(demo_prompt: PromptVoice) -> Voice:
    prompt = demo_prompt
    return Voice(prompt.prompt_tokens, prompt.prompt_mel, prompt.speaker_embedding)


@pytest.mark.parametrize(
    ("model", "most_bytes"), [(demo.MODEL, 20_000_000), (demo.CODEC, 8_000_000)]
)
def test_the_models_are_small(model: Path, most_bytes: int) -> None:
    assert sum(path.stat().st_size for path in model.iterdir()) < most_bytes


def assert_resembles_the_recording(audio: NDArray[np.float32]) -> None:
    recorded, spoken = prompt_mel(RECORDING.samples), prompt_mel(audio)
    frames = min(len(recorded), len(spoken))
    recorded, spoken = recorded[:frames], spoken[:frames]
    assert np.abs(spoken - recorded).mean() < BANDS_APART
    assert np.abs(spoken[::-1] - recorded).mean() > 2 * BANDS_APART


def test_the_voice_resembles_the_recording(front_end: FrontEnd, voice: Voice) -> None:
    model, tokens = Token2Wav.load(demo.MODEL), front_end.tokens(RECORDING)
    assert_resembles_the_recording(model.synthesize(tokens, voice))


def test_the_codec_resembles_the_recording() -> None:
    codes = CodecEncoder(demo.CODEC)(RECORDING.samples)
    assert_resembles_the_recording(Token2Wav.load(demo.CODEC).synthesize(codes))


@pytest.mark.parametrize("levels", [(8, 7, 6, 6), (3,), (2, 5)])
def test_codes_are_those_of_the_rounded_values(levels: tuple[int, ...]) -> None:
    """The decoder's table gives back each value that the encoder rounded."""
    config = NanoCodecSizes(
        sample_rate=16000, num_groups=2, num_levels_per_group=levels, input_dim=2 * len(levels)
    )
    torch.manual_seed(0)
    encoder = Encoder(config)
    torch.nn.init.normal_(encoder.values.weight)
    heard = features(3 * torch.randn(1, 40, 80) - 6, 100 + 50 * torch.rand(1, 40))
    with torch.no_grad():
        rounded, codes = encoder(heard).round(), encoder.codes(heard)
    assert codes.shape == (1, 2, 20)
    assert len(codes.unique()) > 2
    torch.testing.assert_close(ScalarCodes(levels)(codes) * encoder.middle, rounded)


def test_streams_equal_the_whole(front_end: FrontEnd, voice: Voice) -> None:
    """Its vocoder has other stages and windows than the public one, so its own look-ahead."""
    tokens = front_end.tokens(RECORDING)
    model = Token2Wav.load(demo.MODEL, stream=StreamConfig(first_tokens=0, max_hop_tokens=25))
    mel = model.mel(tokens, voice)
    with model.stream(voice) as stream:
        chunks = [
            chunk.audio
            for at in range(0, len(tokens), 7)
            for chunk in stream.push(tokens[at : at + 7])
        ]
        chunks += [chunk.audio for chunk in stream.finish()]
    assert len(chunks) > 2
    whole, streamed = model.vocode(mel), np.concatenate(chunks)
    assert 20 * np.log10(np.std(whole) / np.std(whole - streamed)) > 40


def run_demo(wav: Path, out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "examples.demo", wav, f"--out={out}", *options]
    return finished(*command, cwd=ROOT)


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("voice", ["demo.png", "demo.wav", "demo_tokens.npy", "demo_voice.safetensors"]),
        pytest.param(
            *("codec", ["demo_codec.png", "demo_codec.wav", "demo_codec_tokens.npy"]),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_demo(family: str, names: list[str], tmp_path: Path) -> None:
    part, rate = soundfile.read(SENTENCE, frames=36_000)
    soundfile.write(tmp_path / "part.wav", part, rate)
    out = tmp_path / "out"
    done = run_demo(tmp_path / "part.wav", out, f"--family={family}")
    assert done.returncode == 0, done.stderr
    assert "960 for each of 37 tokens" in done.stdout
    shown = [line.split()[1:3] for line in done.stdout.splitlines() if line.startswith("$ ")]
    assert shown[-2:] == [["token2wav", "serve"], ["token2wav", "synth"]]
    assert sorted(path.name for path in out.iterdir()) == names
    assert soundfile.info(out / names[1]).frames == 37 * 960
    assert (out / names[0]).stat().st_size > 10_000


def test_a_demo_that_fails_keeps_the_files(tmp_path: Path) -> None:
    files = [tmp_path / f"demo{suffix}" for suffix in ("_tokens.npy", "_voice.safetensors", ".wav")]
    for path in files:
        path.write_text("of an earlier run")
    done = run_demo(tmp_path / "nowhere.wav", tmp_path)
    assert done.returncode == 1
    assert "no such file" in done.stderr
    assert sorted(tmp_path.iterdir()) == sorted(files)
    assert {path.read_text() for path in files} == {"of an earlier run"}

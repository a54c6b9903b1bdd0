"""The demo voice of the repository: its size, its copy of a recording, and the demo itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile

from examples import demo
from examples.demo_voice.recordings import SENTENCE
from testkit.models.golden import DATA
from testkit.patience import PATIENCE_SECONDS
from token2wav import StreamConfig, Token2Wav, Voice
from token2wav_voice import FrontEnd, PromptVoice, Recording
from token2wav_voice.features import prompt_mel

ROOT = DATA.parents[1]
MAX_BYTES = 20_000_000
# mean distance between the log-mels of the spoken audio and of the recording; it is 2 between
# unlike sentences
BANDS_APART = 0.6


@pytest.fixture(scope="module")
def voice(demo_prompt: PromptVoice) -> Voice:
    prompt = demo_prompt
    return Voice(prompt.prompt_tokens, prompt.prompt_mel, prompt.speaker_embedding)


def test_demo_model_is_small() -> None:
    assert sum(path.stat().st_size for path in demo.MODEL.iterdir()) < MAX_BYTES


def test_log_mel_resembles_the_recording(front_end: FrontEnd, voice: Voice) -> None:
    model, recording = Token2Wav.load(demo.MODEL), Recording.load(SENTENCE)
    recording_mel = prompt_mel(recording.samples)
    spoken_mel = prompt_mel(model.synthesize(front_end.tokens(recording), voice))
    assert spoken_mel.shape == recording_mel.shape
    assert np.abs(spoken_mel - recording_mel).mean() < BANDS_APART
    assert np.abs(spoken_mel[::-1] - recording_mel).mean() > 2 * BANDS_APART


def test_streams_equal_the_whole(front_end: FrontEnd, voice: Voice) -> None:
    """Its vocoder has other stages and windows than the public one, so its own look-ahead."""
    tokens = front_end.tokens(Recording.load(SENTENCE))
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


def test_leading_silence_can_be_trimmed(front_end: FrontEnd, voice: Voice) -> None:
    tokens = front_end.tokens(Recording.load(SENTENCE))
    whole = Token2Wav.load(demo.MODEL).synthesize(tokens, voice)
    with Token2Wav.load(demo.MODEL, stream=StreamConfig(trim_silence_ms=500)).stream(
        voice
    ) as stream:
        chunks = stream.push(tokens) + stream.finish()
    trimmed = chunks[-1].samples_trimmed
    assert 0.03 * 24_000 <= trimmed <= 0.15 * 24_000
    assert chunks[0].sound_s == 0
    assert np.array_equal(np.concatenate([chunk.audio for chunk in chunks]), whole[trimmed:])


def run_demo(wav: Path, out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "examples.demo", str(wav), f"--out={out}", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )


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

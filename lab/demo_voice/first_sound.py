"""Measurement of the silence before speech, and of the delay of the resampler, with the demo voice.

    .venv/bin/python -m lab.demo_voice.first_sound

The recordings need `pip install -e '.[demo]'`.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass

import numpy as np
import soxr
from numpy.typing import NDArray

from benchmarks.environment import ROOT, describe, save
from examples.demo_voice.recordings import PROMPT
from lab.demo_voice.folder import MODEL
from lab.demo_voice.recordings import record
from token2wav import Token2Wav, Voice
from token2wav.serving.audio_output import SAMPLE_RATES, AudioFormat, AudioOutput
from token2wav_voice import FrontEnd, Recording

RECORDINGS = ROOT / "out" / "quality"
LEVELS_DB = (-65, -60, -55, -50, -45, -40)
WINDOW = 240  # 10 ms
PORTION = 960  # samples of one call of the resampler, which is one token

Signal = NDArray[np.float32]


@dataclass(frozen=True)
class Silence:
    """Silence before the first 10 ms above a level, over all sentences, in ms."""

    level_db: int
    recording_mean: float
    spoken_mean: float
    spoken_least: float
    spoken_most: float


@dataclass(frozen=True)
class Resampled:
    """Error and delay of the resampler at one sample rate.

    Attributes:
        sample_rate: rate after resampling, in Hz.
        against_whole_db: difference between resampling in portions and resampling the whole
            utterance, in dB below the audio.
        held_back_ms: largest duration of audio that the resampler holds back.
    """

    sample_rate: int
    against_whole_db: float
    held_back_ms: float


def silence_ms(audio: Signal, level_db: float) -> float:
    """Returns the milliseconds before the first window above a level."""
    levels = np.square(audio[: len(audio) // WINDOW * WINDOW].reshape(-1, WINDOW)).mean(axis=1)
    return 10.0 * int((levels >= 10 ** (level_db / 10)).argmax())


def silences(recordings: list[Signal], spoken: list[Signal]) -> list[Silence]:
    rows = []
    for level in LEVELS_DB:
        before = [silence_ms(audio, level) for audio in recordings]
        after = [silence_ms(audio, level) for audio in spoken]
        rows.append(
            Silence(level, float(np.mean(before)), float(np.mean(after)), min(after), max(after))
        )
    return rows


def resampled(model: Token2Wav, audio: Signal, sample_rate: int) -> Resampled:
    output = AudioOutput(model.config, AudioFormat(sample_rate=sample_rate))
    parts, held_back = [], 0.0
    for end in range(PORTION, len(audio) + 1, PORTION):
        chunk = output.take(audio[end - PORTION : end], last=end == len(audio))
        parts.append(np.zeros(0, np.float32) if chunk is None else chunk.audio)
        held_back = max(
            held_back, end / model.config.sample_rate - sum(map(len, parts)) / sample_rate
        )
    whole = soxr.resample(audio, model.config.sample_rate, sample_rate)
    difference = float(np.std(np.concatenate(parts) - whole) / np.std(whole))
    return Resampled(
        sample_rate, round(20 * np.log10(max(difference, 1e-15))), round(1000 * held_back, 1)
    )


def main() -> None:
    """Measures silence and resampling, prints two tables and writes the results."""
    parser = argparse.ArgumentParser(
        description="Measure leading silence and resampling with the demo voice."
    )
    parser.add_argument("--sentences", type=int, help="number of sentences (default: all)")
    options = parser.parse_args()
    front_end, model = FrontEnd(MODEL), Token2Wav.load(MODEL)
    prompt = front_end.voice(Recording.load(PROMPT))
    voice = Voice(prompt.prompt_tokens, prompt.prompt_mel, prompt.speaker_embedding)
    recordings = [Recording.load(path) for path in record(RECORDINGS)[: options.sentences]]
    spoken = [model.synthesize(front_end.tokens(recording), voice) for recording in recordings]
    silent = silences([recording.samples for recording in recordings], spoken)
    rates = [resampled(model, spoken[0], rate) for rate in SAMPLE_RATES]
    print("level dBFS | recording ms | spoken ms | least | most")
    for row in silent:
        print(" | ".join(f"{value:.0f}" for value in asdict(row).values()))
    print("sample rate | portions against whole dB | held back ms")
    for rate in rates:
        print(" | ".join(f"{value:g}" for value in asdict(rate).values()))
    rows = {
        "silence": [asdict(row) for row in silent],
        "resampled": [asdict(rate) for rate in rates],
    }
    save("first_sound", {"environment": describe("soxr"), "sentences": len(spoken), **rows})


if __name__ == "__main__":
    main()

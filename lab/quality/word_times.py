"""Times of words: error of the included aligner against words with known borders.

A speaker says every word alone. The words are cut at their first and last sound, and spliced to
sentences, so their borders are known to 10 ms. The sentences are aligned as they are, with the
noise of a room, and after the demo voice has spoken their tokens. Prints a table; writes JSON.

    .venv/bin/python -m lab.quality.word_times

The recordings need `pip install -e '.[demo]'`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import soxr
from tqdm import tqdm

from benchmarks.environment import describe, save
from examples.demo_voice.recordings import PROMPT
from examples.demo_voice.text import HELD_OUT, held_out
from lab.demo_voice.folder import MODEL
from lab.quality.recogniser import Signal
from testkit.rigs.aligners import align
from token2wav import RuntimeConfig, Token2Wav, Voice
from token2wav.serving.end_limits import audible, window_samples
from token2wav_gateway.words.aligners import ALIGNERS, Aligner, WholeAligner
from token2wav_server.demo.speaker import RATE_HZ, Speaker
from token2wav_voice import FrontEnd, Recording

SEED = 1
GAPS_S = (0.0, 0.0, 0.03, 0.1, 0.25)  # between words, drawn at random
EDGES_S = (0.1, 0.4)  # before the first word and after the last one
NOISE_DB = -60.0  # full scale
_TOKEN_S = 0.04


@dataclass(frozen=True, eq=False)
class Spliced:
    """Sentence spliced of single words.

    Attributes:
        borders: (words, 2) start and end of every word in seconds.
    """

    text: str
    audio: Signal
    borders: np.ndarray[Any, np.dtype[np.float64]]


def main() -> None:
    """Measures all rows, prints a table and writes the results."""
    parser = argparse.ArgumentParser(description="Measure the times of words.")
    parser.add_argument("--aligner", default="pocketsphinx")
    parser.add_argument("--text", type=Path, default=HELD_OUT, help="a sentence in each line")
    parser.add_argument("--sentences", type=int, help="number of sentences (default: all)")
    parser.add_argument("--name", default="word_times", help="name of the result file")
    options = parser.parse_args()

    aligner = ALIGNERS.load(options.aligner)()
    sentences = list(spliced(held_out(options.text)[: options.sentences]))
    rows = {}
    print("audio | words | failed | median | 95 % | of starts | of ends, ms")
    for name, heard in ways().items():
        rows[name] = row = measure(
            aligner, [replace(sentence, audio=heard(sentence.audio)) for sentence in sentences]
        )
        print(
            f"{name} | {row['words']} | {row['failed_sentences']} | {row['median_ms']} | "
            f"{row['p95_ms']} | {row['starts']} | {row['ends']}",
            flush=True,
        )
        save(
            options.name,
            {
                "environment": describe("pocketsphinx", "piper-tts"),
                "aligner": options.aligner,
                "text": options.text.name,
                "sentences": len(sentences),
                "rows": rows,
            },
        )


def spliced(texts: Sequence[str]) -> Iterator[Spliced]:
    """Yields sentences that are spliced of single words."""
    speaker, random = Speaker(SEED), np.random.default_rng(SEED)
    sounds: dict[str, Signal] = {}

    def silence(seconds: float) -> Signal:
        return np.zeros(round(seconds * RATE_HZ), np.float32)

    for text in tqdm(texts, desc="words", leave=False):
        audio, borders = silence(random.uniform(*EDGES_S)), []
        for word in text.split():
            key = word.strip(".,;:?!")
            if key not in sounds:
                sounds[key] = _sound(speaker.say(f"{key}.", vary=False))
            start = len(audio)
            audio = np.concatenate((audio, sounds[key]))
            borders.append((start / RATE_HZ, len(audio) / RATE_HZ))
            audio = np.concatenate((audio, silence(random.choice(GAPS_S))))
        audio = np.concatenate((audio, silence(random.uniform(*EDGES_S))))
        yield Spliced(text, audio, np.array(borders))


def _sound(audio: Signal) -> Signal:
    """Returns the audio from its first sound to its last one."""
    window = window_samples(RATE_HZ)
    sounds = np.flatnonzero(audible(audio, window))
    return audio[sounds[0] * window : (sounds[-1] + 1) * window]


def ways() -> dict[str, Callable[[Signal], Signal]]:
    """Returns the rows of the table, each with what is done to the audio first."""
    random = np.random.default_rng(SEED)
    level = 10 ** (NOISE_DB / 20)
    front_end = FrontEnd(MODEL)
    prompt = front_end.voice(Recording.load(PROMPT))
    voice = Voice(prompt.prompt_tokens, prompt.prompt_mel, prompt.speaker_embedding)
    model = Token2Wav.load(MODEL, runtime=RuntimeConfig(device="cpu", backend="torch"))
    template = Recording.load(PROMPT)

    def spoken(audio: Signal) -> Signal:
        whole = np.pad(audio, (0, -len(audio) % round(_TOKEN_S * RATE_HZ)))
        return model.synthesize(front_end.tokens(replace(template, samples=whole)), voice)

    return {
        "spliced words": lambda audio: audio,
        f"with noise at {NOISE_DB:g} dBFS": lambda audio: (
            audio + np.float32(level) * random.standard_normal(len(audio)).astype(np.float32)
        ),
        "spoken by the demo voice": spoken,
    }


def measure(aligner: Aligner | WholeAligner, sentences: Sequence[Spliced]) -> dict[str, Any]:
    """Aligns sentences, and returns the statistics of the errors in milliseconds."""
    errors, failed = list[np.ndarray[Any, np.dtype[np.float64]]](), 0
    for sentence in sentences:
        resampled = soxr.resample(sentence.audio, RATE_HZ, aligner.rate_hz)
        pcm = np.rint(np.clip(resampled, -1, 1) * 32767).astype(np.int16)
        try:
            words = align(aligner, sentence.text, pcm)
        except RuntimeError:
            failed += 1
            continue
        assert [word.word for word in words] == sentence.text.split()
        errors.append(np.array([(word.start_s, word.end_s) for word in words]) - sentence.borders)
    milliseconds = 1000 * np.concatenate(errors)
    absolute = np.abs(milliseconds)
    return {
        "words": len(milliseconds),
        "failed_sentences": failed,
        "median_ms": round(float(np.median(absolute))),
        "p95_ms": round(float(np.percentile(absolute, 95))),
        "starts": _statistics(milliseconds[:, 0]),
        "ends": _statistics(milliseconds[:, 1]),
    }


def _statistics(errors: np.ndarray[Any, np.dtype[np.float64]]) -> dict[str, int]:
    absolute = np.abs(errors)
    return {
        "median_ms": round(float(np.median(absolute))),
        "p95_ms": round(float(np.percentile(absolute, 95))),
        "bias_ms": round(float(np.median(errors))),
    }


if __name__ == "__main__":
    main()

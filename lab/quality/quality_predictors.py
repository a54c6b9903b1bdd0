"""Scores of the demo voice and the demo codec by predictors of listeners' ratings.

ViSQOL compares streamed audio with the recording of the same words. DNSMOS rates audio alone. The
speaker similarity is the cosine of two embeddings of Resemblyzer: of the audio, and of the
recording that made the voice.

    pip install librosa==0.11.0 requests speechmos==0.0.1.1 'visqol-python[lattice]==3.8.0' \\
        webrtcvad-wheels==2.0.14.post1
    pip install --no-deps resemblyzer==0.1.4
    .venv/bin/python -m lab.quality.quality_predictors

All weights are in these packages. UTMOS is missing, because the packages `utmos` and
`utmos-pytorch` have no weights. The recordings need `pip install -e '.[demo]'`. Prints the means of
every list; writes JSON.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import soxr
from tqdm import tqdm

from benchmarks.environment import describe, save
from examples.demo_codec.codes import MODEL as CODEC
from examples.demo_codec.encode import CodecEncoder
from examples.demo_voice.recordings import PROMPT
from examples.demo_voice.text import HELD_OUT, UNSEEN
from lab.demo_voice.folder import MODEL
from lab.demo_voice.recordings import record
from lab.quality.quality import (
    ORIGINAL,
    RECORDINGS,
    STREAMING,
    Sentence,
    Speak,
    codec_ways,
    provenance,
    ways,
)
from lab.quality.recogniser import Signal
from token2wav_server.demo.speaker import RATE_HZ
from token2wav_voice import FrontEnd, Recording

_PREDICTOR_HZ = 16_000
_PACKAGES = ("librosa", "resemblyzer", "speechmos", "visqol-python", "ai-edge-litert")
_VOICE_ROWS = 5  # first rows of `ways`; the last is the stream, and later rows load more models

Listen = Callable[[Recording], Any]  # computes the tokens or codes of a recording
Score = Callable[[Signal, Signal], float]  # scores audio against a recording, both (n,) at 16 kHz


def predictors(speaker: Signal) -> dict[str, Score]:
    """Returns the scores by name.

    Args:
        speaker: recording (n,) at 16 kHz of the speaker of the voice.
    """
    # Imported here, because no extra of the project has these packages.
    from resemblyzer import VoiceEncoder, preprocess_wav
    from speechmos import dnsmos
    from visqol import VisqolApi

    visqol = VisqolApi()
    visqol.create(mode="speech")
    encoder = VoiceEncoder("cpu", verbose=False)

    def embedding(audio: Signal) -> Signal:
        return np.asarray(encoder.embed_utterance(preprocess_wav(audio, _PREDICTOR_HZ)))

    reference = embedding(speaker)
    return {
        "visqol": lambda original, audio: (
            visqol.measure_from_arrays(original, audio, _PREDICTOR_HZ).moslqo
        ),
        "dnsmos": lambda _, audio: dnsmos.run(audio, _PREDICTOR_HZ)["ovrl_mos"],
        "similarity": lambda _, audio: reference @ embedding(audio),
    }


def main() -> None:
    """Measures all rows of every list, prints them and writes the results."""
    parser = argparse.ArgumentParser(description="Predict how listeners would rate the demo voice.")
    parser.add_argument(
        "--text",
        type=Path,
        nargs="+",
        default=[HELD_OUT, UNSEEN],
        help="text files with a sentence in each line (default: the held-out and unseen sentences)",
    )
    parser.add_argument("--sentences", type=int, help="sentences of each list (default: all)")
    parser.add_argument("--name", default="quality_predictors", help="name of the result file")
    options = parser.parse_args()

    front_end, encoder = FrontEnd(MODEL), CodecEncoder(CODEC)
    prompt = Recording.load(PROMPT)
    voice = dict(islice(ways(MODEL, front_end.voice(prompt)), _VOICE_ROWS))
    codec = dict(codec_ways(CODEC))
    rows: dict[str, tuple[Speak, Listen]] = {
        "recordings": (voice[ORIGINAL], front_end.tokens),
        "demo voice, streamed": (voice[STREAMING], front_end.tokens),
        "demo codec, streamed": (codec[STREAMING], lambda heard: encoder(heard.samples)),
    }
    scores = predictors(_predictor_rate(prompt.samples))
    lists: dict[str, dict[str, Any]] = {}
    for text in options.text:
        recordings = list(map(Recording.load, record(RECORDINGS, text)[: options.sentences]))
        lists[text.name] = {}
        for name, (speak, listen) in rows.items():
            sentences = [
                Sentence("", recording.samples, listen(recording)) for recording in recordings
            ]
            row = _means(name, sentences, speak, scores)
            lists[text.name][name] = row
            print(f"{text.name}, {len(sentences)} sentences, {name}: {row}", flush=True)
        save(
            options.name,
            {
                "environment": describe(*_PACKAGES),
                "models": {"demo voice": provenance(MODEL), "demo codec": provenance(CODEC)},
                "sentences": len(recordings),
                "lists": lists,
            },
        )


def _means(
    name: str, sentences: Sequence[Sentence], speak: Speak, scores: Mapping[str, Score]
) -> dict[str, float]:
    """Returns the mean of every score over sentences."""
    values: dict[str, list[float]] = {key: [] for key in scores}
    for sentence in tqdm(sentences, desc=name, leave=False):
        audio = np.concatenate(speak(sentence))
        length = min(len(audio), len(sentence.recording))
        original, result = map(_predictor_rate, (sentence.recording[:length], audio[:length]))
        for key, score in scores.items():
            values[key].append(score(original, result))
    return {key: round(float(np.mean(numbers)), 3) for key, numbers in values.items()}


def _predictor_rate(signal: Signal) -> Signal:
    """Resamples a signal (n,) at 24 kHz to 16 kHz. DNSMOS refuses samples beyond -1 to 1."""
    resampled = soxr.resample(signal, RATE_HZ, _PREDICTOR_HZ, quality="VHQ")
    return np.clip(np.asarray(resampled, np.float32), -1, 1)


if __name__ == "__main__":
    main()

"""Scores of speech against a recording of the same words: a recogniser and signal comparisons."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import jiwer
import numpy as np
from numpy.typing import NDArray

from examples.demo_voice.text import normal
from lab.quality.recogniser import RECOGNISER_HZ, Signal, recogniser_rate
from token2wav_server.demo.speaker import RATE_HZ
from token2wav_voice.features import prompt_mel

try:
    from pesq import pesq
except ImportError:  # pesq is built from source, which needs a compiler
    pesq = None

FRAME = 480
_AROUND = 4  # frames
_CEPSTRA = 24
_CEPSTRAL_DECIBELS = 10 * np.sqrt(2) / np.log(10)  # dB of a natural-log distance
_SILENT_RMS = 1e-3

Listen = Callable[[Signal], str]  # recognises the words of a signal (n,) at 24 kHz


class Moonshine:
    """Recogniser with Moonshine's smallest English model.

    The package `moonshine-voice` has the model in its wheel up to version 0.0.68.
    """

    def __init__(self) -> None:
        # Imported here, because only one measurement needs the package.
        from moonshine_voice import ModelArch
        from moonshine_voice.transcriber import Transcriber
        from moonshine_voice.utils import get_model_path

        self._transcriber = Transcriber(get_model_path("tiny-en"), ModelArch.TINY)

    def __call__(self, signal: Signal) -> str:
        """Recognises the words of a signal (n,) at 24 kHz."""
        samples = recogniser_rate(signal).tolist()
        transcript = self._transcriber.transcribe_without_streaming(samples, RECOGNISER_HZ)
        return normal(" ".join(line.text for line in transcript.lines))


def resampled(
    sentences: Sequence[str], heard: Sequence[str], other: Sequence[str]
) -> dict[str, list[float]]:
    """Estimates the effect of chance on a word error rate relative to another one.

    Sentences are drawn again, with repeats (the paired bootstrap of Bisani and Ney, 2004).

    Returns:
        `ratio` and `difference` of the two rates, each as the interval of 95 % of the draws.
    """
    # Imported here, because tests import this module, and the package takes long to import.
    from scipy.stats import bootstrap

    words = [normal(sentence) for sentence in sentences]
    ours, theirs = (list(map(_wrong, words, texts)) for texts in (heard, other))
    counts = [len(sentence.split()) for sentence in words]
    measures: dict[str, Callable[..., NDArray[np.float64]]] = {
        "ratio": lambda ours, theirs, _, axis: ours.sum(axis) / np.maximum(theirs.sum(axis), 1),
        "difference": lambda ours, theirs, counts, axis: (
            (ours - theirs).sum(axis) / counts.sum(axis)
        ),
    }
    intervals = {}
    for name, measure in measures.items():
        draws = bootstrap(
            (ours, theirs, counts),
            measure,
            paired=True,
            vectorized=True,
            method="percentile",
            rng=0,
        )
        intervals[name] = [round(float(value), 4) for value in draws.confidence_interval]
    return intervals


def intelligibility(original: Signal, result: Signal) -> float:
    """Computes STOI, 0 to 1 (Taal et al., 2011)."""
    # Imported here, because tests import this module, and the package takes long to import.
    from pystoi import stoi

    return float(stoi(original, result, RATE_HZ))


def perceptual(original: Signal, result: Signal) -> float | None:
    """Computes wide-band PESQ, 1 to 4.6.

    None if the package is not installed, or if PESQ finds no speech.
    """
    if pesq is None:
        return None
    try:
        return float(pesq(RECOGNISER_HZ, recogniser_rate(original), recogniser_rate(result), "wb"))
    except Exception:  # PESQ errors have no common base; noise has no speech for PESQ
        return None


def mel_cepstral_distortion(original: Signal, result: Signal) -> float:
    """Computes the distance of mel cepstra 1 to 24 in dB, frame by frame and without alignment."""
    ours, theirs = (_cepstra(prompt_mel(signal)) for signal in (result, original))
    return float(_CEPSTRAL_DECIBELS * np.sqrt(np.square(ours - theirs).sum(axis=1)).mean())


@dataclass
class Borders:
    """Energy at the borders of chunks, which shows clicks.

    The energy of the first difference of 8 samples is compared with the energy in 8 frames around
    the border, in decibels.

    Attributes:
        here, elsewhere: energies at the ends of chunks, and at all other multiples of a frame.
    """

    here: list[float] = field(default_factory=list)
    elsewhere: list[float] = field(default_factory=list)

    def add(self, signal: Signal, ends: Sequence[int]) -> None:
        """Adds the parts of one utterance that are not silent.

        Args:
            signal: shape (n,).
            ends: index of the sample at which each chunk of the utterance ends, except the last
                chunk.
        """
        # The holdback of the vocoder puts all ends at the same offset in a frame. Other places are
        # taken at this offset too, because networks with overlapping windows sound different
        # there, with borders or without.
        offset = ends[0] % FRAME if ends else 0
        frames = len(signal) // FRAME
        steps = np.square(np.diff(signal.astype(np.float64)))
        loud = (
            np.sqrt(np.square(signal[: frames * FRAME].reshape(-1, FRAME)).mean(axis=1))
            > _SILENT_RMS
        )
        for frame in range(_AROUND, frames - _AROUND):
            if loud[frame - 1 : frame + 1].all():
                at = frame * FRAME + offset
                near = steps[at - _AROUND * FRAME : at + _AROUND * FRAME].mean()
                energies = self.here if at in ends else self.elsewhere
                energies.append(
                    10 * float(np.log10(max(steps[at - 5 : at + 3].mean() / near, 1e-9)))
                )

    def report(self) -> dict[str, float]:
        """Returns how much more energy the ends of chunks have than other places, in decibels.

        Empty if every utterance had a single chunk.
        """
        if not self.here:
            return {}
        error = np.sqrt(sum(np.var(values) / len(values) for values in (self.here, self.elsewhere)))
        return {
            "decibels": round(float(np.mean(self.here) - np.mean(self.elsewhere)), 2),
            "standard_error": round(float(error), 2),
            "count": len(self.here),
        }


def _wrong(sentence: str, heard: str) -> int:
    alignment = jiwer.process_words(sentence, heard)
    return int(alignment.substitutions + alignment.deletions + alignment.insertions)


def _cepstra(mel: NDArray[np.float32]) -> NDArray[np.float64]:
    bands = mel.shape[1]
    order = np.arange(1, _CEPSTRA + 1)
    basis = 2 / bands * np.cos(np.pi / bands * order[:, None] * (np.arange(bands) + 0.5))
    return mel @ basis.T

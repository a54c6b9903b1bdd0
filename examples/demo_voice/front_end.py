"""The part of a model folder that hears: learned once from a corpus, and what it hears in that corpus."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soxr
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from examples.demo_voice import speaker
from examples.demo_voice.corpus import Utterances
from examples.demo_voice.speech import RATE_HZ, TOKEN_SAMPLES
from examples.demo_voice.tokenizer import Tokenizer
from token2wav_voice.features import SPEAKER_RATE_HZ, speaker_features
from token2wav_voice.onnx_models import SPEAKER_FILE, TOKENIZER_FILE, SpeakerEncoder

_STATE = "tokenizer.safetensors"
_SPEAKERS = 64  # recordings that lend their embedding to training
_SHORTEST_S = 1.0


@dataclass(frozen=True, eq=False)
class Heard:
    """What training needs beside the corpus.

    Attributes:
        tokens: (N,) of all recordings.
        mean_mel: (vocabulary, 80) average of every token.
        speakers: (n, 192) embeddings of some recordings.
    """

    tokens: NDArray[np.int32]
    mean_mel: NDArray[np.float32]
    speakers: NDArray[np.float32]


def learn(folder: Path, corpus: Utterances, rounds: int) -> None:
    """Makes both ONNX files from a corpus, unless they are there: a flow is of no use with another tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / _STATE).exists():
        return
    tokenizer = Tokenizer.learn(corpus, rounds)
    tokenizer.save(folder / TOKENIZER_FILE)
    speaker.save(folder / SPEAKER_FILE)
    save_file({"kernel": tokenizer.kernel, "centres": tokenizer.centres}, folder / _STATE)


def vocabulary(folder: Path) -> int:
    """Tokens that the tokenizer of a folder knows."""
    return len(load_file(folder / _STATE)["centres"])


def hear(folder: Path, corpus: Utterances) -> Heard:
    """Tokens and embeddings of a corpus."""
    tokenizer = Tokenizer(**load_file(folder / _STATE))
    tokens = tokenizer.tokens(corpus)
    return Heard(tokens, tokenizer.mean_mel(corpus, tokens), _speakers(folder, corpus))


def _speakers(folder: Path, corpus: Utterances) -> NDArray[np.float32]:
    encoder = SpeakerEncoder(folder)
    long = np.flatnonzero(corpus.tokens * TOKEN_SAMPLES >= _SHORTEST_S * RATE_HZ)
    embeddings = []
    for index in long[:: max(1, len(long) // _SPEAKERS)]:
        start = corpus.starts[index] * TOKEN_SAMPLES
        recording = corpus.audio[start : start + corpus.tokens[index] * TOKEN_SAMPLES] / 32768
        signal = np.asarray(soxr.resample(recording, RATE_HZ, SPEAKER_RATE_HZ, quality="VHQ"), np.float32)
        embeddings.append(encoder(speaker_features(signal)))
    return np.stack(embeddings)

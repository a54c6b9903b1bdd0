"""Corpus of recordings, with the features that training needs.

A shard is a file with the features of 100 sentences. A shard file is complete or does not exist, so
the making of a corpus can be interrupted and continued at any time.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import soxr
from numpy.typing import NDArray
from tqdm import tqdm

from examples.demo_voice.pitch import pitch
from lab.demo_voice.phones import phone_numbers
from lab.demo_voice.sentences import Templates
from lab.demo_voice.talk import Talk
from lab.demo_voice.words import dictionary, language_model
from token2wav_server.demo.speaker import HOP, RATE_HZ, TOKEN_SAMPLES, Speaker
from token2wav_voice.features import TOKENIZER_RATE_HZ, prompt_mel, tokenizer_features

LISTENED_PER_TOKEN = 4
SHARD_SENTENCES = 100
_SEED = 7


@dataclass(frozen=True, eq=False)
class Utterances:
    """Recordings of a corpus, joined one after the other.

    Attributes:
        tokens: tokens of every recording. Their sum is N.
        audio: samples (960 * N,) in int16 at 24 kHz.
        mel: mel (2 * N, 80) in float16, the target of the flow.
        heard: Whisper features (4 * N, 128) in float16, the input of the tokenizer.
        f0: pitch (2 * N,) in float16, in Hz; 0 in unvoiced frames.
        phones: numbers of the phones of all recordings, from 1.
        phone_counts: number of phones of every recording.
    """

    tokens: NDArray[np.int64]
    audio: NDArray[np.int16]
    mel: NDArray[np.float16]
    heard: NDArray[np.float16]
    f0: NDArray[np.float16]
    phones: NDArray[np.int8]
    phone_counts: NDArray[np.int64]

    @classmethod
    def of(
        cls, recordings: list[NDArray[np.float32]], phones: list[NDArray[np.int8]]
    ) -> Utterances:
        """Computes the features of recordings, each of shape (960 * n,), and joins their phones."""
        tokens = [len(recording) // TOKEN_SAMPLES for recording in recordings]
        heard = []
        for recording, count in zip(recordings, tokens, strict=True):
            listened = np.asarray(
                soxr.resample(recording, RATE_HZ, TOKENIZER_RATE_HZ, quality="VHQ"), np.float32
            )
            heard.append(tokenizer_features(listened).T[: LISTENED_PER_TOKEN * count])
        return cls(
            np.array(tokens),
            (np.concatenate(recordings) * 32767).astype(np.int16),
            np.concatenate([prompt_mel(recording) for recording in recordings]).astype(np.float16),
            np.concatenate(heard).astype(np.float16),
            np.concatenate([pitch(recording, RATE_HZ, HOP) for recording in recordings]).astype(
                np.float16
            ),
            np.concatenate(phones),
            np.array([len(row) for row in phones]),
        )

    @classmethod
    def joined(cls, parts: list[Utterances]) -> Utterances:
        return cls(
            *(
                np.concatenate([vars(part)[name] for part in parts])
                for name in cls.__dataclass_fields__
            )
        )

    @property
    def starts(self) -> NDArray[np.int64]:
        """Position of the first token of every recording."""
        return np.cumsum(self.tokens) - self.tokens

    @property
    def hours(self) -> float:
        return len(self.audio) / RATE_HZ / 3600


def grow(folder: Path, sentences: int, workers: int) -> None:
    """Makes the missing shards of a corpus, with a progress bar.

    Args:
        sentences: sentences of the whole corpus.
        workers: processes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    missing = [
        index
        for index in range(-(-sentences // SHARD_SENTENCES))
        if not _shard(folder, index).exists()
    ]
    if not missing:
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        jobs = [
            pool.submit(
                _make, folder, index, min(SHARD_SENTENCES, sentences - index * SHARD_SENTENCES)
            )
            for index in missing
        ]
        for job in tqdm(as_completed(jobs), desc="corpus", unit="shard", total=len(jobs)):
            job.result()


def _make(folder: Path, index: int, count: int) -> None:
    seed = _SEED + index
    source = (
        Talk(language_model(), dictionary(), seed) if index % 2 else Templates(dictionary(), seed)
    )
    speaker = Speaker(seed)
    sentences = source.take(count)
    made = Utterances.of(
        [speaker.say(sentence, vary=True) for sentence in sentences],
        [phone_numbers(speaker.pronunciation(sentence)) for sentence in sentences],
    )
    draft = folder / f".{index}.npz"
    np.savez(draft, **vars(made))
    draft.rename(_shard(folder, index))


def read(folder: Path) -> Utterances:
    """Reads all shards of a corpus."""
    return Utterances.joined(list(_shards(folder)))


def _shards(folder: Path) -> Iterator[Utterances]:
    for path in sorted(folder.glob("shard_*.npz")):
        with np.load(path) as arrays:
            if missing := Utterances.__dataclass_fields__.keys() - arrays.keys():
                sys.exit(
                    f"corpus: {path} has no {', '.join(sorted(missing))}; an older recipe made it. "
                    f"Remove {folder} and run the recipe again"
                )
            yield Utterances(**arrays)


def _shard(folder: Path, index: int) -> Path:
    return folder / f"shard_{index:04d}.npz"

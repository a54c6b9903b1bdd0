"""Streams chunk by chunk: against the public streaming loop, and against whole-sequence results of
our own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from testkit.flows import recomputing
from testkit.models.golden import GoldenSet, snr_db
from tests.families.cosyvoice3 import tolerances
from token2wav import RuntimeConfig, StreamConfig, Token2Wav
from token2wav.serving.audio_output import AudioChunk
from token2wav.stages.recompute import RecomputeVocoder
from token2wav.stages.stage import FrameChunk
from token2wav.stages.waveform import WaveformStage

Load = Callable[..., Token2Wav]

HELD_BACK_IN_PUBLIC, DELAY = 8 * 480, 4 * 480 + 4  # samples held back by the public loop, and here


class MelRecorder:
    """Passes every mel chunk on to the vocoder and keeps it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.mels: list[torch.Tensor] = []
        for engine in (WaveformStage, RecomputeVocoder):
            self._record(engine, monkeypatch)

    def _record(self, kind: type[Any], monkeypatch: pytest.MonkeyPatch) -> None:
        advance = kind.advance

        def recording(engine: Any, batch: Sequence[tuple[int, FrameChunk]]) -> list[torch.Tensor]:
            self.mels += [chunk.frames.cpu() for _, chunk in batch]
            return advance(engine, batch)

        monkeypatch.setattr(kind, "advance", recording)


CACHE = RuntimeConfig(cache_mib=1024)


def incremental(folder: Path) -> Token2Wav:
    return Token2Wav.load(folder, runtime=CACHE)


@dataclass(frozen=True)
class Run:
    """Results of one stream: its audio, and the mel of each chunk."""

    chunks: list[AudioChunk]
    mels: list[torch.Tensor]


def run(model: Token2Wav, golden: GoldenSet) -> Run:
    with pytest.MonkeyPatch.context() as patch:
        recorder = MelRecorder(patch)
        with model.stream(golden.voice) as stream:
            return Run(stream.push(golden.tokens) + stream.finish(), recorder.mels)


@pytest.fixture(scope="module")
def public(folder: Path) -> Token2Wav:
    """The model as the public loop runs it."""
    return Token2Wav.load(folder, stream=StreamConfig(reference=True))


@pytest.fixture(scope="module")
def public_run(public: Token2Wav, golden: GoldenSet) -> Run:
    return run(public, golden)


def test_chunks_equal_the_public_loop(golden: GoldenSet, public_run: Run) -> None:
    chunks = public_run.chunks
    sent = np.cumsum([len(chunk.audio) for chunk in chunks])
    earlier = np.array([HELD_BACK_IN_PUBLIC - DELAY] * (len(chunks) - 1) + [0])
    assert (sent == np.cumsum([chunk["audio_samples"] for chunk in golden.chunks]) + earlier).all()
    assert [chunk.final for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    for index, mel in enumerate(public_run.mels):
        reference = golden.chunk(index, "mel")
        assert mel.shape == reference.shape
        assert float((mel - reference).abs().max()) <= tolerances.MEL, f"chunk {index}"
    check_audio(golden, public_run)


def test_audio_of_the_golden_mel_chunk_by_chunk(golden: GoldenSet, public: Token2Wav) -> None:
    vocoder = public.pipeline.vocoder
    handle, last = vocoder.open(), len(golden.chunks) - 1
    audio = torch.cat(
        [
            vocoder.advance([(handle, FrameChunk(golden.chunk(index, "mel"), index == last))])[
                0
            ].cpu()
            for index in range(last + 1)
        ]
    )
    reference = torch.cat([golden.chunk(index, "audio") for index in range(last + 1)])
    assert audio.shape == reference.shape
    assert float((audio - reference).abs().max()) <= tolerances.AUDIO
    vocoder.close(handle)


@pytest.mark.parametrize("load", [incremental, recomputing])
def test_all_chunks_but_the_last_equal_the_public_loop(
    golden: GoldenSet, folder: Path, load: Load
) -> None:
    """With a cache of the past, or with recomputation per chunk. The public loop computes the last
    chunk under the full mask.
    """
    our_run = run(load(folder), golden)
    for index, mel in enumerate(our_run.mels[:-1]):
        assert float((mel - golden.chunk(index, "mel")).abs().max()) <= tolerances.MEL, (
            f"chunk {index}"
        )
    check_audio(golden, our_run)


def check_audio(golden: GoldenSet, done: Run) -> None:
    """Asserts that audio, end to end, is that of the public loop."""
    chunks = done.chunks[:-1]  # the tail amplifies the difference of masks in the public loop's mel
    reference = np.concatenate(
        [golden.chunk(index, "audio").numpy() for index in range(len(chunks))]
    )
    audio = np.concatenate([chunk.audio for chunk in chunks])[: len(reference)]
    assert snr_db(audio, reference) > tolerances.SNR_DB


def test_last_chunk_equals_the_non_streaming_mel(
    golden: GoldenSet, public: Token2Wav, public_run: Run
) -> None:
    tail = public_run.mels[-1].numpy()
    whole = public.mel(golden.tokens, golden.voice, streaming=False)
    assert np.abs(tail - whole[:, -tail.shape[1] :]).max() <= tolerances.MEL

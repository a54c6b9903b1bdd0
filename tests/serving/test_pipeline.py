"""Pipeline: opening, batches and closing of utterances in all stages, and failing stages."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from testkit.models.tiny_model import FaultyVocoder, demo_tokens
from testkit.patience import run_elsewhere
from testkit.replies import FIRST, Expected
from testkit.utterances import joined
from token2wav import AudioChunk, BackendError, Token2Wav, Voice
from token2wav.config.model_config import StageName
from token2wav.serving.pipeline import Pipeline
from token2wav.serving.utterance import Utterance


def an_open_utterance(pipeline: Pipeline, voice: Voice, tokens: int) -> Utterance:
    """Opens an utterance whose last tokens have arrived."""
    utterance = pipeline.utterance(voice)
    pipeline.open(utterance)
    utterance.chunker.push(demo_tokens(tokens), end=True)
    return utterance


def test_a_batch_equals_each_request_alone(
    model: Token2Wav, voice: Voice, expected: Expected
) -> None:
    """Utterances of different lengths, which end in different rounds."""
    pipeline, lengths = model.pipeline, (4, FIRST, FIRST + 50)
    utterances = [an_open_utterance(pipeline, voice, length) for length in lengths]
    chunks: list[list[AudioChunk]] = [[] for _ in utterances]
    while running := [i for i, utterance in enumerate(utterances) if utterance.chunker.next_chunk]:
        audio = pipeline.advance([utterances[index] for index in running])
        for index, chunk in zip(running, audio, strict=True):
            assert isinstance(chunk, AudioChunk)
            chunks[index].append(chunk)
            utterances[index].finish_chunk(chunk)
    for utterance, pieces, length in zip(utterances, chunks, lengths, strict=True):
        pipeline.close(utterance)
        np.testing.assert_allclose(joined(pieces), expected(length), atol=1e-4)


def test_each_stage_reports_its_time(model: Token2Wav, voice: Voice) -> None:
    times: list[Mapping[StageName, float]] = []
    utterance = an_open_utterance(model.pipeline, voice, 4)
    model.pipeline.advance([utterance], times.append)
    model.pipeline.close(utterance)
    [seconds] = times
    assert list(seconds) == ["flow", "vocoder"]
    assert min(seconds.values()) > 0


def test_a_request_has_memory_from_open_to_close(model: Token2Wav, voice: Voice) -> None:
    pipeline = model.pipeline
    utterance = pipeline.utterance(voice)
    pipeline.close(utterance)  # an utterance that was never opened
    assert pipeline.open_streams == 0
    pipeline.open(utterance)
    assert [stage.open_streams for stage in pipeline.stages.values()] == [1, 1]
    for _ in range(2):
        pipeline.close(utterance)
        assert [stage.open_streams for stage in pipeline.stages.values()] == [0, 0]


def test_a_dropped_request_is_closed_by_the_next_call(model: Token2Wav, voice: Voice) -> None:
    pipeline = model.pipeline
    dropped, utterance = (an_open_utterance(pipeline, voice, 4) for _ in range(2))
    pipeline.drop(dropped)
    assert dropped.handles  # the garbage collector must never wait for a stage
    pipeline.advance([utterance])
    assert not dropped.handles
    pipeline.drop(utterance)
    assert pipeline.open_streams == 0


def test_a_dropped_stream_closed_by_another_thread(model: Token2Wav, voice: Voice) -> None:
    pipeline = model.pipeline

    class Contended(deque[Any]):
        def popleft(self) -> Any:
            if len(self) == 1:
                run_elsewhere(super().popleft)
            return super().popleft()

    dropped, pipeline._dropped = pipeline._dropped, Contended([pipeline.utterance(voice)])
    try:
        with model.stream(voice) as stream:
            assert len(joined(stream.finish([1]))) == 960
    finally:
        pipeline._dropped = dropped


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_audio_that_is_no_number_ends_its_request_alone(
    faulty: tuple[Token2Wav, FaultyVocoder], voice: Voice, expected: Expected, number: float
) -> None:
    model, vocoder = faulty
    broken, other = (an_open_utterance(model.pipeline, voice, 4) for _ in range(2))
    vocoder.fault = number
    error, chunk = model.pipeline.advance([broken, other])
    assert str(error) == "backend: the model produced NaN or infinite audio"
    assert isinstance(chunk, AudioChunk)
    np.testing.assert_allclose(chunk.audio, expected(4), atol=1e-4)
    for utterance in (broken, other):
        model.pipeline.close(utterance)


@pytest.mark.parametrize("error", [RuntimeError, MemoryError])
def test_errors_of_torch_become_one_short_sentence(
    model: Token2Wav, error: type[Exception]
) -> None:
    with pytest.raises(BackendError) as caught, model.pipeline.running():
        raise error("out\n  of memory" + 500 * "!")
    assert str(caught.value) == "backend: out of memory" + 287 * "!"
    with pytest.raises(ValueError, match="a bug"), model.pipeline.running():
        raise ValueError("a bug")

"""Pipeline: opening, batches and closing of utterances in all stages, and failing stages."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import pytest

from testkit.models.tiny_model import demo_tokens
from testkit.patience import run_elsewhere
from testkit.utterances import joined
from token2wav import BackendError, Token2Wav, Voice
from token2wav.config.model_config import StageName
from token2wav.serving.pipeline import Pipeline
from token2wav.serving.utterance import Utterance


def an_open_utterance(pipeline: Pipeline, voice: Voice, tokens: int) -> Utterance:
    """Opens an utterance whose last tokens have arrived."""
    utterance = pipeline.utterance(voice)
    pipeline.open(utterance)
    utterance.chunker.push(demo_tokens(tokens), end=True)
    return utterance


def test_each_stage_reports_its_time(model: Token2Wav, voice: Voice) -> None:
    times: list[Mapping[StageName, float]] = []
    utterance = an_open_utterance(model.pipeline, voice, 4)
    model.pipeline.advance([utterance], times.append)
    model.pipeline.close(utterance)
    [seconds] = times
    assert list(seconds) == ["flow", "vocoder"]
    assert min(seconds.values()) > 0


def test_a_dropped_request_is_closed_by_the_next_call(model: Token2Wav, voice: Voice) -> None:
    pipeline = model.pipeline
    dropped, utterance = (an_open_utterance(pipeline, voice, 4) for _ in range(2))
    pipeline.close(pipeline.utterance(voice))  # an utterance that was never opened
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


@pytest.mark.parametrize("error", [RuntimeError, MemoryError])
def test_errors_of_torch_become_one_short_sentence(
    model: Token2Wav, error: type[Exception]
) -> None:
    with pytest.raises(BackendError) as caught, model.pipeline.running():
        raise error("out\n  of memory" + 500 * "!")
    assert str(caught.value) == "backend: out of memory" + 287 * "!"
    with pytest.raises(ValueError, match="a bug"), model.pipeline.running():
        raise ValueError("a bug")

"""Several workers: they compute at the same time, and one that hangs loses only its own streams."""

from __future__ import annotations

import re
import time

import numpy as np
import pytest

from testkit.models.golden import snr_db
from testkit.models.tiny_model import FaultyVocoder
from testkit.patience import until
from testkit.replies import (
    FIRST,
    SECOND,
    Expected,
    FakeClock,
    GatedReply,
    Hanging,
    Make,
    joined,
    speak,
)
from token2wav import BackendError, Token2Wav, Voice
from token2wav.serving.pipeline import Pipeline
from token2wav.serving.worker import WorkerPool, default_workers

# batches sum in another order than single streams, and phase integrates the difference
SAME_DB = 60


@pytest.fixture
def gpu_pool(
    make: Make, faulty: tuple[Token2Wav, FaultyVocoder], monkeypatch: pytest.MonkeyPatch
) -> tuple[WorkerPool, FaultyVocoder, FakeClock]:
    """Pool as on a GPU: two workers, one of which computes."""
    monkeypatch.setattr(Pipeline, "on_cpu", False)
    clock = FakeClock()
    return make(faulty[0], clock=clock, stream_tokens=15000), faulty[1], clock


def test_a_gpu_computes_while_audio_is_sent(
    gpu_pool: tuple[WorkerPool, FaultyVocoder, FakeClock], voice: Voice, expected: Expected
) -> None:
    workers, _, _ = gpu_pool
    speak(workers, voice, FIRST, slow := GatedReply())
    slow.sending.wait_until_called()
    assert np.array_equal(joined(speak(workers, voice, SECOND)), expected(SECOND))
    assert not slow.outcomes
    slow.sending.gate.set()
    assert np.array_equal(joined(slow), expected(FIRST))


def test_a_gpu_computes_one_batch_at_a_time(
    gpu_pool: tuple[WorkerPool, FaultyVocoder, FakeClock], voice: Voice, expected: Expected
) -> None:
    workers, vocoder, _ = gpu_pool
    vocoder.meanwhile["advance"] = computing = Hanging()
    first = speak(workers, voice, 4)
    computing.wait_until_called()
    vocoder.meanwhile["advance"] = waiting = Hanging()
    others = [speak(workers, voice, 4) for _ in range(3)]
    time.sleep(0.2)
    assert "advance" in vocoder.meanwhile, "a second batch is being computed"
    computing.gate.set()
    first.succeeded()
    waiting.wait_until_called()
    waiting.gate.set()
    for reply in others:
        assert snr_db(expected(4), joined(reply)) > SAME_DB


def test_a_gpu_that_hangs_admits_no_utterance(
    gpu_pool: tuple[WorkerPool, FaultyVocoder, FakeClock], voice: Voice, expected: Expected
) -> None:
    workers, vocoder, clock = gpu_pool
    vocoder.meanwhile["advance"] = hanging = Hanging()
    lost = speak(workers, voice, FIRST)
    hanging.wait_until_called()
    clock.now += 181.0
    assert isinstance(lost.failed(), BackendError)
    with pytest.raises(BackendError, match="no batch has finished for 181 s; the server hangs"):
        workers.utterances.open(voice)
    hanging.gate.set()
    until(lambda: workers.utterances.scheduler.idle_workers == 2)
    assert np.array_equal(joined(speak(workers, voice, FIRST)), expected(FIRST))


def test_a_hanging_worker_loses_only_its_own_streams(
    make: Make,
    faulty: tuple[Token2Wav, FaultyVocoder],
    voice: Voice,
    expected: Expected,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, vocoder = faulty
    clock, first, second = FakeClock(), Hanging(), Hanging()
    workers = make(model, clock=clock, workers=2, stream_tokens=15000)
    vocoder.meanwhile["advance"] = first
    lost = speak(workers, voice, FIRST)
    first.wait_until_called()
    clock.now += 179.0
    assert np.array_equal(joined(speak(workers, voice, FIRST)), expected(FIRST))
    assert not lost.outcomes
    clock.now += 2.0
    assert isinstance(lost.failed(), BackendError)
    assert (
        str(lost.error) == "backend: the worker of this stream hangs; its batch has run for 181 s"
    )
    assert np.array_equal(joined(speak(workers, voice, FIRST)), expected(FIRST))
    assert workers.utterances.open_utterances == 0
    until(lambda: model.pipeline.open_streams == 1)  # the engines may still write there

    vocoder.meanwhile["advance"] = second
    lost = speak(workers, voice, FIRST)
    second.wait_until_called()
    clock.now += 181.0
    assert isinstance(lost.failed(), BackendError)
    with pytest.raises(
        BackendError, match=r"^backend: no batch has finished for 181 s; the server hangs$"
    ):
        workers.utterances.open(voice)

    second.gate.set()
    until(lambda: workers.utterances.scheduler.idle_workers == 1)
    assert np.array_equal(joined(speak(workers, voice, FIRST)), expected(FIRST))
    first.gate.set()
    until(lambda: workers.utterances.scheduler.idle_workers == 2)
    assert model.pipeline.open_streams == 0
    until(lambda: "after 362 s" in caplog.text)  # the last line
    messages = [record.getMessage() for record in caplog.records if "worker" in record.getMessage()]
    assert [re.sub(r"worker \d", "a worker", line) for line in messages] == [
        "a worker hangs: its batch has run for 181 s, and its 1 streams have failed; 1 of 2 "
        "workers still run",
        "a worker hangs: its batch has run for 181 s, and its 1 streams have failed; 0 of 2 "
        "workers still run",
        "a worker has finished its batch after 181 s and accepts requests again",
        "a worker has finished its batch after 362 s and accepts requests again",
    ]


def test_number_of_workers_on_a_cpu_and_on_a_gpu() -> None:
    assert 1 <= default_workers("cpu") <= 4
    assert default_workers("cuda:0") == 1

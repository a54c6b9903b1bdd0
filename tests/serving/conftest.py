from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from testkit.replies import LIMITS, Make
from token2wav import Token2Wav
from token2wav.serving.observer import Observer
from token2wav.serving.worker import WorkerPool


@pytest.fixture
def make(model: Token2Wav) -> Iterator[Make]:
    """Makes pools of one worker; afterwards each must be empty, and its thread ends."""
    made: list[WorkerPool] = []

    def build(
        target: Token2Wav = model,
        clock: Callable[[], float] = time.monotonic,
        observer: Observer | None = None,
        **limits: float,
    ) -> WorkerPool:
        made.append(WorkerPool(target.pipeline, replace(LIMITS, **limits), observer, clock))  # type: ignore[arg-type]
        return made[-1]

    yield build
    leftovers = [workers.utterances.open_utterances for workers in made]
    for workers in made:
        workers.close()
    assert leftovers == [0] * len(made)


@pytest.fixture
def workers(make: Make) -> WorkerPool:
    return make()

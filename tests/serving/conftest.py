from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from testkit.replies import LIMITS, Make
from token2wav import Token2Wav
from token2wav.serving.observer import Observer
from token2wav.serving.worker import WorkerPool


@pytest.fixture
def make(model: Token2Wav) -> Iterator[Make]:
    """Makes pools, by default of one worker; afterwards each must be empty, and its threads end."""
    made: list[WorkerPool] = []

    def build(
        target: Token2Wav = model,
        clock: Callable[[], float] = time.monotonic,
        observer: Observer | None = None,
        workers: int = 1,
        on_device_lost: Callable[[], None] = lambda: None,
        **limits: Any,
    ) -> WorkerPool:
        bounds = replace(LIMITS, **limits)
        pool = WorkerPool(target.pipeline, bounds, observer, clock, workers, on_device_lost)
        made.append(pool)
        return pool

    yield build
    leftovers = [workers.utterances.open_utterances for workers in made]
    for workers in made:
        workers.close()
    assert leftovers == [0] * len(made)


@pytest.fixture
def workers(make: Make) -> WorkerPool:
    return make()

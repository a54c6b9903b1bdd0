"""A stream that is closed while it computes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from testkit.patience import PATIENCE_SECONDS
from testkit.utterances import a_voice, some_tokens
from tests.stages.rig import CountingSolver, FlowStream, Parts, unreferenced_evicted
from token2wav import StreamClosedError
from token2wav.stages.cached_flow import CachedFlow


class Held:
    """Engine that holds its second computation until `go_on` is set.

    The first computation is for the prompt, the second one for a stream.
    """

    def __init__(self, parts: Parts) -> None:
        self.computing, self.go_on = threading.Event(), threading.Event()
        self.engine = parts.incremental(pages=12, solver=CountingSolver(self._before))
        self.released: list[int] = []
        release = self.engine.pool.release

        def noting(pages: list[int]) -> None:
            self.released += pages
            release(pages)

        self.engine.pool.release = noting  # type: ignore[method-assign]

    def _before(self, call: int) -> None:
        if call == 2:
            self.computing.set()
            assert self.go_on.wait(timeout=PATIENCE_SECONDS)


@pytest.fixture
def held(parts: Parts) -> Iterator[Held]:
    held = Held(parts)
    yield held
    held.go_on.set()


def test_pages_are_released_once_and_after_the_computation(parts: Parts, held: Held) -> None:
    engine: CachedFlow = held.engine
    stream = FlowStream(engine, a_voice(41), parts.config)
    used = engine.pool.used
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(stream.push, some_tokens(40))
        assert held.computing.wait(timeout=PATIENCE_SECONDS)
        for _ in range(2):
            stream.close()
        assert (engine.open_streams, engine.pool.used, held.released) == (0, used, [])
        assert engine.prefixes.referenced == 1
        held.go_on.set()
        running.result(timeout=PATIENCE_SECONDS)
    assert len(held.released) == len(set(held.released)) == used - 1  # the prompt's page stays
    stream.close()
    assert (engine.prefixes.referenced, len(held.released)) == (0, used - 1)
    assert unreferenced_evicted(engine) == 0
    with pytest.raises(StreamClosedError):
        stream.push(some_tokens(60))

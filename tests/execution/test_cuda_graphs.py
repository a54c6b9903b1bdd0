"""Capture of CUDA graphs: runs at load change nothing that a stream reads, and a load goes on after
a capture that fails.
"""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from testkit.graph_pool import PoolWithoutGraphs
from tests.stages.rig import Parts
from token2wav.backends import exported_buckets
from token2wav.cache.paged_kv_cache import PagedKVCache
from token2wav.cache.states import StateStore
from token2wav.errors import BackendError
from token2wav.execution import cuda_graphs
from token2wav.execution.cuda_graphs import CaptureError, GraphPool
from token2wav.execution.runner import FlowRunner
from token2wav.execution.step_boundary import at_boundaries, paced, step_boundary
from token2wav.exported.step import ExportedStep
from token2wav.stages.cached_flow import flow_states


def spoil(tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors:
        tensor.fill_(torch.nan)


def tables(store: StateStore) -> list[torch.Tensor]:
    return store._all_tables()


def test_a_capture_collects_no_garbage() -> None:
    """Garbage may hold the graphs of another model. Freed in a capture, they end the capture."""

    class Cycle:
        def __init__(self) -> None:
            self.itself = self

    thresholds = gc.get_threshold()
    garbage = weakref.ref(Cycle())
    with cuda_graphs._garbage_kept():
        gc.set_threshold(1, 1, 1)  # every new object would start a collection
        objects: list[list[int]] = [[] for _ in range(100)]
        assert garbage() is not None
        gc.set_threshold(*thresholds)
    assert gc.isenabled()
    gc.collect()
    assert garbage() is None
    assert len(objects) == 100


def test_runs_at_load_write_only_to_the_scratch_page(parts: Parts) -> None:
    """An exported step pads its batches, so it reads the null page and writes the scratch page."""
    layout, pages = parts.layout(), 4
    cache = PagedKVCache(layout, pages, torch.device("cpu"))
    states = flow_states(parts.flow, parts.flow.estimator, layout)
    spoil([cache._data[:, :, :, :, :pages], *tables(states)])
    step = ExportedStep(parts.flow.estimator, parts.solver.tables, cache)
    with torch.inference_mode():
        runner = FlowRunner(step, states, exported_buckets(2, (2,)), PoolWithoutGraphs(3))
    assert cache._data[:, :, :, :, :pages].isnan().all()
    assert not cache._data[:, :, :, :, cache.null].any()
    assert all(table.isnan().all() for table in tables(states))
    for batch, _ in runner._batches._buckets.values():
        assert batch.x.isfinite().all()  # type: ignore[attr-defined]


# Captures that fail.


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Replaces the calls of torch that need a GPU. It records the captures and replays."""
    record = SimpleNamespace(
        modes=[], pools=[], streams=0, replays=0, capturing=False, uploads=False
    )
    handles = itertools.count()

    class Graph:
        def replay(self) -> None:
            record.replays += 1

    @contextmanager
    def graph(*_: Any, capture_error_mode: str, pool: int, **__: Any) -> Iterator[None]:
        record.modes.append(capture_error_mode)
        record.pools.append(pool)
        record.capturing = True
        try:
            yield
        finally:
            record.capturing = False

    @contextmanager
    def stream(_: Any) -> Iterator[None]:
        yield

    a_stream = SimpleNamespace(wait_stream=lambda other: None, cuda_stream=7)

    def new_stream(_: Any) -> SimpleNamespace:
        record.streams += 1
        return a_stream

    replaced = {
        "graph_pool_handle": lambda: (0, next(handles)),
        "Stream": new_stream,
        "current_stream": lambda: a_stream,
        "stream": stream,
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
        "mem_get_info": lambda device: (100 - record.replays, 1000),
        "CUDAGraph": Graph,
        "graph": graph,
    }
    for name, value in replaced.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(cuda_graphs, "uploaded", lambda graph, stream: record.uploads)
    monkeypatch.setattr(cuda_graphs, "nodes_in_capture", lambda stream: 5)
    return record


@pytest.mark.parametrize("uploads", [False, True])
def test_a_graph_is_on_the_gpu_before_its_first_batch(
    recorded: SimpleNamespace, uploads: bool
) -> None:
    """A capture uploads its graph, or replays it once if that is not possible."""
    recorded.uploads = uploads
    pool, calls = GraphPool(torch.device("cuda")), list[bool]()
    captured = pool.capture(lambda: calls.append(recorded.capturing))
    assert calls == [False, False, True]  # warm-ups, then the capture
    assert recorded.modes == ["thread_local"]
    assert recorded.replays == (0 if uploads else 1)
    assert (pool.summary.graphs, pool.summary.nodes) == (1, 5)
    assert pool.summary.memory == recorded.replays
    assert pool.summary.seconds > 0
    captured()
    assert recorded.replays == (1 if uploads else 2)


def test_a_function_that_is_captured_in_steps_has_a_graph_for_each(
    recorded: SimpleNamespace,
) -> None:
    recorded.uploads = True
    pool, reached = GraphPool(torch.device("cuda")), list[int]()

    def three_steps() -> None:
        step_boundary()
        step_boundary()

    for in_steps, graphs in ((False, 1), (True, 3)):
        before, recorded.replays = len(recorded.modes), 0
        captured = pool.capture(three_steps, in_steps=in_steps)
        assert len(recorded.modes) - before == graphs
        reached.clear()
        with at_boundaries(lambda: reached.append(recorded.replays)):
            captured()
        assert reached == [1, 2][: graphs - 1]
        assert recorded.replays == graphs
    assert (pool.summary.graphs, pool.summary.nodes) == (2, 4 * 5)
    assert recorded.pools[0] != recorded.pools[1] == recorded.pools[2] == recorded.pools[3]


def test_every_model_has_a_pool_and_a_stream_of_its_own(recorded: SimpleNamespace) -> None:
    for _ in range(2):
        pool = GraphPool(torch.device("cuda"))
        pool.capture(lambda: None)
        pool.capture(lambda: None)
    first, second, third, fourth = recorded.pools
    assert first == second != third == fourth
    assert recorded.streams == 2


def test_convolutions_are_timed_only_for_a_capture(recorded: SimpleNamespace) -> None:
    timed: list[bool] = []
    GraphPool(torch.device("cuda")).capture(lambda: timed.append(torch.backends.cudnn.benchmark))
    assert timed == [True] * 3
    assert not torch.backends.cudnn.benchmark


def test_only_errors_of_the_capture_are_forgiven(recorded: SimpleNamespace) -> None:
    pool = GraphPool(torch.device("cuda"))

    def fails_in_capture() -> None:
        if recorded.capturing:
            raise BackendError("tensorrt: the engine cannot be captured")

    def fails_always() -> None:
        raise BackendError("tensorrt: no profile")

    with pytest.raises(CaptureError, match="the engine cannot be captured"):
        pool.capture(fails_in_capture)
    with pytest.raises(BackendError, match="no profile"):
        pool.capture(fails_always)
    assert pool.summary.graphs == 0


def test_a_failed_capture_spoils_no_later_one(
    recorded: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The allocator of torch 2.11 records for the pool of a failed capture until it is told to end,
    and refuses to record for this pool again.
    """
    recording, spoilt, handles = set[int](), set[int](), iter(range(10))

    @contextmanager
    def graph(*_: Any, pool: int, **__: Any) -> Iterator[None]:
        if recording or pool in spoilt:
            raise RuntimeError("already recording to mempool_id")
        recording.add(pool)
        spoilt.add(pool)
        yield  # an exception leaves the recording on
        recording.remove(pool)
        spoilt.remove(pool)

    def end_recording(device: int, pool: int) -> None:
        recording.remove(pool)

    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end_recording, raising=False)
    pool, calls = GraphPool(torch.device("cuda")), list[int]()

    def fails_in_capture() -> None:
        calls.append(1)
        if len(calls) % 3 == 0:
            raise RuntimeError("operation not permitted when stream is capturing")

    for _ in range(2):
        with pytest.raises(CaptureError, match="not permitted"):
            pool.capture(fails_in_capture)
        pool.capture(lambda: None)
        pool.capture(lambda: None)
    assert pool.summary.graphs == 4


class TestOnGpu:
    """Captures on a real device."""

    pytestmark = pytest.mark.gpu

    def test_other_threads_may_use_the_gpu_during_a_capture(self) -> None:
        device = torch.device("cuda")
        pool, values = GraphPool(device), torch.zeros(4, device=device)

        def function() -> None:
            values.add_(1)
            thread = threading.Thread(target=allocate)
            thread.start()
            thread.join()

        def allocate() -> None:
            torch.empty(1 << 26, device=device).fill_(1).cpu()

        captured = pool.capture(function)
        values.zero_()
        captured()
        assert values.tolist() == [1, 1, 1, 1]

    def test_a_capture_after_one_that_failed(self) -> None:
        device = torch.device("cuda")
        pool, values = GraphPool(device), torch.zeros(4, device=device)

        def add() -> None:
            values.add_(1)

        def add_and_wait() -> None:
            add()
            values.cpu()

        before = torch.cuda.current_stream()
        with pytest.raises(CaptureError):
            pool.capture(add_and_wait)
        assert torch.cuda.current_stream() == before
        captured = pool.capture(add)
        values.zero_()
        captured()
        assert values.tolist() == [1, 1, 1, 1]

    def test_other_graphs_may_run_between_the_steps_of_a_function(self) -> None:
        device = torch.device("cuda")
        pool, values = GraphPool(device), torch.zeros(1 << 20, device=device)
        others, reached = torch.zeros(1 << 20, device=device), list[bool]()

        def two_steps() -> None:
            more = values + 1
            step_boundary()
            values.copy_(2 * more)

        def change_others() -> None:
            others.copy_((others + 5) * 3)

        def run_other() -> None:
            reached.append(True)
            other()

        captured = pool.capture(two_steps, in_steps=True)
        other = pool.capture(change_others)
        values.zero_()
        with at_boundaries(paced(run_other, device)):
            captured()
        assert reached == [True]
        assert bool((values == 2).all())

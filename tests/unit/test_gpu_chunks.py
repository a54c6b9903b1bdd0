"""How the GPU report measures chunks where memory ends, which no CPU shows."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu import chunks
from benchmarks.gpu.chunks import Timed, passes, shortage
from benchmarks.gpu.peer import compared
from benchmarks.gpu.settings import Settings
from tests.support.golden import ROOT, TINY
from token2wav.engines.base import CacheUsage
from token2wav.model_config import ModelConfig


def model(pages: int) -> Any:
    """Of which only the size of the cache matters."""
    flow = SimpleNamespace(usage=lambda: CacheUsage(capacity=pages, page_bytes=90_112_000))
    return SimpleNamespace(config=ModelConfig.read(TINY), pipeline=SimpleNamespace(flow=flow))


def test_a_stream_takes_a_page_for_a_second_and_shares_its_prompt() -> None:
    # Of the prompt's 75 tokens 50 are in 2 shared pages; 25 and what was spoken are in pages of the stream's own.
    assert shortage(model(2 + 4 * 4), 4, 50 + 25) is None
    assert shortage(model(2 + 4 * 4 - 1), 4, 50 + 25) == "needs 18 pages of 90.1 MB, and the cache has 17"
    assert shortage(model(2 + 128 * 3), 128, 25) is None  # a stream takes 3 when it opens
    assert shortage(model(2 + 128 * 3 - 1), 128, 25) is not None
    assert shortage(model(0), 128, 25) is None  # an engine without a cache


def test_what_is_out_of_memory_leaves_shorter_histories(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[list[float]] = []

    def one_pass(_model: Any, streams: int, hop: int, histories: list[float]) -> Iterator[tuple[float, Timed]]:
        tried.append(list(histories))
        for spoken_s in histories:
            if spoken_s > 2:
                raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 1 GiB")
            yield spoken_s, (0.1, 0.2, 25)

    monkeypatch.setattr(chunks, "one_pass", one_pass)
    times, problems = passes(model(9), 4, 25, [0.0, 2.0, 10.0, 30.0], repeats=2)
    assert times == {spoken_s: [(0.1, 0.2, 25)] * 2 for spoken_s in (0.0, 2.0)}
    assert problems == dict.fromkeys((10.0, 30.0), "out of memory: CUDA out of memory. Tried to allocate 1 GiB")
    assert [len(histories) for histories in tried] == [4, 3, 2, 2, 2]


def test_rows_without_times_say_why() -> None:
    settings = Settings(ROOT, spoken_s=(2.0,), hops=(25, 100))
    rows = list(chunks.of_batch(model(1), 16, settings))
    assert [(row["spoken_s"], row["hop_tokens"]) for row in rows] == [(0.0, 25), (2.0, 25), (2.0, 100)]
    assert all(row["problem"].startswith("needs ") for row in rows)


def test_chunks_per_second() -> None:
    row = compared(64, (200.0, 190.0, 210.0), (50.0, 49.0, 51.0))
    assert (row["batch_per_s"], row["recompute_per_s"], row["ratio"]) == (320, 20, 16)
    assert compared(64, None, (50.0, 49.0, 51.0))["ratio"] is None
    assert compared(64, (200.0, 190.0, 210.0), None)["ratio"] is None

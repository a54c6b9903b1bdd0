"""Batches in buckets: a batch runs in the cheapest bucket, in parts, or in tensors of its own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch

from testkit.graph_pool import PoolWithoutGraphs
from testkit.packing import pad_batches
from testkit.utterances import a_voice, off, some_tokens
from tests.stages.rig import MEL, Parts, flow_mel
from token2wav import backends
from token2wav.config import LimitConfig
from token2wav.execution.buckets import BucketRunner
from token2wav.execution.captured_sizes import PAST_PAGES
from token2wav.execution.cuda_graphs import CaptureError, GraphPool
from token2wav.execution.step_boundary import at_boundaries, interruption, step_boundary


@dataclass(frozen=True, order=True)
class Room:
    """Rows of a batch, and numbers in a row."""

    rows: int
    width: int

    @property
    def cost(self) -> int:
        return self.rows * self.width

    def fits(self, other: Room) -> bool:
        return self.rows <= other.rows and self.width <= other.width

    @classmethod
    def of(cls, items: Sequence[torch.Tensor]) -> Room:
        return cls(len(items), max(len(item) for item in items))


class Sums:
    """Work that sums the numbers of every item."""

    def __init__(self, room: Room, log: list[Room]) -> None:
        self._room, self._log = room, log
        self._numbers, self._sums = (
            torch.full((room.rows, room.width), -1.0),
            torch.empty(room.rows),
        )

    def fill(self, items: Sequence[torch.Tensor]) -> None:
        assert Room.of(items).fits(self._room)
        self._numbers.zero_()
        for row, item in zip(self._numbers, items, strict=False):
            row[: len(item)] = item

    def compute(self) -> None:
        self._log.append(self._room)
        step_boundary()
        torch.sum(self._numbers, dim=1, out=self._sums)

    def take(self, items: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return list(self._sums[: len(items)].clone())


def used(
    widths: Sequence[int], buckets: Sequence[Room], pool: GraphPool | None = None
) -> list[Room]:
    """Runs items of some widths, checks the results, and returns the tensors that were used."""
    log: list[Room] = []
    runner = BucketRunner(Room.of, lambda room: Sums(room, log), buckets, pool)
    items = [torch.full((width,), float(number + 1)) for number, width in enumerate(widths)]
    assert [float(value) for value in runner.run(items)] == [float(item.sum()) for item in items]
    return log


BUCKETS = [Room(1, 8), Room(4, 4), Room(4, 8)]


def test_a_batch_runs_in_the_cheapest_bucket_that_it_fits() -> None:
    assert used([2, 4, 1], BUCKETS) == [Room(4, 4)]
    assert used([8], BUCKETS) == [Room(1, 8)]
    assert used([8, 1], BUCKETS) == [Room(4, 8)]


def test_a_batch_that_fits_no_bucket_is_split() -> None:
    assert used([4] * 5, BUCKETS) == [Room(4, 4), Room(1, 8)]
    # Neighbours that fit no bucket run together, up to the rows of the largest one.
    assert used([1, 9, 9, 1], BUCKETS) == [Room(1, 8), Room(2, 9), Room(1, 8)]
    assert used([9] * 5, BUCKETS) == [Room(4, 9), Room(1, 9)]


def test_without_buckets_a_batch_has_tensors_of_its_own() -> None:
    assert used([3, 9, 1], []) == [Room(3, 9)]
    assert used([], BUCKETS) == []


def test_an_interrupting_batch_uses_no_bucket_of_a_batch_that_it_can_interrupt() -> None:
    log: list[Room] = []
    whole, in_steps = Room(1, 2), Room(4, 4)
    make = partial(Sums, log=log)
    runner = BucketRunner(Room.of, make, [whole, in_steps], in_steps=[in_steps])
    long, short, sums = torch.full((4,), 5.0), torch.full((2,), 7.0), list[float]()

    def interrupt() -> None:
        with interruption():
            for items in ([long, short], [short]):
                sums.extend(float(value) for value in runner.run(items))

    with at_boundaries(interrupt):
        assert [float(value) for value in runner.run([torch.ones(4)] * 3)] == [4.0] * 3
        assert sums == [20.0, 14.0, 14.0]
        assert log == [in_steps, Room(1, 4), whole, whole]
        runner.run([short])
    assert len(sums) == 3, "a batch of another bucket has no boundary"


def test_runners_of_one_pool_compute_one_batch_at_a_time() -> None:
    """Graphs of all runners share memory, from one step of a batch to the next."""
    pool = PoolWithoutGraphs()
    size, items = Room(2, 2), [torch.ones(2)]
    first, second = (
        BucketRunner(Room.of, partial(Sums, log=[]), [size], pool, [size]) for _ in range(2)
    )
    other = threading.Thread(target=second.run, args=(items,))
    waits: list[bool] = []

    def boundary() -> None:
        other.start()
        other.join(0.2)
        waits.append(other.is_alive())

    with at_boundaries(boundary):
        first.run(items)
    other.join()
    assert waits == [True]


def test_a_bucket_that_cannot_be_captured_runs_eagerly(caplog: pytest.LogCaptureFixture) -> None:
    class OneGraph(PoolWithoutGraphs):
        def capture(self, function: Callable[[], None], *, in_steps: bool = False) -> Any:
            captured = super().capture(function)
            if self.captures > 1:
                raise CaptureError("not this one")
            return captured

    pool = OneGraph(3)
    with caplog.at_level(logging.WARNING):
        assert used([4] * 5, BUCKETS, pool)[-2:] == [Room(4, 4), Room(1, 8)]
    assert pool.captures == 2, "after the first failure no other capture is tried"
    [warning] = caplog.messages
    assert "Room(rows=4, width=4) cannot be captured" in warning
    assert "not this one" in warning


def test_a_batch_can_be_interrupted_between_its_parts() -> None:
    reached: list[int] = []
    runner = BucketRunner(Room.of, partial(Sums, log=[]), BUCKETS)
    with at_boundaries(lambda: reached.append(1)):
        assert len(runner.run([torch.ones(4)] * 5)) == 5
    assert reached == [1]


# The flow in buckets.

PROMPT_TOKENS = 750  # longest prompt that a server accepts


def test_tables_have_room_for_the_longest_stream_of_a_server(parts: Parts) -> None:
    tokens = PROMPT_TOKENS + LimitConfig().stream_tokens
    assert tokens // parts.config.block_tokens <= PAST_PAGES


def test_a_longer_history_runs_eagerly_and_is_reported_once(
    parts: Parts, caplog: pytest.LogCaptureFixture
) -> None:
    engine = pad_batches(parts.incremental(), backends.exported_buckets(4, (2,)))
    voice = a_voice(30)
    with caplog.at_level(logging.WARNING):
        flow_mel(parts, engine, [some_tokens(25)], voice)
        assert not caplog.messages
        for length in (130, 200):
            tokens = some_tokens(length)
            mel = flow_mel(parts, engine, [tokens], voice)
            assert off(mel, parts.whole(tokens, voice)) <= MEL
    [warning] = caplog.messages
    assert "past blocks, and batches are prepared for 2" in warning

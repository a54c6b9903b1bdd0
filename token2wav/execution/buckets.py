"""Runner of batches in buckets: tensors of prepared sizes, which CUDA graphs can use. `map_grouped`
groups items that can be computed together.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch

from token2wav.execution.cuda_graphs import CaptureError, GraphPool
from token2wav.execution.step_boundary import at_boundaries, in_interruption, step_boundary

log = logging.getLogger(__name__)

Item = TypeVar("Item")
WorkItem = TypeVar("WorkItem", contravariant=True)
Result = TypeVar("Result")


class Size(Protocol):
    """Size of a batch. Sizes are ordered and hashable."""

    @property
    def rows(self) -> int:
        """Rows of the batch. An item of a batch takes one or more rows."""

    @property
    def cost(self) -> int:
        """Batch cost, in arbitrary units."""

    def fits(self, other: Any) -> bool:
        """Returns whether a batch of this size can run in the tensors of another size."""

    def __lt__(self, other: Any) -> bool: ...


SizeT = TypeVar("SizeT", bound=Size)


@dataclass(frozen=True, order=True)
class PaddedSize:
    """Size of a batch of rows in which shorter items are padded."""

    length: int  # frames or tokens that a row has room for
    rows: int = 1

    def fits(self, other: PaddedSize) -> bool:
        return self.length <= other.length and self.rows <= other.rows

    @property
    def cost(self) -> int:
        return self.rows * self.length


class ExactSize(PaddedSize):
    """Size of a batch of rows that cannot be padded."""

    def fits(self, other: PaddedSize) -> bool:
        return self.length == other.length and self.rows <= other.rows


class Work(Protocol[WorkItem]):
    """Tensors of a batch, with the function that computes the batch.

    A CUDA graph can capture `compute`: it launches work on the device and never waits for that
    work, and its host code does not depend on the values in tensors.
    """

    def fill(self, items: Sequence[WorkItem]) -> None:
        """Copies items into the tensors."""

    def compute(self) -> None: ...

    def take(self, items: Sequence[WorkItem]) -> list[torch.Tensor]:
        """Returns the result of every item, in tensors that later batches do not overwrite."""


class BucketRunner(Generic[SizeT, Item]):
    """Runner that computes each batch in the cheapest bucket that the batch fits.

    A batch that fits no bucket is split. Items that alone fit no bucket run in tensors of their
    own, neighbours together. Without buckets all batches run in tensors of their own, and several
    threads may run batches at the same time. With buckets one batch runs at a time, of all runners
    with the same pool of CUDA graphs.

    A batch can be interrupted between its parts. It can be interrupted between its ODE steps if
    there are no buckets, or if its bucket is in `in_steps`. The interrupting batch, of the same
    thread, runs in a bucket that is not in `in_steps`, or in tensors of its own.

    If a bucket cannot be captured, this bucket and the remaining ones run eagerly.

    Args:
        size_of: returns the smallest size that holds the given items.
        graphs: pool of CUDA graphs that the buckets are captured in; None to run the buckets
            eagerly.
        in_steps: sizes of buckets that have one CUDA graph for each ODE step.
    """

    def __init__(
        self,
        size_of: Callable[[Sequence[Item]], SizeT],
        make: Callable[[SizeT], Work[Item]],
        sizes: Sequence[SizeT] = (),
        graphs: GraphPool | None = None,
        in_steps: Collection[SizeT] = (),
    ) -> None:
        self._size_of, self._make = size_of, make
        self._in_steps = frozenset(in_steps)
        # The tensors of a bucket hold one batch at a time.
        lock = graphs.lock if graphs else threading.RLock()
        self._lock = lock if sizes else nullcontext()
        self._most_rows = max((size.rows for size in sizes), default=None)
        self._buckets: dict[SizeT, tuple[Work[Item], Callable[[], None]]] = {}
        # The most costly size comes first, so that all later graphs reuse the memory of its graph.
        for size in sorted(sizes, key=lambda size: (size.cost, size), reverse=True):
            work = make(size)
            compute: Callable[[], None] = work.compute
            if graphs:
                try:
                    compute = graphs.capture(work.compute, in_steps=size in self._in_steps)
                except CaptureError as error:
                    log.warning(
                        "%s cannot be captured as a CUDA graph, so this size and all smaller ones "
                        "run slowly, without graphs: %s",
                        *(size, error),
                    )
                    graphs = None
            self._buckets[size] = work, compute

    def run(self, items: Sequence[Item]) -> list[torch.Tensor]:
        """Returns the result of every item. It does not depend on the other items."""
        with self._lock:
            results: list[torch.Tensor] = []
            for part, bucket in self._parts(items):
                if results:
                    step_boundary()
                results += self._run_together(part, bucket)
            return results

    def _run_together(self, items: Sequence[Item], bucket: SizeT | None) -> list[torch.Tensor]:
        if bucket is None:
            work = self._make(self._size_of(items))
            compute = work.compute
        else:
            work, compute = self._buckets[bucket]
        work.fill(items)
        if not self._buckets or bucket in self._in_steps:
            compute()
        else:
            with at_boundaries(None):
                compute()
        return work.take(items)

    def _parts(self, items: Sequence[Item]) -> list[tuple[Sequence[Item], SizeT | None]]:
        """Splits a batch into parts that each fit a bucket, or that have only items that fit none.

        A part of the second kind has no more rows than the largest bucket, unless it is one item.
        """
        if not items:
            return []
        bucket = self._bucket(items)
        if bucket is not None or self._most_rows is None:
            return [(items, bucket)]
        parts: list[tuple[list[Item], SizeT | None]] = []
        for item in items:
            bucket = self._bucket([item])
            if parts:
                before, before_bucket = parts[-1]
                longer = [*before, item]
                together = self._bucket(longer)
                fits_none = before_bucket is None and bucket is None
                if together is not None or (
                    fits_none and self._size_of(longer).rows <= self._most_rows
                ):
                    parts[-1] = longer, together
                    continue
            parts.append(([item], bucket))
        return [*parts]

    def _bucket(self, items: Sequence[Item]) -> SizeT | None:
        size, occupied = self._size_of(items), self._in_steps if in_interruption() else ()
        fitting = [
            bucket for bucket in self._buckets if size.fits(bucket) and bucket not in occupied
        ]
        return min(fitting, key=lambda bucket: bucket.cost, default=None)


def map_grouped(
    items: Sequence[Item],
    key: Callable[[Item], Hashable],
    run: Callable[[list[Item]], Sequence[Result]],
) -> list[Result]:
    """Computes the results of all items, in their order. `run` gets items with equal keys, and
    returns one result for each. Groups run in the order of their first items.
    """
    groups: dict[Hashable, list[int]] = {}
    for index, item in enumerate(items):
        groups.setdefault(key(item), []).append(index)
    results: dict[int, Result] = {}
    for members in groups.values():
        results.update(zip(members, run([items[index] for index in members]), strict=True))
    return [results[index] for index in range(len(items))]

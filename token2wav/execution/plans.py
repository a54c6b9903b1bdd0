"""Work on batches of known shapes, prepared before the first of them comes; on a GPU each is one launch then.

Batches that no prepared shape takes run in a shape of their own, of which the latest is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch

from token2wav.execution.cuda_graphs import GraphPool


class Shape(Protocol):
    """Room in a batch; shapes are ordered and can be keys.

    Attributes:
        streams: that there is room for.
    """

    @property
    def streams(self) -> int: ...

    def fits(self, other: Any) -> bool:
        """Whether a batch of this shape can run in another."""

    def volume(self) -> int:
        """Cost of a batch of it, in arbitrary units."""

    def __lt__(self, other: Any, /) -> bool: ...


ShapeT = TypeVar("ShapeT", bound=Shape)
BatchT = TypeVar("BatchT")
Item = TypeVar("Item")


@dataclass(eq=False)
class Plan(Generic[BatchT]):
    """One shape.

    Attributes:
        batch: its tensors, which stay where they are.
        run: works on them.
    """

    batch: BatchT
    run: Callable[[], None]


class Plans(Generic[ShapeT, BatchT]):
    """A plan for every shape. They hold one batch at a time each, and run one at a time.

    Args:
        make: makes that of a shape.
        shapes: to prepare, and to pad batches to.
        graphs: where these are captured as CUDA graphs; None for none.
    """

    def __init__(
        self, make: Callable[[ShapeT], Plan[BatchT]], shapes: Sequence[ShapeT] = (), graphs: GraphPool | None = None
    ) -> None:
        self._make = torch.inference_mode()(make)
        # The largest come first, so that all graphs find room in what the first one took.
        self._prepared = {shape: self._make(shape) for shape in sorted(shapes, reverse=True)}
        self._most_streams = max((shape.streams for shape in shapes), default=None)
        self._latest: tuple[ShapeT, Plan[BatchT]] | None = None
        if graphs is not None:
            for plan in self._prepared.values():
                plan.run = graphs.capture(plan.run)

    def parts(self, items: Sequence[Item]) -> Iterator[Sequence[Item]]:
        """A batch in parts that prepared shapes have room for, as far as that is a matter of streams."""
        most = self._most_streams or max(1, len(items))
        return (items[first : first + most] for first in range(0, len(items), most))

    def of(self, shape: ShapeT) -> Plan[BatchT]:
        """The cheapest that takes a batch of this shape."""
        if fitting := [other for other in self._prepared if shape.fits(other)]:
            return self._prepared[min(fitting, key=lambda other: other.volume())]
        if self._latest is None or self._latest[0] != shape:
            self._latest = None  # frees its tensors before the next are made
            self._latest = (shape, self._make(shape))
        return self._latest[1]

"""Boundaries between the ODE steps of a batch.

Code that computes a batch calls `step_boundary` after every ODE step except the last one. A worker
may compute an urgent chunk there, and the capture of CUDA graphs begins a new graph there. In all
other cases the call does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_handler: ContextVar[Callable[[], None] | None] = ContextVar("step_boundary", default=None)
_interrupts: ContextVar[bool] = ContextVar("interrupts", default=False)


def step_boundary() -> None:
    """Calls the function of `at_boundaries`, if this thread is in such a context. Work that
    interrupts a batch has no boundaries.
    """
    handler = _handler.get()
    if handler and not interrupts():
        handler()


@contextmanager
def at_boundaries(handler: Callable[[], None] | None) -> Iterator[None]:
    """Context in which this thread calls `handler` at every boundary; None for no call."""
    token = _handler.set(handler)
    try:
        yield
    finally:
        _handler.reset(token)


@contextmanager
def interruption() -> Iterator[None]:
    """Context of work that interrupts a batch of this thread."""
    token = _interrupts.set(True)
    try:
        yield
    finally:
        _interrupts.reset(token)


def interrupts() -> bool:
    """Returns whether this thread is in an `interruption`."""
    return _interrupts.get()


def paced(handler: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Returns a function that calls `handler` when the device has computed the batch up to the
    boundary before the present one.

    A GPU computes later than the host launches. The host therefore waits, but the launches between
    two boundaries stay in the queue, so that the GPU has work meanwhile.
    """
    if device.type != "cuda":
        return handler
    earlier: list[torch.cuda.Event] = []

    def wait_and_call() -> None:
        reached = torch.cuda.Event(blocking=True)
        reached.record()
        if earlier:
            earlier.pop().synchronize()
        earlier.append(reached)
        handler()

    return wait_and_call

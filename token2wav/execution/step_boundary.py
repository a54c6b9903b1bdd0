"""Boundaries in a batch: between its ODE steps, its parts and its stages.

Code that computes a batch calls `step_boundary` at each boundary. There, a worker may compute first
chunks of other streams, and the capture of CUDA graphs begins a new graph. In all other cases the
call does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_handler: ContextVar[Callable[[], None] | None] = ContextVar("step_boundary", default=None)
_interruption: ContextVar[bool] = ContextVar("interruption", default=False)


def step_boundary() -> None:
    """Calls the function of `at_boundaries`, if this thread is in such a context. Work that
    interrupts a batch has no boundaries.
    """
    handler = _handler.get()
    if handler and not in_interruption():
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
    token = _interruption.set(True)
    try:
        yield
    finally:
        _interruption.reset(token)


def in_interruption() -> bool:
    return _interruption.get()


def wait_for(device: torch.device) -> None:
    """Waits until the device has computed all launches of this thread."""
    if device.type == "cuda":
        launched = torch.cuda.Event(blocking=True)
        launched.record()
        launched.synchronize()


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

"""One kernel launch, and the times that it takes on one H200: the least time, and the time that is
expected. Both are computed from rates. A GPU has confirmed them for CosyVoice3 only
(`lab/tests/test_launch_times.py`).

The *least* time is that of an empty launch, of the bytes, or of the operations, whichever is
longest. A launch that reads all of its inputs once, at full speed, would reach it. The *expected*
time adds the empty launch to the others, and also counts the reads of the kernel itself: programs
(instances of a kernel) read the same rows again through the L2 cache, one multiprocessor reads at a
limited rate, and an iteration of a loop waits for its reads. `tiles.json` has these rates, because
the kernels choose their tiles by them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

# Rates of one H200, each per second. The first two were seen on such a machine. The others are of
# NVIDIA's data sheet (H200 SXM, without sparsity). Float64 is the rate of the matrix units.
RATES = {
    "bytes": 4.3e12,
    "float16": 790e12,
    "tf32": 494e12,
    "float32": 67e12,
    "float64": 67e12,
}
# Least time of a launch, in microseconds, inside a CUDA graph and outside. These are assumptions: a
# small kernel takes 2 to 3 us in a graph, and the host needs about 5 us to launch one.
CAPTURED_US, LOOSE_US = 2.5, 5.0


class Launch(NamedTuple):
    """One kernel launch.

    Attributes:
        name: name of the operator or of the kernel.
        bytes: bytes that it reads and writes, each tensor once.
        operations: floating-point operations of matrix products, convolutions and attention.
        kind: kind of the operations: a dtype, or `tf32`.
        inner_us: expected time of its reads through the L2 cache, and of reads that wait for one
            another, in microseconds.
        from_host: whether it copies from the memory of the host.
        attention: whether it computes attention.
        complete: whether all bytes and operations are known. They are unknown if a kernel reads
            pages or pieces by a table that was not copied from the host.
    """

    name: str
    bytes: float
    operations: float = 0.0
    kind: str = "float32"
    inner_us: float = 0.0
    from_host: bool = False
    attention: bool = False
    complete: bool = True


# Bytes and operations of a launch that reads tables depend on the contents of the tables, so they
# are computed for every replay.
Record = Launch | Callable[[], Launch]


def least_us(launch: Launch, *, captured: bool) -> float:
    """Returns the least time of a launch in microseconds, in a CUDA graph or outside."""
    return max(CAPTURED_US if captured else LOOSE_US, _streamed_us(launch))


def expected_us(launch: Launch, *, captured: bool) -> float:
    """Returns the expected time of a launch in microseconds.

    Outside of a CUDA graph the GPU computes a launch while the host prepares the next one.
    """
    computed = CAPTURED_US + max(_streamed_us(launch), launch.inner_us)
    return computed if captured else max(LOOSE_US, computed)


def _streamed_us(launch: Launch) -> float:
    seconds = launch.bytes / RATES["bytes"], launch.operations / RATES[launch.kind]
    return 1e6 * max(seconds)

"""Programmatic dependent launch: a kernel is launched while the kernel before it still runs, and
waits for its end before it reads results or writes. So the launches of short kernels overlap.

No GPU has shown a gain yet, so only a benchmark enables it. It needs compute capability 9.0.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

ENABLED = tl.constexpr(False)


def enable() -> None:
    """Enables dependent launches for this process, before it compiles any kernel."""
    global ENABLED
    ENABLED = tl.constexpr(True)


@triton.jit
def wait_for_earlier_kernel():
    """Lets the next kernel be launched, and waits for the end of the kernel before.

    Before it, a kernel may read only what the host wrote, such as tables.
    """
    if ENABLED:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


def launch_options() -> dict[str, Any]:
    """Returns the options for a launch of a kernel that calls `wait_for_earlier_kernel`."""
    return {"launch_pdl": True} if ENABLED.value else {}

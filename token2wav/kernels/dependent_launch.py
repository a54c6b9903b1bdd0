"""Programmatic dependent launch: a kernel is launched while the earlier kernel still runs.

The later kernel waits for the end of the earlier one before it reads its results, and before it
writes anything. So the launch of a short kernel overlaps with the kernel before it. This needs
compute capability 9.0. No GPU has shown a gain yet, so only section first_audio of the GPU report
enables it, to measure it.
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
    """Lets the GPU launch the next kernel, and waits for the end of the earlier kernel.

    Before this call, a kernel must not write, and may read only what the host wrote, such as the
    block table.
    """
    if ENABLED:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


def launch_options() -> dict[str, Any]:
    """Returns the options for a launch of a kernel that calls `wait_for_earlier_kernel`."""
    return {"launch_pdl": True} if ENABLED.value else {}

"""Gives back the shared memory of inputs that were far too large. Runs inside Triton's Python backend.

The backend copies every input into /dev/shm before anybody can look at it, in a pool that grows and never shrinks (seen
with servers up to 2.51): what a refused request of 100 MB has taken would stay taken until the server ends. Its pages
can be handed back to the system while the input is still ours; they are zeros afterwards, and the pool may use them
again.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
from typing import Any

from token2wav_server.protocol import VOICE_INPUTS, tensor

log = logging.getLogger(__name__)

_WORTHWHILE_BYTES = 1 << 20  # more than any request within the default limits has
_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def give_back(request: Any) -> None:
    """Empties large inputs of a request that nobody reads any more, and that was not answered yet."""
    for name in ("tokens", *VOICE_INPUTS):
        if (array := tensor(request, name)) is None or array.nbytes < _WORTHWHILE_BYTES:
            continue
        page, start = mmap.PAGESIZE, array.ctypes.data
        first, last = -(-start // page) * page, (start + array.nbytes) // page * page
        if _madvise(first, last - first, mmap.MADV_REMOVE):  # refused for any memory that is not shared
            log.warning(
                "%s: %d bytes of shared memory stay taken: %s", name, array.nbytes, os.strerror(ctypes.get_errno())
            )

"""Streams with different numbers of ODE steps, each number on an engine of its own.

Nothing that is kept of a stream can be used at other times of the ODE: keys, values and prompts belong to one number of
steps. So there is an engine for each; incremental ones share their pool of pages. Weights are the same tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from token2wav.engines.base import CacheUsage, FlowChunk, FlowEngine
from token2wav.engines.handles import HandleTable
from token2wav.groups import in_groups
from token2wav.voice import Voice


class SteppedFlowEngine:
    """A `FlowEngine` of several numbers of steps.

    Args:
        engines: by number of steps, the usual one first; what they hold in common, `usage` of any tells.
    """

    def __init__(self, engines: Mapping[int, FlowEngine]) -> None:
        self._engines = dict(engines)
        self._usual = next(iter(engines))
        self._streams: HandleTable[tuple[int, int]] = HandleTable()  # steps, handle in their engine

    def open(self, voice: Voice, steps: int = 0) -> int:
        steps = steps or self._usual
        return self._streams.add((steps, self._engines[steps].open(voice)))

    def advance(self, batch: Sequence[tuple[int, FlowChunk]]) -> list[torch.Tensor]:
        """See `FlowEngine.advance`. Chunks with as many steps are computed together."""
        return in_groups(batch, lambda each: self._streams[each[0]][0], self._advance_alike)

    def _advance_alike(self, batch: Sequence[tuple[int, FlowChunk]]) -> list[torch.Tensor]:
        steps, _ = self._streams[batch[0][0]]
        return self._engines[steps].advance([(self._streams[handle][1], chunk) for handle, chunk in batch])

    def close(self, handle: int) -> None:
        stream = self._streams.remove(handle)
        if stream is not None:
            steps, own = stream
            self._engines[steps].close(own)

    def usage(self) -> CacheUsage:
        """See `FlowEngine.usage`."""
        each = [engine.usage() for engine in self._engines.values()]
        return CacheUsage(
            capacity=each[0].capacity,
            used=each[0].used,
            shared=sum(usage.shared for usage in each),
            page_bytes=each[0].page_bytes,
            prompt_hits=sum(usage.prompt_hits for usage in each),
            prompt_misses=sum(usage.prompt_misses for usage in each),
        )

    def whole(self, tokens: NDArray[np.int32], voice: Voice, *, streaming: bool, steps: int = 0) -> torch.Tensor:
        """See `FlowEngine.whole`."""
        return self._engines[steps or self._usual].whole(tokens, voice, streaming=streaming)

    @property
    def open_streams(self) -> int:
        return sum(engine.open_streams for engine in self._engines.values())

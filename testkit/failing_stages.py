"""Faults of the stages: chosen calls fail at random."""

from __future__ import annotations

import threading
from collections.abc import Callable
from random import Random
from typing import Any

from token2wav.stages.cached_flow import CachedFlow
from token2wav.stages.waveform import WaveformStage

FAULT = "an injected fault"
FAULTS, FAULTS_OF_OPENING = 0.01, 0.05  # shares of failing calls; calls of opening are rarer


class Faults:
    """Faults of the stages: chosen calls fail at random while faults are armed."""

    def __init__(self, random: Random) -> None:
        self.armed = True
        self.injected = 0
        self._random = random
        self._lock = threading.Lock()

    def inject_into_stages(self, flow: CachedFlow, vocoder: WaveformStage) -> None:
        self.inject(flow._encoder, "encode")
        self.inject(flow._encoder, "speaker", share=FAULTS_OF_OPENING)
        self.inject(flow.states, "copy", share=FAULTS_OF_OPENING)
        self.inject(flow._recompute, "advance")
        self.inject(vocoder._pieces, "run")
        self.inject(vocoder.store, "read", "write")
        self.inject(vocoder.store, "take", share=FAULTS_OF_OPENING)
        for runner in flow._runners.values():
            self.inject(runner, "run")

    def inject(self, owner: Any, *names: str, share: float = FAULTS) -> None:
        """Makes a share of the calls of an object's methods fail before they have any effect."""
        for name in names:
            setattr(owner, name, self._failing(getattr(owner, name), share))

    def _failing(self, call: Callable[..., Any], share: float) -> Callable[..., Any]:
        def failing(*arguments: Any, **options: Any) -> Any:
            with self._lock:
                fails = self.armed and self._random.random() < share
                self.injected += fails
            if fails:
                raise RuntimeError(FAULT)
            return call(*arguments, **options)

        return failing

"""Padded batches with torch for the arithmetic, as on a GPU without exported graphs or kernels."""

from __future__ import annotations

from collections.abc import Sequence

from token2wav.execution.batch import BatchSize
from token2wav.execution.runner import FlowRunner
from token2wav.exported.step import ExportedStep
from token2wav.stages.cached_flow import CachedFlow


def pad_batches(
    engine: CachedFlow, buckets: Sequence[BatchSize] = (), in_steps: Sequence[BatchSize] = ()
) -> CachedFlow:
    """Makes an engine run the step that is exported, on torch, in buckets if there are any."""
    for steps, runner in engine._runners.items():
        step = ExportedStep(runner.step.estimator, runner.step.tables, runner.step.cache)
        engine._runners[steps] = FlowRunner(step, engine.states, buckets, in_steps=in_steps)
    return engine

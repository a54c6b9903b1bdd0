"""Windows in batches of fixed size, as CUDA graphs compute them, against windows of one shape."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from testkit.captured_code import NothingCopied, OnDevice
from testkit.graph_pool import PoolWithoutGraphs
from testkit.utterances import off
from tests.families.streamflow.rig import (
    BLOCK,
    MEL,
    Parts,
    a_voice,
    chunks_of,
    flow_config,
    some_tokens,
    spoken,
)
from token2wav.execution.buckets import PaddedSize
from token2wav.execution.cuda_graphs import GraphPool, graphs_enabled
from token2wav.execution.device import keep_arithmetic_exact
from token2wav.families.streamflow import flow
from token2wav.families.streamflow.solver import GuidedSolver
from token2wav.families.streamflow.window_batch import WindowBatch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Libraries round products of other shapes differently, on a GPU more than on a CPU.
CLOSE = 10 * MEL if DEVICE.type == "cuda" else MEL
# on a GPU, the tests belong to the tests that the GPU must pass
pytestmark = [pytest.mark.gpu] if DEVICE.type == "cuda" else []


def a_pool() -> Any:
    return GraphPool(DEVICE) if graphs_enabled(DEVICE) else PoolWithoutGraphs(runs=3)


def test_streams_in_graphs_equal_eager_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """First, inner and last windows of any length run in one batch. Five streams need two batches,
    and unused rows keep the windows of earlier batches.
    """
    monkeypatch.setattr(flow, "CAPTURED_WINDOWS", (1, 4))
    keep_arithmetic_exact(DEVICE)
    parts = Parts.random(flow_config(), str(DEVICE))
    hop = 2 * BLOCK
    stops = [(12, 24, 36), (12, 24), (24, 36, 39), (1,), (hop, 2 * hop, 3 * hop + BLOCK - 1)]
    utterances = [chunks_of(some_tokens(ends[-1], seed), ends) for seed, ends in enumerate(stops)]
    pool = a_pool()
    engine = parts.engine(pool)
    assert DEVICE.type == "cuda" or pool.captures == 2
    expected = spoken(parts.engine(), utterances, range(len(stops)))
    for voices in (range(len(stops)), [3], [0, 2]):
        mels = spoken(engine, [utterances[voice] for voice in voices], voices)
        for voice, mel in zip(voices, mels, strict=True):
            assert off(mel.cpu().numpy(), expected[voice].cpu().numpy()) <= CLOSE


def test_a_window_that_fits_no_graph_runs_eagerly() -> None:
    keep_arithmetic_exact(DEVICE)
    parts = Parts.random(flow_config(), str(DEVICE))
    tokens, voice = some_tokens(45), a_voice()
    whole = parts.engine(a_pool()).whole(tokens, voice, streaming=True)
    expected = parts.engine().whole(tokens, voice, streaming=True)
    assert off(whole.cpu().numpy(), expected.cpu().numpy()) <= CLOSE


def test_captured_code_never_synchronizes() -> None:
    parts = Parts.random(flow_config(steps=2), "meta")
    solver = GuidedSolver(parts.flow.estimator, parts.solver.tables, parts.flow.unconditional())
    batch = WindowBatch(PaddedSize(5 * BLOCK, 2), parts.flow, parts.noise, solver)
    with NothingCopied(), OnDevice():
        batch.compute()

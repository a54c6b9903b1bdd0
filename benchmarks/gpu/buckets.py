"""Padded batches of every prepared shape against the unpadded solver in float32, on one device.

A shape is filled to the last frame, then in part: a stream less where there is room for it, chunks and pasts of
different length, a last block that is not full. Keys and values of the past are random. Streams share most of its
pages, to save memory, and each has some that others lack, so that a mix-up would show: the order alone would not, for
attention is a sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.settings import Settings
from token2wav.artifacts import Precision
from token2wav.checkpoint import load_flow
from token2wav.engines.choice import Graphs, chunk_solver
from token2wav.engines.cuda_graphs import graphs_enabled
from token2wav.engines.device import keep_arithmetic_exact
from token2wav.engines.packed import Batch, BatchShape, PackedBatch, likely_shapes
from token2wav.engines.packed_solver import PackedChunkSolver, Steps
from token2wav.engines.torch_engine import TorchChunkSolver
from token2wav.engines.torch_steps import TorchSteps
from token2wav.engines.work import ChunkSolver, ChunkWork, Past
from token2wav.flow.cache import CacheLayout, KeyValueStore
from token2wav.flow.dit import CONTEXT_FRAMES
from token2wav.flow.flow import Flow
from token2wav.flow.solver import EulerSolver, OdeTables
from token2wav.model_config import ModelConfig

# Of the largest error of the root mean square, relative to the spread: those of `token2wav-export verify`, as ratios.
BOUNDS: dict[str, float] = {"float32": 10 ** (-90 / 20), "float16": 10 ** (-45 / 20)}
HOP_BLOCKS = (1, 2, 4)
_MISSING_FRAMES = 13  # of a last block that is not full
_PAGES_APART = 4  # from the first page of a stream's past to that of the next one's


@dataclass(frozen=True)
class Side:
    """One of the two that are compared."""

    flow: Flow
    solver: EulerSolver
    store: KeyValueStore

    @property
    def tables(self) -> OdeTables:
        return self.solver.tables


def check_buckets(
    folder: Path, settings: Settings, device: torch.device, precision: Precision
) -> Iterator[dict[str, Any]]:
    """A row for every shape and filling: relative errors of mel, contexts, and stored keys and values.

    Args:
        folder: of the model.
        settings: how far the shapes reach.
        device: of both sides.
        precision: of the padded side.
    """
    config = ModelConfig.read(folder)
    shapes = likely_shapes(HOP_BLOCKS, settings.bucket_past, settings.bucket_streams)
    past = past_pages(shapes)
    pages = past + max(shape.streams * shape.new_blocks for shape in shapes)
    keep_arithmetic_exact(device)  # as engines do
    exact, padded = (side(folder, config, kind, pages, device) for kind in ("float32", precision))
    fill_alike(exact.store, padded.store, device)
    reference = TorchChunkSolver(exact.flow.estimator, exact.tables, exact.store, -1)
    candidate = padding_solver(padded, shapes, device)
    for shape in shapes:
        for filling, works in fillings(shape, config, past, device):
            errors = compare(reference, candidate, works, exact.store, padded.store)
            beyond = [f"{name} {value:.1e}" for name, value in errors.items() if not value <= BOUNDS[precision]]
            yield {
                "shape": [shape.streams, shape.new_blocks, shape.past_blocks],
                "precision": precision,
                "filling": filling,
                **errors,
                "bound": BOUNDS[precision],
                "problem": f"beyond {BOUNDS[precision]:.1e}: {', '.join(beyond)}" if beyond else None,
            }


def padding_solver(side: Side, shapes: Sequence[BatchShape], device: torch.device) -> ChunkSolver:
    """What serves on this device with torch, or, on a CPU, which pads nothing, the nearest to it that runs there."""
    flow = side.flow
    if graphs_enabled(device):
        longest_hop = max(HOP_BLOCKS) * flow.config.block_tokens
        return chunk_solver(Graphs("torch"), flow, side.solver, side.store, -1, longest_hop)

    def prepare(shape: BatchShape) -> tuple[Batch, Steps]:
        batch = PackedBatch(shape, flow.config.estimator, side.store, -1, device)
        return batch, TorchSteps(batch, flow.estimator, side.tables, side.store)

    return PackedChunkSolver(prepare, side.tables, shapes=shapes)


def past_pages(shapes: Sequence[BatchShape]) -> int:
    """That streams of all shapes read from; behind them come those that they write to."""
    return max(shape.past_blocks + _PAGES_APART * (shape.streams - 1) for shape in shapes)


def side(folder: Path, config: ModelConfig, precision: Precision, pages: int, device: torch.device) -> Side:
    """Weights, tables and pages of one precision."""
    flow = load_flow(folder, config).to(device)
    steps = config.flow.n_timesteps
    solver = EulerSolver(flow.estimator, steps, config.flow.inference_cfg_rate, config.schedule)
    flow.estimator.drop_time_weights()
    if precision == "float16":
        flow.estimator.halve()
    return Side(flow, solver, KeyValueStore(CacheLayout.of(config.flow, precision), pages, device))


def fill_alike(one: KeyValueStore, other: KeyValueStore, device: torch.device) -> None:
    """The same random keys and values in both, as float16 holds them."""
    layout = one.layout
    generator = torch.Generator(device).manual_seed(0)
    shape = (layout.layers, 2, layout.branches, 1, layout.block_frames, layout.heads, layout.dim_head)
    for step in range(layout.steps):
        for page in range(one.pages):
            values = torch.randn(shape, generator=generator, device=device).half()
            for store in (one, other):
                store.scatter(step, torch.tensor([page], device=device), values)


def fillings(
    shape: BatchShape, config: ModelConfig, first_new: int, device: torch.device
) -> Iterator[tuple[str, list[ChunkWork]]]:
    """Batches that run in a shape: `full`, and `part`. They write to pages from `first_new` on."""
    rest = 1 if shape.streams > 2 else 0  # of 2 streams, one alone would run in a smaller shape
    size = config.flow.estimator.static_chunk_size
    for filling in ("full", "part"):
        generator = torch.Generator(device).manual_seed(1)
        works = []
        for index in range(shape.streams - (rest if filling == "part" else 0)):
            new, past, frames = shape.new_blocks, shape.past_blocks, shape.new_blocks * size
            if filling == "part":
                # The first one makes the shape necessary, the others are shorter.
                new, past = (new, past - 1) if index == 0 else (1, past // 2)
                frames = new * size - (_MISSING_FRAMES if index == 0 else 0)
            pages = [_PAGES_APART * index + block for block in range(past)]
            own = [first_new + index * shape.new_blocks + block for block in range(new)]
            works.append(_work(config, frames, Past(list(range(past)), pages, 0), own, generator, device))
        yield filling, works


def _work(
    config: ModelConfig, frames: int, past: Past, new: list[int], generator: torch.Generator, device: torch.device
) -> ChunkWork:
    estimator, layout = config.flow.estimator, CacheLayout.of(config.flow)
    noise, mu, cond = (torch.randn(estimator.mel_dim, frames, generator=generator, device=device) for _ in range(3))
    contexts = (layout.steps, 2, layout.branches, estimator.dim, CONTEXT_FRAMES)
    return ChunkWork(
        noise,
        mu,
        cond,
        torch.randn(estimator.spk_dim, generator=generator, device=device),
        len(past.blocks) * estimator.static_chunk_size,
        past,
        new,
        torch.randn(contexts, generator=generator, device=device),
    )


def compare(
    reference: ChunkSolver,
    candidate: ChunkSolver,
    works: list[ChunkWork],
    exact: KeyValueStore,
    padded: KeyValueStore,
) -> dict[str, float]:
    """Runs the same works on both; relative errors of what they return, and of what they leave behind."""
    copies = [replace(work, contexts=work.contexts.clone()) for work in works]
    mels, others = reference.solve(works), candidate.solve(copies)
    errors = {
        "mel": worst(zip(others, mels, strict=True)),
        "contexts": worst((copy.contexts, work.contexts) for work, copy in zip(works, copies, strict=True)),
    }
    # The last block may end in padding, which is nobody's business.
    whole = [page for work in works for page in work.new[: work.frames // exact.layout.block_frames]]
    if whole:
        errors["stored"] = relative(*(stored(store, whole, mels[0].device) for store in (padded, exact)))
    return errors


def stored(store: KeyValueStore, pages: list[int], device: torch.device) -> torch.Tensor:
    """Keys and values of pages at the last step, float32."""
    layout, step = store.layout, store.layout.steps - 1
    shape = (layout.layers, 2, layout.branches, len(pages), layout.block_frames, layout.heads, layout.dim_head)
    out = torch.empty(shape, device=device)
    store.gather(step, torch.tensor(pages, device=device), out)
    return out


def worst(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """The largest relative error of (value, expected); NaN if there is one."""
    return float(np.max([relative(value, expected) for value, expected in pairs]))


def relative(value: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square of the difference over the spread of what is expected; NaN stays NaN."""
    return float((value.float() - expected.float()).square().mean().sqrt() / expected.float().std())

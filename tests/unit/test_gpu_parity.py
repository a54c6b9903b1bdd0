"""The checks of captured shapes and of batches: they pass what is right, fill what they say, and see a mix-up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import batches
from benchmarks.gpu.batches import Plan, Spoken, check_batches, plan, speak
from benchmarks.gpu.buckets import BOUNDS, HOP_BLOCKS, check_buckets, compare, fill_alike, fillings, past_pages, side
from benchmarks.gpu.settings import Settings, rehearsal
from tests.support.golden import TINY
from token2wav import StreamConfig, Token2Wav
from token2wav.engines import choice
from token2wav.engines.packed import BatchShape, likely_shapes
from token2wav.engines.torch_engine import TorchChunkSolver
from token2wav.engines.work import ChunkSolver, ChunkWork
from token2wav.model_config import ModelConfig

CPU = torch.device("cpu")
SHAPE = BatchShape(streams=4, new_blocks=2, past_blocks=4)


def test_the_shapes_are_those_that_the_engine_captures() -> None:
    settings = Settings(Path())
    assert (settings.bucket_past, settings.bucket_streams) == (choice._CAPTURED_PAST, choice._CAPTURED_STREAMS)
    flow = ModelConfig.read(TINY).flow
    assert max(HOP_BLOCKS) * flow.block_tokens == flow.hops(StreamConfig())[1]


def test_every_shape_is_filled_in_full_and_in_part() -> None:
    config = ModelConfig.read(TINY)
    shapes = likely_shapes(HOP_BLOCKS, 16, 4)
    for shape in shapes:
        for filling, works in fillings(shape, config, past_pages(shapes), CPU):
            needed = BatchShape.of(works)
            assert min((other for other in shapes if needed.fits(other)), key=BatchShape.volume) == shape
            assert (needed == shape) == (filling == "full")
            assert all(work.frames == 50 * shape.new_blocks for work in works) == (filling == "full")
            pages = [page for work in works for page in work.new]
            assert len(set(pages)) == len(pages)
            assert min(pages) == past_pages(shapes)
            assert max((page for work in works for page in work.past.pages), default=0) < min(pages)


def test_padded_batches_are_within_the_bound(tmp_path: Path) -> None:
    settings = replace(rehearsal(tmp_path), bucket_past=4, bucket_streams=1)
    rows = list(check_buckets(TINY, settings, CPU, "float32"))
    assert [row["shape"] for row in rows[::2]] == [[1, 1, 4], [1, 2, 4], [1, 4, 4]]
    assert all(row["problem"] is None for row in rows)
    assert all(row["mel"] < 1e-6 for row in rows)


class _Wrong:
    """A solver that mixes up its batch."""

    def __init__(self, solver: ChunkSolver, spoil: str) -> None:
        self._solver = solver
        self._spoil = spoil

    def solve(self, works: Sequence[ChunkWork]) -> list[torch.Tensor]:
        if self._spoil == "past":
            pages = [work.past.pages for work in works]
            past = [replace(work.past, pages=other) for work, other in zip(works, pages[1:] + pages[:1], strict=True)]
            return self._solver.solve([replace(work, past=own) for work, own in zip(works, past, strict=True)])
        mels = self._solver.solve(works)
        if self._spoil == "contexts":
            works[0].contexts[0, 0, 0, 0, 0] += 1e3
        return [torch.full_like(mel, torch.nan) for mel in mels] if self._spoil == "nan" else mels


@pytest.mark.parametrize("spoil", ["", "past", "contexts", "nan"])
def test_a_mix_up_is_beyond_the_bound(spoil: str) -> None:
    config = ModelConfig.read(TINY)
    with torch.inference_mode():
        one, other = (side(TINY, config, "float32", past_pages([SHAPE]) + 8, CPU) for _ in range(2))
        fill_alike(one.store, other.store, CPU)
        [(_, works), _] = fillings(SHAPE, config, past_pages([SHAPE]), CPU)
        solvers = (TorchChunkSolver(each.flow.estimator, each.tables, each.store, -1) for each in (one, other))
        reference, candidate = solvers
        errors = compare(reference, _Wrong(candidate, spoil), works, one.store, other.store)
    within = [value <= BOUNDS["float32"] for value in errors.values()]
    assert all(within) == (not spoil)


def test_utterances_of_a_batch_differ_in_everything_but_their_number_of_chunks() -> None:
    plans = [plan(ModelConfig.read(TINY), index) for index in range(9)]
    assert {len(each.chunks) for each in plans} == {5}
    assert [chunk.stop - chunk.start for chunk in plans[0].chunks] == [50, 25, 50, 100, 7]
    assert [chunk.stop - chunk.start for chunk in plans[1].chunks] == [50, 50, 100, 25, 7]
    assert [chunk.stop - chunk.start for chunk in plans[2].chunks] == [25, 100, 25, 50, 7]
    assert [each.prompt_frames for each in plans[:3]] == [50, 10, 0]


def test_a_batch_that_is_wrong_is_beyond_the_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = replace(rehearsal(tmp_path), parity_batches=(2,))
    [row] = check_batches(TINY, settings)
    assert row["problem"] is None
    assert row["mel"] < 1e-6

    def swapped(model: Token2Wav, plans: Sequence[Plan], given: Sequence[Spoken] | None = None) -> list[Spoken]:
        spoken = speak(model, plans, given)
        return spoken if given is None else [replace(each, audio=-each.audio) for each in spoken]

    monkeypatch.setattr(batches, "speak", swapped)
    [row] = check_batches(TINY, settings)
    assert row["problem"].startswith("audio ")

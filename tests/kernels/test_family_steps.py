"""Estimators on the kernels of their families equal their eager results in every batch.

Interpreted kernels are slow, so blocks have 4 frames, networks few layers, and the ODE two steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch

from testkit.captured_code import NothingCopied, OnDevice
from token2wav.cache.paged_kv_cache import BRANCHES, CacheLayout, PagedKVCache, Storage
from token2wav.cache.states import StateStore
from token2wav.execution.batch import Batch, BatchSize, ChunkInput
from token2wav.execution.block_table import ChunkPlace
from token2wav.execution.cuda_graphs import GraphPool, graphs_enabled
from token2wav.execution.runner import ESTIMATOR, FlowRunner
from token2wav.execution.step import StepFunction, TorchStep
from token2wav.exported.step import ExportedStep
from token2wav.families.cosyvoice2.kernel_step import CosyVoice2KernelStep
from token2wav.families.cosyvoice3.kernel_step import CosyVoice3KernelStep
from token2wav.families.stepaudio2.kernel_step import StepAudio2KernelStep
from token2wav.kernels import attention
from token2wav.layers.streaming import StateSpec
from token2wav.networks import dit
from token2wav.networks.dit import DiT
from token2wav.networks.estimator import Estimator
from token2wav.networks.ode import OdeTables
from token2wav.networks.step_audio_dit import StepAudioDiT
from token2wav.networks.unet import UNet
from token2wav.published.sizes import EstimatorConfig, UNetConfig

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BANDS, BLOCK, STEPS, PAGES = 8, 4, 3, 8
UNET = UNetConfig(channels=16, heads=2, dim_head=16, mid_blocks=1, layers=1)
DIT = EstimatorConfig(32, 2, 2, 16, 2, BANDS, BANDS, BANDS, BANDS, BLOCK)
MAKERS: dict[str, Callable[[], Estimator]] = {
    "dit": lambda: DiT(DIT),
    "dit with a skip": lambda: DiT(dataclasses.replace(DIT, long_skip_connection=True)),
    "unet": lambda: UNet(BANDS, UNET, BLOCK),
    "mean flow": lambda: UNet(BANDS, UNET, BLOCK, mean_flow=True),
    "step audio": lambda: StepAudioDiT(BANDS, 32, 2, 16, layers=2),
}
STEP_MAKERS: dict[str, Callable[[Any, OdeTables, PagedKVCache], StepFunction]] = {
    "dit": CosyVoice3KernelStep,
    "dit with a skip": CosyVoice3KernelStep,
    "unet": CosyVoice2KernelStep,
    "mean flow": CosyVoice2KernelStep,
    "step audio": StepAudio2KernelStep,
}


@pytest.fixture(autouse=True)
def few_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reduces the groups of the position convolutions from 16 to 2, because each is a program."""
    monkeypatch.setattr(dit, "_CONV_GROUPS", 2)


def an_estimator(name: str, device: torch.device = DEVICE) -> Estimator:
    torch.manual_seed(0)
    estimator = MAKERS[name]().eval().requires_grad_(False).to(device)
    for weight_name, weight in estimator.named_parameters():
        if ".to_" in weight_name:
            weight.data.mul_(3)  # makes errors of the attention mask visible
    return estimator


def a_layout(estimator: Estimator, storage: Storage, guidance: float) -> CacheLayout:
    layers, heads, dim_head = estimator.attention
    branches = BRANCHES if guidance else 1
    return CacheLayout(
        STEPS,
        layers,
        heads,
        dim_head,
        BLOCK,
        storage,
        branches,
        BANDS,
        (branches, estimator.state_width),
    )


def batches(estimator: Estimator, slots: list[int]) -> list[list[ChunkInput]]:
    """Returns two batches of two streams.

    The first batch has a prompt that may be joined and lack frames. The second batch has a window.
    """
    random = torch.Generator().manual_seed(1)

    def chunk(
        stream: int, frames: int, start: int, tables: list[list[int]], *, prompt: bool = False
    ) -> ChunkInput:
        noise, mu, cond = (
            torch.randn(BANDS, frames, generator=random).to(DEVICE) for _ in range(3)
        )
        speaker, padded = torch.randn(BANDS, generator=random).to(DEVICE), estimator.masks_padding
        place = ChunkPlace(
            start,
            frames,
            tables,
            slots[stream],
            prompt_padding=3 if padded and not stream else 0,
            full_prompt_attention=prompt and padded,
        )
        return ChunkInput(noise, mu, cond, speaker, place)

    return [
        [
            chunk(0, 2 * BLOCK, 0, [[4], [4, 2]], prompt=True),
            chunk(1, 2 * BLOCK + 1, 0, [[0], [0, 1], [0, 1, 3]]),
        ],
        [
            chunk(1, BLOCK, 2 * BLOCK, [[1, 3]]),
            chunk(0, 2 * BLOCK - 2, 2 * BLOCK, [[4, 2, 6], [4, 6, 7]]),
        ],
    ]


def a_store(estimator: Estimator, layout: CacheLayout, device: torch.device = DEVICE) -> StateStore:
    """Returns a store of the estimator's states."""
    spec = StateSpec("estimator", (layout.steps, *layout.conv_state), torch.float32)
    return StateStore({ESTIMATOR: {estimator: spec}}, device)


Compute = Callable[[Sequence[ChunkInput]], Sequence[torch.Tensor]]


def spoken(compute: Compute, estimator: Estimator, store: StateStore) -> list[torch.Tensor]:
    """Returns the mels of all chunks, and the final states of the convolutions of both streams."""
    slots = [store.take() for _ in range(2)]
    mels = [mel for batch in batches(estimator, slots) for mel in compute(batch)]
    rows = store.rows(ESTIMATOR, 2)
    store.read(torch.tensor(slots, device=DEVICE), rows)
    return [*mels, *rows.views.values()]


def run_alone(
    step: StepFunction, store: StateStore, chunks: Sequence[ChunkInput]
) -> list[torch.Tensor]:
    """Computes each chunk in a batch of its own, in which everything but the chunk is NaN."""
    mels = []
    for chunk in chunks:
        rows = len(chunk.place.tables) + 1
        size = BatchSize(rows, 1, PAGES)
        batch = Batch(size, step.cache.layout, store, store.rows(ESTIMATOR, rows), step.integrate)
        frames = [batch.x, batch.mu, batch.cond]
        for tensor in (*frames, batch.speakers, batch.conv_state):
            tensor.fill_(torch.nan)
        batch.fill([chunk])
        for row, block in enumerate(batch.blocks):
            for tensor in frames:
                tensor[row, :, block.valid :] = torch.nan
        batch.compute()
        mels += batch.take([chunk])
    return mels


@pytest.mark.parametrize(
    # tolerance of mels, with a spread of about 1, and of states, with values up to 10
    ("name", "storage", "guidance", "alone", "close"),
    [
        ("dit", "float32", 0.7, False, 1e-5),
        ("dit with a skip", "float32", 0.0, False, 1e-5),
        ("dit", "float16", 0.0, False, 5e-3),
        pytest.param("dit", "float8", 0.7, False, 2e-3, marks=pytest.mark.slow),
        ("unet", "float32", 0.7, False, 1e-5),
        pytest.param("unet", "float32", 0.7, True, 1e-5, marks=pytest.mark.slow),
        ("step audio", "float32", 0.7, False, 1e-5),
        ("step audio", "float32", 0.7, True, 1e-5),
        ("unet", "float16", 0.0, False, 2e-2),
        ("step audio", "float16", 0.7, False, 2e-2),
    ],
)
def test_streams_equal_eager_streams(
    name: str, storage: Storage, guidance: float, alone: bool, close: float
) -> None:
    """Checks mels and states of several chunks in one batch, and of chunks alone.

    In float32 the ODE has two steps, whose stores are not next to each other.
    """
    stored_steps = [0, STEPS - 1] if storage == "float32" else [STEPS - 1]
    runs = []
    for kernels in (True, False):
        estimator = an_estimator(name)
        tables = OdeTables.of(estimator, len(stored_steps), guidance)
        tables = dataclasses.replace(tables, stored_steps=stored_steps)
        if storage == "float16":
            estimator.halve()
        cache = PagedKVCache(a_layout(estimator, storage, guidance), PAGES, DEVICE)
        store = a_store(estimator, cache.layout)
        step = (STEP_MAKERS[name] if kernels else TorchStep)(estimator, tables, cache)
        pool = GraphPool(DEVICE) if graphs_enabled(DEVICE) and kernels else None
        runner = FlowRunner(step, store, [BatchSize(6, 1, PAGES)] * kernels, pool)
        compute = partial(run_alone, step, store) if kernels and alone else runner.run
        runs.append(spoken(compute, estimator, store))
    for one, other in zip(*runs, strict=True):
        assert one.shape == other.shape
        torch.testing.assert_close(one, other, atol=close, rtol=close)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("kernels", [True, False])
def test_captured_code_never_synchronizes(
    name: str, kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    meta = torch.device("meta")
    monkeypatch.setattr(
        type(attention._paged_attention),
        "__getitem__",
        lambda kernel, grid: lambda *arguments, **options: None,
    )
    estimator = an_estimator(name, meta)
    parts = (
        estimator,
        OdeTables.of(estimator, 1, 0.7),
        PagedKVCache(a_layout(estimator, "float32", 0.7), 1, meta),
    )
    size = BatchSize(4, 1, PAGES) if kernels else BatchSize(2, 2, PAGES)
    layout = parts[2].layout
    step = STEP_MAKERS[name](*parts) if kernels else ExportedStep(*parts)
    store = a_store(estimator, layout, meta)
    batch = Batch(size, layout, store, store.rows(ESTIMATOR, size.rows), step.integrate)
    with NothingCopied(), OnDevice():
        step.integrate(batch)


@pytest.mark.parametrize("name", ["dit", "unet", "step audio"])
def test_runs_at_load_write_to_no_page(name: str) -> None:
    """Graphs run at load with tables of zeros, which hold no block."""
    estimator = an_estimator(name)
    cache = PagedKVCache(a_layout(estimator, "float32", 0.7), 2, DEVICE)
    store = a_store(estimator, cache.layout)
    tensors = [cache._data, *store._all_tables()]
    for tensor in tensors:
        tensor.fill_(torch.nan)
    with torch.inference_mode():
        step = STEP_MAKERS[name](estimator, OdeTables.of(estimator, 1, 0.7), cache)
        runner = FlowRunner(step, store, [BatchSize(2, 1, 3)])
        [(batch, compute)] = runner._batches._buckets.values()
        compute()
    assert all(tensor.isnan().all() for tensor in tensors)
    assert batch.x.isfinite().all()  # type: ignore[attr-defined]

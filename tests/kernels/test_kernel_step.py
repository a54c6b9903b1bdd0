"""Streams on kernels that read pages directly equal streams on torch, in any mixture of a batch.

Interpreted kernels are slow, so the model here is smaller than tiny: two layers, blocks of 8
frames, two ODE steps.
"""

from __future__ import annotations

import dataclasses
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from triton.runtime import driver

from testkit.batches import mels_together
from testkit.models.golden import TINY
from testkit.utterances import Tokens
from token2wav import StreamConfig, Voice, backends
from token2wav.cache.paged_kv_cache import CacheLayout, PagedKVCache, Storage
from token2wav.cache.states import StateStore
from token2wav.execution.batch import BatchSize
from token2wav.execution.cuda_graphs import GraphPool, graphs_enabled
from token2wav.execution.runner import FlowRunner
from token2wav.execution.step import TorchStep
from token2wav.families.cosyvoice3 import CosyVoice3Config
from token2wav.families.cosyvoice3.flow import Flow
from token2wav.families.cosyvoice3.kernel_step import CosyVoice3KernelStep
from token2wav.networks import dit
from token2wav.networks.noise import FlowNoise
from token2wav.networks.ode import EulerSolver
from token2wav.serving.chunking import Chunker
from token2wav.serving.hops import HopSchedule
from token2wav.stages.cached_flow import CachedFlow, flow_states
from token2wav.stages.recompute import RecomputeFlow

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Tolerance of the mel, which has a spread of about 1. Keys and values round the same way only as
# long as they are equal.
MEL = {"float32": 1e-5, "float16": 5e-3, "float8": 2e-3}
BLOCK = 4  # tokens
LONGEST = 4 * BLOCK
PAGES = 32
UTTERANCES = [(4, 5), (0, 3)]  # tokens of prompt and utterance


@pytest.fixture(autouse=True)
def few_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reduces the groups of the position convolutions from 16 to 2, because each is a program."""
    monkeypatch.setattr(dit, "_CONV_GROUPS", 2)


def a_flow(guidance: float = 0.7, *, skip: bool = False) -> Flow:
    config = CosyVoice3Config.read(TINY).flow
    estimator = dataclasses.replace(
        config.estimator,
        dim=32,
        dim_head=16,
        static_chunk_size=2 * BLOCK,
        long_skip_connection=skip or None,
    )
    torch.manual_seed(0)
    flow = Flow(
        dataclasses.replace(config, estimator=estimator, n_timesteps=2, inference_cfg_rate=guidance)
    )
    for name, weight in flow.named_parameters():
        if "attn.to_" in name:
            weight.data.mul_(3)  # makes errors of the attention mask visible
    return flow.eval().requires_grad_(False).to(DEVICE)


def a_model(flow: Flow) -> CosyVoice3Config:
    config = CosyVoice3Config.read(TINY)
    return CosyVoice3Config.of(flow.config, config.vocoder)


def an_engine(
    flow: Flow,
    storage: Storage = "float32",
    left_blocks: int = -1,
    *,
    half: bool = False,
    kernels: bool,
) -> CachedFlow:
    """Returns an engine on kernels, or on torch without padding, for any device.

    On a GPU, the kernels are captured.
    """
    config, model = flow.config, a_model(flow)
    solver = EulerSolver(flow.estimator, config.n_timesteps, config.inference_cfg_rate)
    if half:
        flow.estimator.halve()
    layout = CacheLayout.of(
        model, flow.estimator, config.inference_cfg_rate, 1 + config.n_timesteps, storage
    )
    cache, noise = PagedKVCache(layout, PAGES, DEVICE), FlowNoise(config.mel_bands)
    tables = dataclasses.replace(solver.tables, stored_steps=[0, 2])  # as fewer times of a schedule
    parts = (flow.estimator, tables, cache)
    states = flow_states(flow, flow.estimator, layout)
    with torch.inference_mode():
        run = (
            a_runner(CosyVoice3KernelStep(*parts), states)
            if kernels
            else FlowRunner(TorchStep(*parts), states)
        )
    recompute = RecomputeFlow(
        model, flow, noise, {config.n_timesteps: solver}, left_blocks=left_blocks
    )
    return CachedFlow(recompute, {config.n_timesteps: run}, cache, states, longest_hop=LONGEST)


def a_runner(step: CosyVoice3KernelStep, states: StateStore) -> FlowRunner:
    """Returns a runner with buckets, which are captured on a GPU."""
    graphs = GraphPool(DEVICE) if graphs_enabled(DEVICE) else None
    return FlowRunner(step, states, [BatchSize(blocks, 1, PAGES) for blocks in (2, 4)], graphs)


def spoken(engine: CachedFlow, flow: Flow) -> list[np.ndarray]:
    """Returns the mels of utterances. Their next chunks always run in one batch."""
    config = a_model(flow)
    schedule = HopSchedule.of(StreamConfig(max_hop_tokens=LONGEST), config)
    random = np.random.default_rng(0)
    utterances = []
    for prompt, length in UTTERANCES:
        voice = Voice(
            some(random, prompt),
            random.standard_normal((2 * prompt, 80), np.float32),
            random.random(192, np.float32),
        )
        chunker = Chunker(voice.prompt_tokens, config, schedule)
        utterances.append((engine.open(voice), chunker, some(random, length)))
    return mels_together(engine, utterances)


def some(random: np.random.Generator, count: int) -> Tokens:
    return random.integers(0, 6561, count).astype(np.int32)


@pytest.mark.parametrize(
    ("storage", "left_blocks", "guidance", "half", "skip"),
    [
        ("float32", -1, 0.7, False, False),
        ("float32", 0, 0.0, False, True),
        ("float16", 0, 0.0, True, False),
        pytest.param("float8", 1, 0.7, False, False, marks=pytest.mark.slow),
    ],
)
def test_streams_equal_streams_on_torch(
    storage: Storage, left_blocks: int, guidance: float, half: bool, skip: bool
) -> None:
    mels, expected = (
        spoken(
            an_engine(
                flow := a_flow(guidance, skip=skip),
                storage,
                left_blocks,
                half=half,
                kernels=kernels,
            ),
            flow,
        )
        for kernels in (True, False)
    )
    for one, other in zip(mels, expected, strict=True):
        assert one.shape == other.shape
        assert np.abs(one - other).max() <= MEL[storage] * other.std()


@pytest.mark.parametrize(
    ("capability", "dim_head", "compiler", "run"),
    [
        ((9, 0), 64, True, True),
        ((7, 5), 64, True, False),
        ((9, 0), 48, True, False),
        ((9, 0), 64, False, False),
    ],
)
def test_kernels_run_where_gpu_and_model_allow(
    capability: tuple[int, int],
    dim_head: int,
    compiler: bool,
    run: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def compiled() -> object:
        if not compiler:
            raise RuntimeError("Failed to find C compiler")
        return SimpleNamespace(get_current_device=lambda: 0)

    monkeypatch.setattr(driver, "_active", None)
    monkeypatch.setattr(driver, "_default", None)
    monkeypatch.setattr(sys.modules[type(driver).__module__], "_create_driver", compiled)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert backends.kernels_run(torch.device("cpu"), dim_head) == run
    assert ("Failed to find C compiler" in caplog.text) == (not compiler)

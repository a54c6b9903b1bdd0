"""Captured flows of the newer families on a GPU: their streams equal the whole on the CPU.

Tests in `kernels` run their kernels without a GPU.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from testkit.models.caching_families import CPU, WRITERS, write_family
from testkit.utterances import off, some_tokens, streamed_mels, voice_of
from token2wav import RuntimeConfig, StreamConfig, Token2Wav
from token2wav.backends import kernels_run
from token2wav.cache.paged_kv_cache import LayerView
from token2wav.execution.batch import BatchSize
from token2wav.execution.block_table import HEADER, Column
from token2wav.execution.runner import FlowRunner
from token2wav.execution.step import TorchStep
from token2wav.stages.encoder_runner import BlockEncoderRunner

MEL = 2e-5  # of float32 on one device
DEVICES = 2e-4  # between devices, which sum in another order
HALF = 1e-2  # of float16, relative to the spread of the mel
BUCKETS = [BatchSize(blocks, 1, 64) for blocks in (2, 8)]


@pytest.fixture(scope="module", params=WRITERS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(request.param, tmp_path_factory.mktemp(request.param))


def attend_by_distance(
    queries: torch.Tensor,
    by_position: torch.Tensor,
    bias: torch.Tensor,
    view: LayerView,
    sinusoids: torch.Tensor,
    table: torch.Tensor,
    rate: int,
) -> torch.Tensor:
    """`relative_attention` on torch."""
    out, (heads, dim) = torch.zeros_like(queries), bias.shape
    for index, row in enumerate(table.tolist()):
        if valid := rate * row[Column.VALID]:
            pages = row[HEADER : HEADER + row[Column.NUM_PAGES]]
            stop = (row[Column.NUM_PAGES] - 1) * queries.shape[1] + valid
            seen = slice(rate * row[Column.PROMPT_PADDING], stop)
            k, v, s = (
                page[pages].flatten(0, 1)[seen].flatten(1) for page in (*view.data[:, 0], sinusoids)
            )
            k, v = (value.unflatten(1, (heads, dim)).transpose(0, 1) for value in (k, v))
            q = queries[index, :valid].unflatten(1, (heads, dim)).transpose(0, 1) + bias[:, None]
            scores = by_position[:, index, :valid] @ s.T / dim**0.5
            result = F.scaled_dot_product_attention(q, k, v, attn_mask=scores)
            out[index, :valid] = result.transpose(0, 1).flatten(1)
    return out


@pytest.fixture
def _torch_for_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from token2wav.kernels import relative_attention

    monkeypatch.setattr(relative_attention, "relative_attention", attend_by_distance)


@pytest.mark.usefixtures("_torch_for_kernels")
def test_conditions_of_blocks_equal_the_whole(folder: Path) -> None:
    model = Token2Wav.load(folder, runtime=CPU)
    engine = model.pipeline.flow
    streams, block = engine.encoder_runner, model.config.block_tokens
    engine.encoder_runner = BlockEncoderRunner(
        streams.encoder, streams.cache, engine.states, block, BUCKETS
    )
    utterances = [
        (some_tokens(130), voice_of(model, 30)),
        (some_tokens(28), voice_of(model, 80)),
        (some_tokens(1), voice_of(model, 0)),
    ]
    for mel, utterance in zip(streamed_mels(model, *utterances), utterances, strict=True):
        assert off(mel, model.mel(*utterance)) <= MEL


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_captured_graphs_equal_the_cpu(folder: Path, precision: str) -> None:
    runtime = RuntimeConfig(device="cuda", backend="torch", precision=precision, cache_mib=512)  # type: ignore[arg-type]
    model, reference = Token2Wav.load(folder, runtime=runtime), Token2Wav.load(folder, runtime=CPU)
    assert isinstance(model.pipeline.flow.encoder_runner, BlockEncoderRunner)
    [runner] = model.pipeline.flow._runners.values()
    assert isinstance(runner, FlowRunner)
    # The heads of the golden Chatterbox are too small for kernels.
    kernels = kernels_run(torch.device("cuda"), model.pipeline.flow._layout.dim_head)
    assert isinstance(runner.step, TorchStep) is not kernels
    for prompt, count in ((0, 30), (41, 60), (75, 260)):
        utterance = some_tokens(count), voice_of(model, prompt)
        [mel], expected = streamed_mels(model, utterance), reference.mel(*utterance)
        bound = DEVICES if precision == "float32" else HALF * float(expected.std())
        assert np.sqrt(np.mean((mel - expected) ** 2)) <= bound


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
def test_captured_windows_on_int8_pages_equal_the_cpu(folder: Path) -> None:
    models = [
        Token2Wav.load(
            folder,
            stream=StreamConfig(left_blocks=2),
            runtime=RuntimeConfig(
                device, "torch", precision="float32", cache_mib=400, cache_storage="int8"
            ),
        )
        for device in ("cuda", "cpu")
    ]
    utterance = some_tokens(260), voice_of(models[0], 30)
    [mel], [expected] = (streamed_mels(model, utterance) for model in models)
    # A value beside a rounding step of int8 may move by a whole step.
    assert np.sqrt(np.mean((mel - expected) ** 2)) <= HALF * float(expected.std())

"""Captured flows of all families on a GPU: their streams equal the whole on the CPU.

Tests in `kernels` run their kernels without a GPU.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from testkit.models.folders import CACHING, CPU, write_folder
from testkit.models.sized import a_voice
from testkit.utterances import some_tokens, streamed_mels
from token2wav import RuntimeConfig, StreamConfig, Token2Wav
from token2wav.backends import kernels_run
from token2wav.execution.runner import FlowRunner
from token2wav.execution.step import TorchStep
from token2wav.stages.encoder_runner import BlockEncoderRunner

pytestmark = pytest.mark.gpu
DEVICES = 2e-4  # between devices, which sum in another order
HALF = 1e-2  # of float16, relative to the spread of the mel


@pytest.fixture(scope="module", params=["cosyvoice3", *CACHING])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(request.param, tmp_path_factory.mktemp(request.param))


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
        utterance = some_tokens(count), a_voice(model.config, prompt_tokens=prompt)
        [mel], expected = streamed_mels(model, utterance), reference.mel(*utterance)
        bound = DEVICES if precision == "float32" else HALF * float(expected.std())
        assert np.sqrt(np.mean((mel - expected) ** 2)) <= bound


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
    utterance = some_tokens(260), a_voice(models[0].config)
    [mel], [expected] = (streamed_mels(model, utterance) for model in models)
    # A value beside a rounding step of int8 may move by a whole step.
    assert np.sqrt(np.mean((mel - expected) ** 2)) <= HALF * float(expected.std())

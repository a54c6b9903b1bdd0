"""BigVGAN as an ONNX graph of whole mels: any number of streams and frames."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import onnx
import onnxruntime
import pytest
import torch
from torch.export import Dim

from testkit.models.bigvgan import LEAST, a_mel, random_bigvgan
from token2wav.networks.bigvgan import BigVGAN

AUDIO = 1e-4
Network = Callable[[torch.Tensor], torch.Tensor]


def exported(bigvgan: BigVGAN, path: Path) -> Network:
    free = {0: Dim.DYNAMIC, 2: Dim.DYNAMIC}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            bigvgan,
            (torch.stack([a_mel(50), a_mel(50, seed=1), a_mel(50, seed=2)]),),
            input_names=["mel"],
            output_names=["audio"],
            dynamic_shapes=(free,),
            opset_version=20,
            dynamo=True,
            optimize=True,
            verbose=False,
        )
    assert program is not None
    program.save(path)
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    assert {"If", "Loop", "NonZero"} & {node.op_type for node in model.graph.node} == set()
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return lambda mel: torch.from_numpy(session.run(["audio"], {"mel": mel.numpy()})[0])


@pytest.fixture(scope="module")
def least() -> BigVGAN:
    return random_bigvgan(LEAST)


@pytest.fixture(scope="module")
def network(least: BigVGAN, tmp_path_factory: pytest.TempPathFactory) -> Network:
    return exported(least, tmp_path_factory.mktemp("graph") / "bigvgan.onnx")


@pytest.mark.parametrize("streams", [1, 2, 5])
@pytest.mark.parametrize("frames", [1, 2, 49, 200])
def test_a_graph_agrees_with_torch_at_any_size(
    least: BigVGAN, network: Network, streams: int, frames: int
) -> None:
    mel = torch.stack([a_mel(frames, seed=seed) for seed in range(streams)])
    with torch.inference_mode():
        expected = least(mel)
    audio = network(mel)
    assert audio.shape == expected.shape == (streams, 1, frames * least.config.hop_size)
    assert float((audio - expected).abs().max()) <= AUDIO

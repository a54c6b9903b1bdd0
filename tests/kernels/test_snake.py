"""Snake on its kernel equals torch, in both orders of signals, and codecs run on it."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from testkit.models.codec_models import drawn_tokens
from testkit.models.folders import write_folder
from token2wav import RuntimeConfig, StreamConfig, Token2Wav, assembly
from token2wav.execution.cuda_graphs import SWITCH, GraphSummary
from token2wav.families.nanocodec.network import HalfSnake
from token2wav.kernels import snake
from token2wav.layers.snake import Snake, SnakeLayer

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Libraries round the sine differently, by two units in the last place at most. A GPU fuses the sum
# with the product. Results are near 1.
CLOSE = 1e-6


def a_signal(channels: int, positions: int, channels_last: bool) -> torch.Tensor:
    """Returns a signal (2, channels, positions) in the middle of a longer one."""
    shape = (2, positions + 5, channels) if channels_last else (2, channels, positions + 5)
    x = 3 * torch.randn(shape, device=DEVICE)
    return (x.transpose(1, 2) if channels_last else x)[:, :, 3 : 3 + positions]


def a_layer(kind: type[SnakeLayer], channels: int) -> SnakeLayer:
    options = {"beta": True, "log_scale": True} if kind is Snake else {}
    layer = kind(channels, **options).requires_grad_(False).to(DEVICE)
    for parameter in layer.parameters():
        parameter.copy_(0.5 + torch.rand_like(parameter))
    layer.freeze()
    return layer


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # numpy's, of infinity and NaN
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("into", [False, True], ids=["new", "into a longer one"])
@pytest.mark.parametrize("kind", [Snake, HalfSnake])
@pytest.mark.parametrize(("channels", "positions"), [(69, 67), (5, 1), (32, 0)])
def test_the_kernel_equals_torch(
    kind: type[SnakeLayer], channels: int, positions: int, channels_last: bool, into: bool
) -> None:
    layer, x = a_layer(kind, channels), a_signal(channels, positions, channels_last)
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0], device=DEVICE)
    x[0, :, :1] = special.repeat(channels)[:channels, None]
    expected = layer(x)
    whole = torch.full_like(a_signal(channels, positions + 4, channels_last), 7.0)
    out = whole[:, :, 2 : 2 + positions] if into else None
    layer.kernel = snake.snake_signal
    result = layer(x, out)
    assert out is None or result is out
    torch.testing.assert_close(result, expected, atol=CLOSE, rtol=CLOSE, equal_nan=True)
    if into:
        assert (whole[:, :, :2] == 7).all()
        assert (whole[:, :, 2 + positions :] == 7).all()
    else:
        assert result.stride(1 if channels_last else 2) == 1, "the order of x"


@pytest.mark.parametrize(("most", "off"), [(10, 4e-7), (1e4, 4e-7), (1e9, 2)])
def test_square_of_the_sine(most: float, off: float) -> None:
    """It is off by 3e-7, where the sine of float32 is off by 1e-7."""
    x = 2 * torch.rand(1, 1, 4096, device=DEVICE) - 1
    factor, one = torch.full((1, 1), most, device=DEVICE), torch.ones(1, 1, device=DEVICE)
    result = snake.snake_signal(x, factor, one)
    assert (result - (x + (x * factor).double().sin().square())).abs().max() <= off


@pytest.mark.parametrize("name", ["nanocodec", "snac"])
def test_codecs_run_on_the_kernel(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = RuntimeConfig(device=DEVICE.type)
    folder, stream = write_folder(name, tmp_path), StreamConfig(lookahead_frames=0)
    launched: list[torch.Size] = []

    def counted(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        launched.append(x.shape)
        return kernel(x, *rest)

    kernel = snake.snake_signal
    monkeypatch.setattr(snake, "snake_signal", counted)
    monkeypatch.setenv(SWITCH, "0")
    reference = Token2Wav.load(folder, stream=stream, runtime=runtime)
    tokens = drawn_tokens(reference.config, 20)
    expected = reference.synthesize(tokens)
    assert not launched
    if DEVICE.type == "cpu":  # as on a GPU, where each length is a CUDA graph
        no_graphs = SimpleNamespace(
            capture=lambda function, **_: function, summary=GraphSummary(), lock=nullcontext()
        )
        monkeypatch.setattr(assembly, "graphs_enabled", lambda device: True)
        monkeypatch.setattr(assembly, "GraphPool", lambda device: no_graphs)
        monkeypatch.setattr(assembly, "gpu_runs_kernels", lambda device: True)
    monkeypatch.delenv(SWITCH)
    model = Token2Wav.load(folder, stream=stream, runtime=runtime)
    audio = model.synthesize(tokens)
    assert launched
    assert np.abs(audio - expected).max() <= 1e-5 * expected.std()

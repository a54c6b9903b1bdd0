"""BigVGAN against the public implementation, and its variants against the formulas."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors.torch import load_file

from testkit.models.bigvgan import GOLDEN, a_mel, changed, load_bigvgan, random_bigvgan
from testkit.utterances import off
from token2wav.networks.bigvgan import FILTER_TAPS, BigVGAN, kaiser_sinc

Array = NDArray[np.float64]
Activation = Literal["snake", "snakebeta"]


def vocoded(bigvgan: BigVGAN, mel: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return bigvgan(mel)


# Both results are float32, added up in different orders: the public one is 1.5e-5 off from double
# precision, ours 1.6e-5, and they from one another by 1.7e-5. A mel that is off by 1e-6 moves
# samples by 2e-5.
AUDIO = 5e-5


def test_audio_equals_that_of_the_public_code() -> None:
    golden = load_file(GOLDEN / "io.safetensors")
    assert off(vocoded(load_bigvgan(GOLDEN), golden["mel"]), golden["wav"]) <= AUDIO


def snake(x: Array, alpha: Array, beta: Array) -> Array:
    return x + np.sin(alpha[:, None] * x) ** 2 / (beta[:, None] + 1e-9)


def anti_aliased(x: Array, alpha: Array, beta: Array) -> Array:
    """By the book: zeros between the samples, a filter, Snake, the filter again, every other
    sample.
    """
    taps = np.array(kaiser_sinc())
    reach = 2 * FILTER_TAPS
    doubled = np.zeros((len(x), 2 * (x.shape[1] + 2 * reach)))
    doubled[:, ::2] = np.pad(x, ((0, 0), (reach, reach)), mode="edge")
    up = 2 * np.stack([np.convolve(row, taps) for row in doubled])
    # a filter of 12 taps delays by 5.5 samples: 5 here, 6 below
    up = up[:, 2 * reach + 5 :][:, : 2 * x.shape[1]]
    active = np.pad(snake(up, alpha, beta), ((0, 0), (5, 6)), mode="edge")
    return np.stack([np.convolve(row, taps, mode="valid")[::2] for row in active])


def by_names(bigvgan: BigVGAN, mel: torch.Tensor) -> torch.Tensor:
    """Computes the network again from its configuration and the names in its state dict."""
    config, state = (
        bigvgan.config,
        {name: value.double() for name, value in bigvgan.state_dict().items()},
    )

    def conv(x: torch.Tensor, name: str, dilation: int = 1) -> torch.Tensor:
        weight = state[f"{name}.weight"]
        padding = (weight.shape[2] - 1) // 2 * dilation
        return F.conv1d(x, weight, state.get(f"{name}.bias"), padding=padding, dilation=dilation)

    def act(x: torch.Tensor, name: str) -> torch.Tensor:
        alpha = state[f"{name}.act.alpha"]
        beta = state[f"{name}.act.beta"] if config.activation == "snakebeta" else alpha
        if config.snake_logscale:
            alpha, beta = alpha.exp(), beta.exp()
        return torch.stack(
            [torch.from_numpy(anti_aliased(row.numpy(), alpha.numpy(), beta.numpy())) for row in x]
        )

    def block(x: torch.Tensor, name: str, dilations: tuple[int, ...]) -> torch.Tensor:
        for i, dilation in enumerate(dilations):
            if config.resblock == "1":
                inner = conv(act(x, f"{name}.activations.{2 * i}"), f"{name}.convs1.{i}", dilation)
                x = x + conv(act(inner, f"{name}.activations.{2 * i + 1}"), f"{name}.convs2.{i}")
            else:
                x = x + conv(act(x, f"{name}.activations.{i}"), f"{name}.convs.{i}", dilation)
        return x

    x = conv(mel.double(), "conv_pre")
    width = len(config.resblock_dilation_sizes)
    for stage, (rate, kernel) in enumerate(
        zip(config.upsample_rates, config.upsample_kernel_sizes, strict=True)
    ):
        name = f"ups.{stage}.0"
        weight, bias = state[f"{name}.weight"], state[f"{name}.bias"]
        x = F.conv_transpose1d(x, weight, bias, stride=rate, padding=(kernel - rate) // 2)
        branches = [
            block(x, f"resblocks.{stage * width + i}", dilations)
            for i, dilations in enumerate(config.resblock_dilation_sizes)
        ]
        x = torch.stack(branches).mean(dim=0)
    audio = conv(act(x, "activation_post"), "conv_post")
    return audio.tanh() if config.use_tanh_at_final else audio.clamp(-1, 1)


@pytest.mark.parametrize("resblock", ["1", "2"])
@pytest.mark.parametrize("activation", ["snake", "snakebeta"])
@pytest.mark.parametrize("log_scale", [True, False])
@pytest.mark.parametrize("v1_ending", [True, False])
def test_every_variant_has_the_layers_of_its_names(
    resblock: Literal["1", "2"], activation: Activation, log_scale: bool, v1_ending: bool
) -> None:
    bigvgan = random_bigvgan(
        changed(
            resblock=resblock,
            activation=activation,
            snake_logscale=log_scale,
            use_tanh_at_final=v1_ending,
            use_bias_at_final=v1_ending,
        )
    )
    assert ("conv_post.bias" in bigvgan.state_dict()) == v1_ending
    mel = torch.stack((a_mel(7), a_mel(7, seed=1)))
    audio = vocoded(bigvgan, mel)
    assert audio.shape == (2, 1, 7 * 8)
    assert 0.05 < float(audio.abs().max()) < 1  # neither silent nor at the limits
    assert off(audio.double(), by_names(bigvgan, mel)) <= AUDIO

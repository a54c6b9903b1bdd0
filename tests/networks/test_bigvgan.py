"""BigVGAN: the audio of the public code, variants against formulas, and pieces against the whole.

`tests/families/test_codec_contract.py` tests the stage: ends, batches and prepared lengths.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from testkit.models.bigvgan import GOLDEN, SMALL, a_mel, changed, load_bigvgan, random_bigvgan
from testkit.models.golden import TINY
from testkit.utterances import off
from token2wav import StreamConfig
from token2wav.execution.cuda_graphs import GraphPool
from token2wav.execution.device import keep_arithmetic_exact
from token2wav.families.cosyvoice3 import CosyVoice3Config
from token2wav.families.cosyvoice3.bigvgan import read_bigvgan
from token2wav.networks.bigvgan import FILTER_TAPS, BigVGAN, kaiser_sinc
from token2wav.published.sizes import BigVGANConfig
from token2wav.stages.recompute import RecomputeVocoder
from token2wav.stages.stage import FrameChunk
from token2wav.stages.waveform import WaveformStage, likely_pieces

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


def streamed(
    engine: WaveformStage | RecomputeVocoder, mel: torch.Tensor, sizes: Sequence[int]
) -> list[torch.Tensor]:
    """Returns the audio of every piece of a mel. `sizes` leaves out the last piece."""
    handle = engine.open()
    parts = mel.split([*sizes, mel.shape[1] - sum(sizes)], dim=1)
    audio = [
        engine.advance([(handle, FrameChunk(part, index == len(sizes)))])[0]
        for index, part in enumerate(parts)
    ]
    engine.close(handle)
    assert engine.open_streams == 0
    return audio


def test_cost_stays_the_same() -> None:
    """Every piece computes only new frames, and equal pieces of several streams share one call."""
    small, shapes = random_bigvgan(SMALL), list[tuple[int, ...]]()
    hook = small.conv_post.register_forward_hook(
        lambda _m, _i, output: shapes.append(tuple(output.shape))
    )
    engine, parts = WaveformStage(small), a_mel(500).split(50, dim=1)
    handles = [engine.open() for _ in range(3)]
    for index, part in enumerate(parts):
        engine.advance([(handle, FrameChunk(part, index == len(parts) - 1)) for handle in handles])
    hook.remove()
    frames = [50] * 9 + [50 + small.lookahead_frames]
    assert shapes == [(3, 1, count * SMALL.hop_size) for count in frames]


def test_one_copy_brings_the_frames_of_all_streams_to_a_gpu() -> None:
    """The device `meta` stands for a GPU. Early audio takes the frames of the next chunk too."""

    class HostCopies(TorchDispatchMode):
        total = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = func(*args, **(kwargs or {}))
            tensors = [argument for argument in args if isinstance(argument, torch.Tensor)]
            moved = isinstance(result, torch.Tensor) and result.device.type == "meta"
            self.total += moved and any(tensor.device.type == "cpu" for tensor in tensors)
            return result

    engine = WaveformStage(random_bigvgan(SMALL).to("meta"), lookahead_frames=1)
    totals = []
    for streams in (1, 5):
        chunk = FrameChunk(a_mel(20), last=False, next_frames=a_mel(2))
        batch = [(engine.open(), chunk) for _ in range(streams)]
        with HostCopies() as copies:
            engine.advance(batch)
        totals.append(copies.total)
    # the frames, then slots and noise rows of the batch, and of the batch of early audio
    assert totals == [3, 3]


GOLDEN_CONFIG = read_bigvgan(GOLDEN)
CONFIGS = {
    "golden": GOLDEN_CONFIG,
    "small": SMALL,
    "single convolutions": changed(resblock="2"),
    "kernel equal to rate": changed(upsample_kernel_sizes=(4, 2)),
    "odd rates": changed(upsample_rates=(5, 3), upsample_kernel_sizes=(11, 5), hop_size=15),
    "rate of one": changed(upsample_rates=(1, 8), upsample_kernel_sizes=(3, 16)),
    "one short stage": changed(
        upsample_rates=(64,),
        upsample_kernel_sizes=(64,),
        hop_size=64,
        resblock_kernel_sizes=(1,),
        resblock_dilation_sizes=((1,),),
    ),
    "second kernel reaches further": changed(
        resblock_kernel_sizes=(11, 3), resblock_dilation_sizes=((1,), (1, 3, 15))
    ),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_pieces_equal_the_whole(config: BigVGANConfig) -> None:
    bigvgan = random_bigvgan(config)
    engine, mel = WaveformStage(bigvgan), a_mel(120, config.num_mels)
    first = bigvgan.lookahead_frames + 1
    # 1.2e-5 on an Intel Xeon, below 1e-5 on an AMD EPYC.
    audio = torch.cat(streamed(engine, mel, [first, 13, 30]))
    assert off(audio, engine.whole(mel)) <= 2e-5


def test_look_aheads_of_public_models() -> None:
    with torch.device("meta"):
        assert BigVGAN(GOLDEN_CONFIG).lookahead_frames == 38
        base = dataclasses.replace(
            GOLDEN_CONFIG, upsample_rates=(8, 8, 2, 2), upsample_kernel_sizes=(16, 16, 4, 4)
        )
        assert BigVGAN(base).lookahead_frames == 18


@pytest.mark.gpu
@pytest.mark.parametrize("lookahead_frames", [0, 1])
def test_captured_pieces_equal_the_cpu(lookahead_frames: int) -> None:
    device, config = torch.device("cuda"), CosyVoice3Config.read(TINY)
    keep_arithmetic_exact(device)
    network = random_bigvgan(SMALL).to(device)
    shapes = likely_pieces(network, config, config.hops(StreamConfig()), 2)
    captured = WaveformStage(
        network, shapes=shapes, graphs=GraphPool(device), lookahead_frames=lookahead_frames
    )
    exact = WaveformStage(random_bigvgan(SMALL), lookahead_frames=lookahead_frames)
    mel, sizes = a_mel(230), [50, 37, 100]
    for one, other in zip(streamed(captured, mel, sizes), streamed(exact, mel, sizes), strict=True):
        assert off(one, other) <= 1e-4

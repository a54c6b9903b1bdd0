"""BigVGAN in pieces gives the samples of the whole, for all kinds of layers.

`tests/families/test_codec_contract.py` tests the stage: ends, batches and prepared lengths.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from testkit.models.bigvgan import GOLDEN, SMALL, a_mel, changed, random_bigvgan
from testkit.models.golden import TINY
from token2wav import StreamConfig
from token2wav.execution.cuda_graphs import GraphPool
from token2wav.execution.device import keep_arithmetic_exact
from token2wav.families.cosyvoice3 import CosyVoice3Config
from token2wav.families.cosyvoice3.bigvgan import read_bigvgan
from token2wav.networks.bigvgan import BigVGAN
from token2wav.published.sizes import BigVGANConfig
from token2wav.stages.recompute import RecomputeVocoder
from token2wav.stages.stage import FrameChunk
from token2wav.stages.waveform import WaveformStage, likely_pieces

AUDIO = 1e-4
AHEAD = BigVGAN(SMALL).lookahead_frames
HOP = SMALL.hop_size


@pytest.fixture(scope="module")
def small() -> BigVGAN:
    return random_bigvgan(SMALL)


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


def off(audio: Sequence[torch.Tensor], whole: torch.Tensor) -> float:
    together = torch.cat(list(audio))
    assert together.shape == whole.shape
    return float((together - whole).abs().max())


def test_cost_stays_the_same(small: BigVGAN) -> None:
    """Every piece computes only new frames, and equal pieces of several streams share one call."""
    shapes: list[tuple[int, ...]] = []
    hook = small.conv_post.register_forward_hook(
        lambda _m, _i, output: shapes.append(tuple(output.shape))
    )
    engine, parts = WaveformStage(small), a_mel(500).split(50, dim=1)
    handles = [engine.open() for _ in range(3)]
    for index, part in enumerate(parts):
        engine.advance([(handle, FrameChunk(part, index == len(parts) - 1)) for handle in handles])
    hook.remove()
    assert shapes == [(3, 1, 50 * HOP)] * 9 + [(3, 1, (50 + AHEAD) * HOP)]


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
    assert off(streamed(engine, mel, [first, 13, 30]), engine.whole(mel)) <= 2e-5


def test_look_aheads_of_public_models() -> None:
    with torch.device("meta"):
        assert BigVGAN(GOLDEN_CONFIG).lookahead_frames == 38
        base = dataclasses.replace(
            GOLDEN_CONFIG, upsample_rates=(8, 8, 2, 2), upsample_kernel_sizes=(16, 16, 4, 4)
        )
        assert BigVGAN(base).lookahead_frames == 18


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
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
        assert float((one.cpu() - other).abs().max()) <= AUDIO

"""Small HiFT networks on kernels: stages, and utterances that run side by side.

Interpreted kernels are slow, so the networks are as small as they can be with every kind of layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial

import torch

from testkit.models.random_weights import fill
from token2wav.execution.buckets import PaddedSize
from token2wav.execution.cuda_graphs import GraphPool, graphs_enabled
from token2wav.families.chatterbox.fade import FadedHiFT
from token2wav.kernels.channels_last import HiFTPlan
from token2wav.kernels.convolution import Precision
from token2wav.networks.hift import HiFT
from token2wav.networks.noise import SourceNoise
from token2wav.published.sizes import HiFTConfig
from token2wav.stages.kernel_pieces import kernel_pieces
from token2wav.stages.stage import FrameChunk
from token2wav.stages.waveform import WaveformStage

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BANDS, HARMONICS = 8, 2
# Strides and kernels of the public vocoder, with few channels.
PUBLIC = HiFTConfig(
    in_channels=BANDS,
    base_channels=16,
    nb_harmonics=8,
    sampling_rate=24000,
    nsf_alpha=0.1,
    nsf_sigma=0.003,
    nsf_voiced_threshold=10,
    upsample_rates=(8, 5, 3),
    upsample_kernel_sizes=(16, 11, 7),
    n_fft=16,
    hop_len=4,
    resblock_kernel_sizes=(3, 7, 11),
    resblock_dilation_sizes=((1, 3, 5),) * 3,
    source_resblock_kernel_sizes=(7, 7, 11),
    source_resblock_dilation_sizes=((1, 3, 5),) * 3,
    lrelu_slope=0.1,
    audio_limit=0.99,
    conv_pre_look_right=3,
    f0_channels=8,
    causal=False,
)
SYMMETRIC = dataclasses.replace(
    PUBLIC,
    in_channels=BANDS,
    base_channels=16,
    nb_harmonics=HARMONICS,
    upsample_rates=(4, 3),
    upsample_kernel_sizes=(8, 5),
    n_fft=8,
    hop_len=2,
    resblock_kernel_sizes=(3, 5),
    resblock_dilation_sizes=((1, 3), (2, 1)),
    source_resblock_kernel_sizes=(3, 5),
    source_resblock_dilation_sizes=((1, 3), (1,)),
    conv_pre_look_right=2,
)
CAUSAL = dataclasses.replace(SYMMETRIC, causal=True, conv_pre_look_right=4)
NETWORKS: dict[str, Callable[[], HiFT]] = {
    "causal": lambda: HiFT(CAUSAL),
    "symmetric": lambda: HiFT(SYMMETRIC),
    # at this sample rate the fade is shorter than the utterances
    "faded": lambda: FadedHiFT(dataclasses.replace(SYMMETRIC, sampling_rate=1200)),
}
# Tolerance of audio with a spread of 0.02 to 0.1. Only the order of sums differs.
ROUNDING = 2e-6 if DEVICE.type == "cpu" else 1e-5


def a_network(name: str) -> HiFT:
    network = fill(NETWORKS[name]())
    network.freeze()
    return network.to(DEVICE)


def a_stage(
    network: HiFT, precision: Precision = "ieee", lookahead_frames: int = 0
) -> WaveformStage:
    sizes = [PaddedSize(2 * network.lookahead_frames + 4, rows) for rows in (1, 3)]
    graphs = GraphPool(DEVICE) if graphs_enabled(DEVICE) else None
    kernels = partial(kernel_pieces, HiFTPlan(network, precision), sizes, graphs)
    noise = SourceNoise(HARMONICS + 1, 0)
    return WaveformStage(network, noise, kernels=kernels, lookahead_frames=lookahead_frames)


def a_mel(frames: int) -> torch.Tensor:
    return torch.randn(BANDS, frames, generator=torch.Generator().manual_seed(frames)).to(DEVICE)


def spoken(
    stage: WaveformStage, utterances: dict[int, list[int | None]]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields mel and audio of utterances that run side by side.

    Args:
        stage: stage on kernels.
        utterances: frames of each utterance, and where its chunks end; None for a turn without a
            chunk.
    """
    handles = {frames: stage.open() for frames in utterances}
    audio: dict[int, list[torch.Tensor]] = {frames: [] for frames in utterances}
    starts = dict.fromkeys(utterances, 0)
    for stops in zip(*utterances.values(), strict=True):
        there = {f: stop for f, stop in zip(utterances, stops, strict=True) if stop is not None}
        batch = [
            (handles[f], FrameChunk(a_mel(f)[:, starts[f] : stop], stop == f))
            for f, stop in there.items()
        ]
        for frames, samples in zip(there, stage.advance(batch), strict=True):
            audio[frames].append(samples)
        starts.update(there)
    for frames, handle in handles.items():
        stage.close(handle)
        yield a_mel(frames), torch.cat(audio[frames])

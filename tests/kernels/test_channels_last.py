"""HiFT on kernels equals the network on torch, in pieces of any length and any mixture of a batch.

Interpreted kernels are slow, so the networks are as small as they can be with every kind of layer.
Every signal begins as NaN. So a number that is read before it is written shows up in the audio.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch.overrides import TorchFunctionMode

from tests.networks.test_hift_symmetric import CONFIG as PUBLIC
from tests.support.random_weights import fill
from token2wav.execution.cuda_graphs import GraphPool, graphs_enabled
from token2wav.families.chatterbox.fade import FadedHiFT
from token2wav.kernels.channels_last import HiFTPlan
from token2wav.kernels.convolution import (
    PieceTensors,
    Precision,
    Signal,
    SignalLayout,
    tf32,
)
from token2wav.layers import streaming
from token2wav.networks.hift import HiFT
from token2wav.networks.noise import SourceNoise
from token2wav.stages.kernel_pieces import PlannedPieces
from token2wav.stages.piece_sizes import PieceSize
from token2wav.stages.stage import FrameChunk
from token2wav.stages.waveform import WaveformStage

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# on a GPU, the tests belong to the tests that the GPU must pass
pytestmark = [pytest.mark.gpu] if DEVICE.type == "cuda" else []
BANDS, HARMONICS = 8, 2
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


@pytest.fixture(autouse=True)
def nan_in_new_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fills new signals with NaN."""
    make = Signal.empty

    def empty(layout: SignalLayout, batch: PieceTensors) -> Signal:
        signal = make(layout, batch)
        signal.data.fill_(torch.nan)
        return signal

    monkeypatch.setattr(Signal, "empty", empty)


def a_network(name: str) -> HiFT:
    network = fill(NETWORKS[name]())
    network.freeze()
    return network.to(DEVICE)


def a_stage(
    network: HiFT, precision: Precision = "ieee", lookahead_frames: int = 0
) -> WaveformStage:
    sizes = [PieceSize(2 * network.lookahead_frames + 4, rows) for rows in (1, 3)]
    graphs = GraphPool(DEVICE) if graphs_enabled(DEVICE) else None
    kernels = partial(PlannedPieces, HiFTPlan(network, precision), sizes, graphs)
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


@pytest.mark.parametrize(
    "name", ["causal", "faded", pytest.param("symmetric", marks=pytest.mark.slow)]
)
def test_pieces_of_mixed_batches_equal_the_whole(name: str) -> None:
    """Starts, middles and ends of different lengths run in one batch.

    One chunk is longer than the longest piece, two are shorter than the frames held back, and one
    stream starts where a slot holds the NaN of an earlier stream.
    """
    network = a_network(name)
    stage, held = a_stage(network), network.lookahead_frames
    broken = stage.open()
    nan = torch.full((BANDS, held + 1), torch.nan, device=DEVICE)
    [samples] = stage.advance([(broken, FrameChunk(nan, last=False))])
    assert not torch.isfinite(samples).any()
    stage.close(broken)
    utterances: dict[int, list[int | None]] = {
        held + 10: [held + 6, held + 7, held + 10],
        held + 4: [2, held + 4, None],
        3: [None, None, 3],
    }
    for mel, audio in spoken(stage, utterances):
        whole = stage.whole(mel)
        assert audio.shape == whole.shape
        torch.testing.assert_close(audio, whole, atol=ROUNDING, rtol=0)
    assert stage.open_streams == stage.store.used == 0


def test_extrapolated_audio_leaves_no_trace() -> None:
    """Audio that is sent early differs, and the audio after it is exact again.

    The first audio comes before the look-ahead is complete.
    """
    network = a_network("causal")
    held = network.lookahead_frames
    exact, extrapolating = a_stage(network), a_stage(network, lookahead_frames=1)
    utterances: dict[int, list[int | None]] = {held + 5: [2, held + 1, held + 5]}
    [(_, one)], [(_, other)] = (list(spoken(stage, utterances)) for stage in (exact, extrapolating))
    assert one.shape == other.shape
    border = held * network.frame_samples
    torch.testing.assert_close(one[border:], other[border:], atol=ROUNDING, rtol=0)


class _RoundedProducts(TorchFunctionMode):
    """Rounding of the inputs of all products of the generator to 10 bits of mantissa, on torch."""

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        # kernels of the STFT and of its inverse have one channel
        if func in (torch.conv1d, torch.conv_transpose1d):
            x, weight, *rest = args
            if weight.dtype == torch.float32 and 1 not in weight.shape[:2]:
                return func(tf32(x), tf32(weight), *rest, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def test_tf32_costs_what_rounded_inputs_of_products_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    # Short convolutions would be products with packed weights, which the mode does not see.
    monkeypatch.setattr(streaming, "_multiplies", lambda *_: False)
    network = a_network("causal")
    stage = a_stage(network, "tf32")
    held = network.lookahead_frames
    [(mel, audio)] = spoken(stage, {held + 4: [held + 1, held + 4]})
    exact = stage.whole(mel)
    with _RoundedProducts():
        rounded = stage.whole(mel)

    def distance(one: torch.Tensor, other: torch.Tensor) -> float:
        return float((one - other).square().mean().sqrt())

    assert distance(rounded, exact) > ROUNDING
    # Sums in another order round some of the next inputs the other way, so the two roundings are
    # alike in size and only in part equal.
    assert distance(audio, rounded) <= 0.7 * distance(rounded, exact)
    assert distance(audio, exact) <= 1.2 * distance(rounded, exact)

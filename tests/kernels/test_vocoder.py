"""Vocoders on kernels equal torch: every tile of their convolutions on shapes that fill no tile,
rounded operands, and pieces in any mixture of a batch.

Every signal begins as NaN. So a number that is read before it is written shows up in the audio.
Interpreted kernels are slow, so the networks are as small as they can be with every kind of layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from testkit.models.random_weights import fill
from testkit.tiles import tiles_of, use_tile
from token2wav.execution.buckets import PaddedSize
from token2wav.execution.cuda_graphs import GraphPool, graphs_enabled
from token2wav.families.chatterbox.fade import FadedHiFT
from token2wav.kernels.convolution import Convolution
from token2wav.kernels.hift_plan import HiFTPlan
from token2wav.kernels.rounding import Precision, rounded_weights, tf32
from token2wav.kernels.signals import FAR, PieceTensors, Signal, SignalLayout
from token2wav.kernels.tiles import Tile
from token2wav.layers import convolutions
from token2wav.networks.hift import HiFT
from token2wav.networks.noise import SourceNoise
from token2wav.published.sizes import HiFTConfig
from token2wav.stages.kernel_pieces import kernel_pieces
from token2wav.stages.stage import FrameChunk
from token2wav.stages.waveform import WaveformStage

pytestmark = pytest.mark.usefixtures("nan_in_new_signals")
CLOSE = 1e-5  # sums run in another order
CHANNELS, OUTPUTS, TAPS, DILATIONS, PIECES = 24, 72, 3, (1, 4), (150, 0, 70)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BANDS, HARMONICS = 8, 2
SYMMETRIC = HiFTConfig(
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
    f0_channels=8,
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


@pytest.mark.parametrize(("dtype", "tile"), tiles_of("vocoder"))
def test_branches_with_residual_and_activation(
    dtype: torch.dtype, tile: Tile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces of a batch have different lengths; one is empty. Branches have different dilations."""
    use_tile(monkeypatch, tile)
    delays, halo = (0,) * len(DILATIONS), (TAPS - 1) * max(DILATIONS)
    incoming = SignalLayout(CHANNELS, 1, delays, halo=halo, dtype=dtype)
    outgoing = SignalLayout(OUTPUTS, 1, delays, dtype=dtype)
    states = {dtype: torch.zeros(len(PIECES), 16, dtype=dtype, device=DEVICE)}
    pieces = torch.tensor([[FAR, rows, FAR, 0] for rows in PIECES], dtype=torch.int32)
    batch = PieceTensors(max(PIECES), pieces.to(DEVICE), states, states)
    x, residual = Signal.empty(incoming, batch), Signal.empty(outgoing, batch)
    x.data.normal_()
    residual.data.normal_()
    weights = torch.randn(
        len(DILATIONS), OUTPUTS, TAPS, CHANNELS, dtype=dtype, device=DEVICE
    )  # of the signal's rows, one tap after the other
    bias = torch.randn(len(DILATIONS), OUTPUTS, dtype=dtype, device=DEVICE)
    geometry = [
        (TAPS, dilation * CHANNELS, incoming.first((TAPS - 1) * dilation), 0, 0)
        for dilation in DILATIONS
    ]
    convolution = Convolution(
        weights.flatten(2),
        bias,
        torch.tensor(geometry, dtype=torch.int32, device=DEVICE),
        CHANNELS,
        step=CHANNELS,
        rate=1,
        raw=outgoing,
        out=outgoing,
        activation="leaky",
        slope=0.1,
        precision="ieee",
    )
    raw, out = convolution(batch, x, residual)
    assert raw is not None
    assert out is not None
    for branch, dilation in enumerate(DILATIONS):
        before = halo - (TAPS - 1) * dilation
        kernel = weights[branch].transpose(1, 2)
        for stream, rows in enumerate(PIECES):
            if rows:
                read = x.data[branch, stream, before : halo + rows].T
                expected = F.conv1d(read, kernel, bias[branch], dilation=dilation).T
                expected = expected + residual.data[branch, stream, :rows]
                for signal, values in ((raw, expected), (out, F.leaky_relu(expected, 0.1))):
                    result = signal.data[branch, stream, :rows]
                    torch.testing.assert_close(result, values, atol=CLOSE, rtol=CLOSE)


def test_operands_beyond_the_range_of_float16() -> None:
    """They become its largest number, and NaN stays NaN, so that no error is hidden."""
    layout = SignalLayout(16, 1, (0,))
    states = {torch.float32: torch.zeros(1, 16, device=DEVICE)}
    pieces = torch.tensor([[FAR, 4, FAR, 0]], dtype=torch.int32, device=DEVICE)
    batch = PieceTensors(4, pieces, states, states)
    x = Signal.empty(layout, batch)
    values = torch.tensor([1e6, -1e6, torch.nan, 1.0], device=DEVICE)
    x.data[0, 0, :4] = values[:, None]
    weights = rounded_weights(torch.eye(16, device=DEVICE)[None], "float16")
    geometry = torch.tensor([[1, 0, 0, 0, 0]], dtype=torch.int32, device=DEVICE)
    bias = torch.zeros(1, 16, device=DEVICE)
    convolution = Convolution(
        weights, bias, geometry, 16, step=16, rate=1, raw=layout, precision="float16"
    )
    raw, _ = convolution(batch, x)
    assert raw is not None
    expected = torch.tensor([65504.0, -65504.0, torch.nan, 1.0])
    torch.testing.assert_close(raw.data[0, 0, :4, 0].cpu(), expected, equal_nan=True)


class _RoundedProducts(TorchFunctionMode):
    """Rounding of the inputs of all products of the generator to 10 bits of mantissa, on torch."""

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        # kernels of the STFT and of its inverse have one channel
        if func in (torch.conv1d, torch.conv_transpose1d):
            x, weight, *rest = args
            if weight.dtype == torch.float32 and 1 not in weight.shape[:2]:
                return func(tf32(x), tf32(weight), *rest, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("precision", ["tf32", "float16"])
def test_rounding_costs_what_rounded_inputs_of_products_cost(
    precision: Precision, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The audio is as close to exact audio as that of products that are rounded on torch. Float16
    has as many bits of mantissa as TF32.
    """
    # Short convolutions would be products with packed weights, which the mode does not see.
    monkeypatch.setattr(convolutions, "_multiplies", lambda *_: False)
    network = a_network("causal")
    stage = a_stage(network, precision)
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

"""BigVGAN in pieces gives the samples of the whole, for any cut and for any batch."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from testkit.models.bigvgan import SMALL, a_mel, random_bigvgan
from testkit.models.golden import TINY
from token2wav import StreamConfig
from token2wav.errors import StreamClosedError
from token2wav.execution.cuda_graphs import GraphPool
from token2wav.execution.device import keep_arithmetic_exact
from token2wav.families.cosyvoice3.config import CosyVoice3Config
from token2wav.networks.bigvgan import BigVGAN
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


@pytest.mark.parametrize("size", [1, AHEAD, 50])
def test_any_pieces_equal_the_whole(small: BigVGAN, size: int) -> None:
    engine, mel = WaveformStage(small), a_mel(63)
    assert off(streamed(engine, mel, [size] * (62 // size)), engine.whole(mel)) <= AUDIO


def test_uneven_pieces_equal_the_whole(small: BigVGAN) -> None:
    engine, mel = WaveformStage(small), a_mel(120)
    assert off(streamed(engine, mel, [1, 0, 40, 3, 0, 0, 30, 7]), engine.whole(mel)) <= AUDIO


def test_pieces_of_the_golden_mel_equal_its_audio(
    bigvgan: BigVGAN, bigvgan_golden: dict[str, torch.Tensor]
) -> None:
    audio = streamed(WaveformStage(bigvgan), bigvgan_golden["mel"][0], [38, 1, 61])
    assert off(audio, bigvgan_golden["wav"][0, 0]) <= AUDIO


@pytest.mark.parametrize("last", [0, 1, AHEAD, AHEAD + 1])
@pytest.mark.parametrize("first", [0, AHEAD, AHEAD + 1, 2 * AHEAD + 5])
def test_both_edges(small: BigVGAN, first: int, last: int) -> None:
    """Streams shorter than the look-ahead, and ends that arrive with only held-back frames left."""
    engine, mel = WaveformStage(small), a_mel(first + last)
    head, tail = streamed(engine, mel, [first])
    assert len(head) == max(0, HOP * first - small.output_delay)
    assert len(head) + len(tail) == HOP * (first + last)
    if first + last:
        assert off([head, tail], engine.whole(mel)) <= AUDIO


def test_batches_of_streams_that_are_not_alike(small: BigVGAN) -> None:
    """Streams that start, run, wait for their look-ahead and end in the same calls."""
    engine = WaveformStage(small)
    sizes = [[20, 20, 20], [3, 37, 20], [20, 20, 20], [1, 1, 1], [40, 0, 20]]
    mels = [a_mel(sum(lengths), seed=seed) for seed, lengths in enumerate(sizes)]
    handles = [engine.open() for _ in mels]
    audio: list[list[torch.Tensor]] = [[] for _ in mels]
    for step in range(3):
        batch = [
            (handle, FrameChunk(mel.split(lengths, dim=1)[step], step == 2))
            for handle, mel, lengths in zip(handles, mels, sizes, strict=True)
        ]
        for parts, new in zip(audio, engine.advance(batch), strict=True):
            parts.append(new)
    for parts, mel in zip(audio, mels, strict=True):
        assert off(parts, engine.whole(mel)) <= AUDIO


def test_prepared_lengths(small: BigVGAN) -> None:
    """Lengths are prepared as on a GPU, where each length is a CUDA graph."""
    config = CosyVoice3Config.read(TINY)
    engine = WaveformStage(small, shapes=likely_pieces(small, config, (25, 50), 2))
    for sizes in ([50, 100], [17, 31, 9], [3, 1]):
        mel = a_mel(sum(sizes) + 20)
        assert off(streamed(engine, mel, sizes), engine.whole(mel)) <= AUDIO


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


def test_handles(small: BigVGAN) -> None:
    engine = WaveformStage(small)
    first, second = engine.open(), engine.open()
    assert engine.open_streams == 2
    engine.close(first)
    engine.close(first)
    assert engine.open_streams == 1
    with pytest.raises(StreamClosedError):
        engine.advance([(first, FrameChunk(a_mel(3), last=True))])
    [audio] = engine.advance([(second, FrameChunk(a_mel(3), last=True))])
    assert audio.shape == (3 * HOP,)


def test_device_of_a_module() -> None:
    assert random_bigvgan(SMALL).device == torch.device("cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
@pytest.mark.parametrize("lookahead_frames", [0, 1])
def test_captured_pieces_equal_the_cpu(lookahead_frames: int) -> None:
    device, config = torch.device("cuda"), CosyVoice3Config.read(TINY)
    keep_arithmetic_exact(device)
    network = random_bigvgan(SMALL).to(device)
    shapes = likely_pieces(network, config, config.hops(StreamConfig()), 2)
    captured = WaveformStage(
        network,
        shapes=shapes,
        graphs=GraphPool(device),
        lookahead_frames=lookahead_frames,
    )
    exact = WaveformStage(random_bigvgan(SMALL), lookahead_frames=lookahead_frames)
    mel, sizes = a_mel(230), [50, 37, 100]
    for one, other in zip(streamed(captured, mel, sizes), streamed(exact, mel, sizes), strict=True):
        assert float((one.cpu() - other).abs().max()) <= AUDIO

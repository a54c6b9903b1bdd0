"""BigVGAN piece by piece: the samples of the whole, however it is cut and whoever else is in the batch."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from tests.bigvgan.rig import SMALL, a_mel, random_bigvgan
from token2wav.engines.base import MelChunk, VocoderEngine
from token2wav.engines.bigvgan_engine import BigVGANEngine
from token2wav.errors import StreamClosedError
from token2wav.vocoder.bigvgan import BigVGAN
from token2wav.vocoder.bigvgan_incremental import IncrementalBigVGAN
from token2wav.vocoder.bigvgan_reach import reach_frames

AUDIO = 1e-4
REACH = reach_frames(SMALL)
HOP = SMALL.hop_size


def streamed(engine: VocoderEngine, mel: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Audio of every piece of a mel; the sizes are those of all but the last one."""
    handle = engine.open()
    parts = mel.split([*sizes, mel.shape[1] - sum(sizes)], dim=1)
    audio = [engine.advance([(handle, MelChunk(part, index == len(sizes)))])[0] for index, part in enumerate(parts)]
    engine.close(handle)
    assert engine.open_streams == 0
    return audio


def off(audio: Sequence[torch.Tensor], whole: torch.Tensor) -> float:
    together = torch.cat(list(audio))
    assert together.shape == whole.shape
    return float((together - whole).abs().max())


@pytest.mark.parametrize("size", [1, REACH.right, 50])
def test_any_pieces_equal_the_whole(small: BigVGAN, size: int) -> None:
    engine, mel = BigVGANEngine(small), a_mel(63)
    assert off(streamed(engine, mel, [size] * (62 // size)), engine.whole(mel)) <= AUDIO


def test_uneven_pieces_equal_the_whole(small: BigVGAN) -> None:
    engine, mel = BigVGANEngine(small), a_mel(120)
    assert off(streamed(engine, mel, [1, 0, 40, 3, 0, 0, 30, 7]), engine.whole(mel)) <= AUDIO


def test_pieces_of_the_golden_mel_equal_its_audio(bigvgan: BigVGAN, golden: dict[str, torch.Tensor]) -> None:
    audio = streamed(BigVGANEngine(bigvgan), golden["mel"][0], [38, 1, 61])
    assert off(audio, golden["wav"][0, 0]) <= AUDIO


@pytest.mark.parametrize("last", [0, 1, REACH.right, REACH.right + 1])
@pytest.mark.parametrize("first", [0, REACH.right, REACH.right + 1, REACH.left + REACH.right + 5])
def test_both_edges(small: BigVGAN, first: int, last: int) -> None:
    """What is shorter than the reach, and ends that come when only held-back frames are left."""
    engine, mel = BigVGANEngine(small), a_mel(first + last)
    head, tail = streamed(engine, mel, [first])
    assert len(head) == HOP * max(0, first - REACH.right)
    assert len(head) + len(tail) == HOP * (first + last)
    if first + last:
        assert off([head, tail], engine.whole(mel)) <= AUDIO


@pytest.mark.parametrize(("left", "right", "equal"), [(REACH.left, REACH.right, True), (0, 9, False), (9, 0, False)])
def test_a_window_without_reach_gives_other_samples(small: BigVGAN, left: int, right: int, equal: bool) -> None:
    """So the bound of these tests would see it."""
    whole = IncrementalBigVGAN(small).whole
    mel, first, last = a_mel(70), 30, 40
    expected = whole(mel)[first * HOP : last * HOP]
    audio = whole(mel[:, first - left : last + right])[left * HOP :][: len(expected)]
    assert (off([audio], expected) <= AUDIO) == equal


class Counted:
    """A network that remembers what it was run on, as another engine than torch could be."""

    def __init__(self, bigvgan: BigVGAN) -> None:
        self.shapes: list[tuple[int, ...]] = []
        self._bigvgan = bigvgan

    def __call__(self, mel: torch.Tensor) -> torch.Tensor:
        self.shapes.append(tuple(mel.shape))
        return self._bigvgan(mel)


def test_equal_windows_are_computed_together(small: BigVGAN) -> None:
    network = Counted(small)
    engine = BigVGANEngine(small, network)
    mels = [a_mel(90, seed=seed) for seed in range(3)]
    handles = [engine.open() for _ in mels]
    audio: list[list[torch.Tensor]] = [[] for _ in mels]
    for first in range(0, 90, 30):
        batch = [(h, MelChunk(mel[:, first : first + 30], first == 60)) for h, mel in zip(handles, mels, strict=True)]
        for parts, new in zip(audio, engine.advance(batch), strict=True):
            parts.append(new)
    assert [shape[0] for shape in network.shapes] == [3, 3, 3]
    for parts, mel in zip(audio, mels, strict=True):
        assert off(parts, engine.whole(mel)) <= AUDIO


def test_batches_of_streams_that_are_not_alike(small: BigVGAN) -> None:
    """Streams that start, run, wait for their look-ahead and end in the same calls."""
    network = Counted(small)
    engine = BigVGANEngine(small, network)
    sizes = [[20, 20, 20], [3, 37, 20], [20, 20, 20], [1, 1, 1], [40, 0, 20]]
    mels = [a_mel(sum(each), seed=seed) for seed, each in enumerate(sizes)]
    handles = [engine.open() for _ in mels]
    audio: list[list[torch.Tensor]] = [[] for _ in mels]
    for step in range(3):
        batch = [
            (handle, MelChunk(mel.split(each, dim=1)[step], step == 2))
            for handle, mel, each in zip(handles, mels, sizes, strict=True)
        ]
        for parts, new in zip(audio, engine.advance(batch), strict=True):
            parts.append(new)
    assert len(network.shapes) < 3 * len(sizes)
    for parts, mel in zip(audio, mels, strict=True):
        assert off(parts, engine.whole(mel)) <= AUDIO


def test_state_and_cost_stay_bounded(small: BigVGAN) -> None:
    network = Counted(small)
    vocoder = IncrementalBigVGAN(small, network)
    state = vocoder.start()
    for part in a_mel(500).split(50, dim=1):
        vocoder.advance_batch([(state, part, False)])
        assert state.mel.untyped_storage().nbytes() <= 4 * SMALL.num_mels * (REACH.left + REACH.right)
    assert {frames for _, _, frames in network.shapes[1:]} == {50 + REACH.left + REACH.right}


def test_handles(small: BigVGAN) -> None:
    engine = BigVGANEngine(small)
    one, two = engine.open(), engine.open()
    assert engine.open_streams == 2
    engine.close(one)
    engine.close(one)
    assert engine.open_streams == 1
    with pytest.raises(StreamClosedError):
        engine.advance([(one, MelChunk(a_mel(3), last=True))])
    [audio] = engine.advance([(two, MelChunk(a_mel(3), last=True))])
    assert audio.shape == (3 * HOP,)


def test_a_module_says_what_it_runs_on() -> None:
    assert random_bigvgan(SMALL).device == torch.device("cpu")

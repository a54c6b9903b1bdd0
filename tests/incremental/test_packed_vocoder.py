"""The packed vocoder, as it runs on a GPU but eagerly: against the incremental one, and against whole mels."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from examples.demo_voice.export import MODEL as DEMO
from tests.incremental.rig import AUDIO, Parts, a_voice, some_tokens
from tests.incremental.test_incremental_vocoder import SAMPLES, a_mel
from tests.support.golden import TINY
from token2wav import RuntimeConfig, StreamConfig, Token2Wav
from token2wav.checkpoint import load_hift, load_source_noise
from token2wav.engines import build, plans
from token2wav.engines.base import MelChunk
from token2wav.engines.packed_vocoder import PackedHiFT, PackedStream, PackedVocoderEngine
from token2wav.engines.vocoder_engine import CachedVocoderEngine
from token2wav.engines.window_shapes import likely_windows
from token2wav.model_config import ModelConfig
from token2wav.vocoder.incremental import IncrementalHiFT
from token2wav.vocoder.stream_rows import RowLayout
from token2wav.vocoder.window_batch import WASTE, Piece, WindowBatch, WindowShape

# The same windows, but longer and side by side: libraries then sum in another order, and F0, which is then off by the
# last bit of a float32 here and there, integrates into phase. Measured 2e-5.
PADDED = AUDIO


@pytest.fixture(scope="module")
def shapes(parts: Parts) -> list[WindowShape]:
    flow = parts.config.flow
    return likely_windows(RowLayout(parts.hift), flow, flow.hops(StreamConfig()), 4)


@pytest.fixture(scope="module", params=["own shapes", "prepared"])
def vocoder(parts: Parts, shapes: list[WindowShape], request: pytest.FixtureRequest) -> PackedHiFT:
    return PackedHiFT(parts.hift, parts.source_noise, shapes=shapes if request.param == "prepared" else ())


@pytest.fixture(scope="module")
def oracle(parts: Parts) -> IncrementalHiFT:
    return IncrementalHiFT(parts.hift, parts.source_noise)


@dataclass
class Utterance:
    """A mel that is vocoded in pieces of given lengths, from one turn on."""

    lengths: Sequence[int]
    start: int = 0
    seed: int = 0
    device: str = "cpu"
    audio: list[torch.Tensor] = field(default_factory=list)

    @property
    def mel(self) -> torch.Tensor:
        return a_mel(sum(self.lengths), self.seed).to(self.device)

    def piece(self, turn: int) -> tuple[torch.Tensor, bool] | None:
        index = turn - self.start
        if not 0 <= index < len(self.lengths):
            return None
        return self.mel.split(list(self.lengths), dim=1)[index], index == len(self.lengths) - 1


def run(vocoder: PackedHiFT, utterances: Sequence[Utterance]) -> None:
    """Vocodes utterances side by side; whoever is at its end frees what it keeps."""
    streams: dict[int, PackedStream] = {}
    for turn in range(max(each.start + len(each.lengths) for each in utterances)):
        pieces = {index: piece for index, each in enumerate(utterances) if (piece := each.piece(turn)) is not None}
        for index in pieces:
            if index not in streams:
                streams[index] = vocoder.start()
        audio = vocoder.advance_batch([(streams[index], *piece) for index, piece in pieces.items()])
        for (index, (_, final)), samples in zip(pieces.items(), audio, strict=True):
            utterances[index].audio.append(samples)
            if final:
                vocoder.release(streams.pop(index))


def check(oracle: IncrementalHiFT, utterances: Sequence[Utterance]) -> None:
    for each in utterances:
        state, parts = oracle.start(), each.mel.split(list(each.lengths), dim=1)
        for index, (part, audio) in enumerate(zip(parts, each.audio, strict=True)):
            expected = oracle.advance(state, part, final=index == len(parts) - 1)
            assert audio.shape == expected.shape
            assert audio.numel() == 0 or float((audio - expected).abs().max()) <= PADDED
        assert float((torch.cat(each.audio) - oracle.whole(each.mel)).abs().max()) <= AUDIO


@pytest.mark.parametrize("lengths", [[1] * 50, [7] * 9, [36, 1, 1, 40], [37, 2], [50, 100, 200, 7], [3], [8, 1]])
def test_any_pieces_equal_the_whole(vocoder: PackedHiFT, oracle: IncrementalHiFT, lengths: list[int]) -> None:
    utterance = Utterance(lengths)
    run(vocoder, [utterance])
    check(oracle, [utterance])


@pytest.mark.parametrize("first", [0, 1, 8, 9, 30, 50])
@pytest.mark.parametrize("last", [1, 3, 8])
def test_any_end(vocoder: PackedHiFT, oracle: IncrementalHiFT, first: int, last: int) -> None:
    """Shorter than the look-ahead, without samples of its own before, and longer than what is prepared."""
    utterance = Utterance([first, last])
    run(vocoder, [utterance])
    check(oracle, [utterance])


def test_a_stream_that_ends_without_more_mel(vocoder: PackedHiFT, oracle: IncrementalHiFT) -> None:
    utterance = Utterance([50, 0])
    run(vocoder, [utterance])
    check(oracle, [utterance])


def test_an_end_that_is_longer_than_prepared_windows(vocoder: PackedHiFT, oracle: IncrementalHiFT) -> None:
    utterance = Utterance([50, 333])
    run(vocoder, [utterance])
    check(oracle, [utterance])


def test_another_geometry() -> None:
    """A vocoder whose windows of the STFT are two frames long, so that an end reaches far back."""
    config = ModelConfig.read(DEMO)
    hift, noise = load_hift(DEMO, config), load_source_noise(DEMO, config)
    shapes = likely_windows(RowLayout(hift), config.flow, config.flow.hops(StreamConfig()), 2)
    utterances = [Utterance([50, 100, 31], seed=0), Utterance([50, 2], seed=1), Utterance([5, 1], seed=2)]
    run(PackedHiFT(hift, noise, shapes=shapes), utterances)
    check(IncrementalHiFT(hift, noise), utterances)


def test_the_reference_phase(parts: Parts, shapes: list[WindowShape]) -> None:
    utterance = Utterance([50, 100, 33])
    phase: Literal["reference"] = "reference"
    run(PackedHiFT(parts.hift, parts.source_noise, phase, shapes=shapes), [utterance])
    whole = IncrementalHiFT(parts.hift, parts.source_noise, phase).whole(utterance.mel)
    assert float((torch.cat(utterance.audio) - whole).abs().max()) <= AUDIO


def test_mixed_batches(vocoder: PackedHiFT, oracle: IncrementalHiFT) -> None:
    """Firsts, middles and ends of all hops together; buckets that are full, in part and more than full."""
    utterances = [
        Utterance([50, 100, 31], start=0, seed=0),
        Utterance([50, 100, 200, 7], start=0, seed=1),
        Utterance([98, 100, 1], start=1, seed=2),
        Utterance([13], start=1, seed=3),
        *(Utterance([50, 50, 50 - index], start=2, seed=4 + index) for index in range(5)),
        Utterance([5, 9, 17, 33, 65], start=0, seed=9),
    ]
    run(vocoder, utterances)
    check(oracle, utterances)


def test_rows_are_used_again(parts: Parts, oracle: IncrementalHiFT) -> None:
    """More streams than there are rows at first, and many after them in the rows of those that ended."""
    vocoder = PackedHiFT(parts.hift, parts.source_noise)
    held = [vocoder.start() for _ in range(62)]
    utterances = [Utterance([40, 9 + index], start=index // 3, seed=index) for index in range(12)]
    run(vocoder, utterances)
    check(oracle, utterances)
    rows = {vocoder.start().row for _ in range(20)} | {stream.row for stream in held}
    assert len(rows) == 82
    assert WASTE not in rows
    assert len(vocoder._states) == 128


def test_a_broken_stream_harms_neither_its_batch_nor_the_next_in_its_row(parts: Parts, oracle: IncrementalHiFT) -> None:
    vocoder = PackedHiFT(parts.hift, parts.source_noise)
    broken, sound = vocoder.start(), Utterance([50, 50], seed=1)
    other = vocoder.start()
    for turn in range(2):
        piece = sound.piece(turn)
        assert piece is not None
        nan = torch.full((80, 50), torch.nan)
        bad, good = vocoder.advance_batch([(broken, nan, False), (other, *piece)])
        assert not torch.isfinite(bad).any()
        sound.audio.append(good)
    check(oracle, [sound])
    row = broken.row
    vocoder.release(broken)
    after = Utterance([20, 60, 5], seed=2)
    run(vocoder, [after])
    assert vocoder.start().row == row
    check(oracle, [after])


class Launches(TorchDispatchMode):
    """Counts operations; views launch nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def test_launches_do_not_grow_with_the_streams(parts: Parts, shapes: list[WindowShape]) -> None:
    vocoder = PackedHiFT(parts.hift, parts.source_noise, shapes=shapes)
    vocoder._noise.prepare(6)
    counts = {}
    for streams in (1, 3, 4):
        batch = [vocoder.start() for _ in range(streams)]
        for turn, frames in enumerate((50, 100, 100)):
            pieces = [(stream, a_mel(frames, index), False) for index, stream in enumerate(batch)]
            with Launches() as launches:
                vocoder.advance_batch(pieces)
            counts[streams, turn] = launches.count
    assert {counts[streams, turn] - counts[1, turn] for streams, turn in counts} == {0}
    assert min(counts.values()) > 50


class Devices(TorchDispatchMode):
    """Notes where the tensors of all operations are."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [each for each in tree_leaves((args, kwargs, result)) if isinstance(each, torch.Tensor)]
        self.found |= {each.device.type for each in tensors}
        return result


@pytest.mark.parametrize("history", [False, True])
def test_what_is_captured_needs_nothing_of_the_host(parts: Parts, history: bool) -> None:
    """On tensors without content: whoever wants to know a number fails, and whoever brings one shows."""
    hift = copy.deepcopy(parts.hift).to("meta")
    batch = WindowBatch(WindowShape(4, 87, history), hift, RowLayout(hift), "exact")
    with Devices() as devices:
        batch.compute()
    assert devices.found == {"meta"}


def test_engine(parts: Parts, oracle: IncrementalHiFT) -> None:
    vocoder = PackedHiFT(parts.hift, parts.source_noise)
    engine = PackedVocoderEngine(vocoder)
    mel, handle, free = a_mel(77), engine.open(), len(vocoder._free)
    parts_of_it = [
        *engine.advance([(handle, MelChunk(mel[:, :50], last=False))]),
        *engine.advance([(handle, MelChunk(mel[:, 50:], last=True))]),
    ]
    assert float((torch.cat(parts_of_it) - oracle.whole(mel)).abs().max()) <= AUDIO
    assert torch.equal(engine.whole(mel), oracle.whole(mel))
    assert len(torch.cat(parts_of_it)) == 77 * SAMPLES
    assert engine.open_streams == 1
    engine.close(handle)
    engine.close(handle)
    assert engine.open_streams == 0
    assert len(vocoder._free) == free + 1


def test_every_chunk_has_a_prepared_window(parts: Parts, shapes: list[WindowShape]) -> None:
    """The longest of first, later and last chunks; and hops of streams that are not at their ends fit exactly."""
    layout, flow = RowLayout(parts.hift), parts.config.flow
    lengths = {
        history: {shape.frames for shape in shapes if shape.history == history and shape.streams == 1}
        for history in (False, True)
    }
    behind_hop, behind_prompt = flow.lookahead_tokens - 1, flow.block_tokens - 1
    first, last = torch.empty(80, 2 * (25 + behind_prompt + behind_hop)), torch.empty(80, 2 * (100 + behind_hop))
    assert Piece(layout, 1, 0, first, final=True).needs <= max(lengths[False])
    assert Piece(layout, 1, 500, last, final=True).needs <= max(lengths[True])
    for tokens in (25, 50, 100):
        assert Piece(layout, 1, 500, torch.empty(80, 2 * tokens), final=False).needs in lengths[True]
    assert Piece(layout, 1, 0, torch.empty(80, 50), final=False).needs in lengths[False]
    assert {shape.streams for shape in shapes} == {1, 2, 4}


def test_a_model_with_graphs_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the capture, which needs a GPU: shapes, engine and streams of a model as it is loaded there."""
    monkeypatch.setattr(build, "graphs_enabled", lambda device: True)
    monkeypatch.setattr(plans, "CudaGraph", lambda function: function)
    runtime = RuntimeConfig(device="cpu", engine="torch")
    packed, tokens, voice = Token2Wav.load(TINY, runtime=runtime), some_tokens(190), a_voice(41)
    assert isinstance(packed.pipeline.vocoder, PackedVocoderEngine)
    monkeypatch.undo()
    exact = Token2Wav.load(TINY, runtime=runtime)
    assert isinstance(exact.pipeline.vocoder, CachedVocoderEngine)
    assert np.abs(packed.synthesize(tokens, voice) - exact.synthesize(tokens, voice)).max() <= AUDIO
    assert packed.pipeline.open_streams == 0

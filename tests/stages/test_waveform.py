"""Streaming vocoder: any cut of a mel gives the samples of the whole mel, for all piece lengths."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from testkit.captured_code import OnDevice
from testkit.graph_pool import PoolWithoutGraphs
from testkit.launches import Launches
from testkit.models.golden import ROOT, TINY
from testkit.utterances import a_voice, some_tokens
from tests.stages.rig import AUDIO, Parts
from token2wav import RuntimeConfig, StreamConfig, Token2Wav, assembly, backends
from token2wav.assembly import load_network
from token2wav.cache.states import StateStore
from token2wav.families.cosyvoice3 import CosyVoice3Config
from token2wav.families.cosyvoice3.noise import load_source_noise
from token2wav.layers.streaming import StreamStep, state_specs
from token2wav.stages.stage import FrameChunk
from token2wav.stages.waveform import PieceShape, WaveformStage, likely_pieces

# A GPU machine cannot import the exporter of the demo, which needs further packages.
DEMO = ROOT / "examples" / "demo_voice" / "model"
SAMPLES = 480  # per frame
PREPARED = "prepared lengths"


def a_mel(frames: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(80, frames, generator=torch.Generator().manual_seed(seed))


def prepared(parts: Parts, streams: int = 4) -> list[PieceShape]:
    return likely_pieces(parts.hift, parts.config, parts.config.hops(StreamConfig()), streams)


@pytest.fixture(scope="module", params=["own lengths", PREPARED])
def engine(parts: Parts, request: pytest.FixtureRequest) -> WaveformStage:
    shapes = prepared(parts) if request.param == PREPARED else []
    return WaveformStage(parts.hift, parts.source_noise, shapes=shapes)


@dataclass
class Utterance:
    """Mel that is vocoded in pieces of given lengths, from one turn on."""

    lengths: Sequence[int]
    start: int = 0
    seed: int = 0
    device: str = "cpu"
    audio: list[torch.Tensor] = field(default_factory=list)

    @property
    def mel(self) -> torch.Tensor:
        return a_mel(sum(self.lengths), self.seed).to(self.device)

    def chunk(self, turn: int) -> FrameChunk | None:
        index = turn - self.start
        if not 0 <= index < len(self.lengths):
            return None
        return FrameChunk(
            self.mel.split(list(self.lengths), dim=1)[index], index == len(self.lengths) - 1
        )


def run(engine: WaveformStage, utterances: Sequence[Utterance]) -> None:
    """Vocodes utterances side by side, and closes each utterance after its last piece."""
    handles: dict[int, int] = {}
    for turn in range(max(utterance.start + len(utterance.lengths) for utterance in utterances)):
        chunks = {
            index: chunk
            for index, utterance in enumerate(utterances)
            if (chunk := utterance.chunk(turn)) is not None
        }
        for index in chunks:
            if index not in handles:
                handles[index] = engine.open()
        audio = engine.advance([(handles[index], chunk) for index, chunk in chunks.items()])
        for (index, chunk), samples in zip(chunks.items(), audio, strict=True):
            utterances[index].audio.append(samples)
            if chunk.last:
                engine.close(handles.pop(index))


def check(engine: WaveformStage, utterances: Sequence[Utterance]) -> None:
    """Checks that every piece returned all samples that it makes possible.

    Together, the pieces must give the samples of the whole mel.
    """
    hift = engine._net
    for utterance in utterances:
        frames = sent = 0
        for index, (length, audio) in enumerate(
            zip(utterance.lengths, utterance.audio, strict=True)
        ):
            frames, sent = frames + length, sent + len(audio)
            if index == len(utterance.lengths) - 1:
                assert sent == SAMPLES * frames
            else:
                assert sent == (
                    SAMPLES * frames - hift.output_delay if frames >= hift.first_frames else 0
                )
        assert (
            float((torch.cat(utterance.audio) - engine.whole(utterance.mel)).abs().max()) <= AUDIO
        )


@pytest.mark.parametrize(
    "lengths",
    [
        *([1] * 40, [7] * 9, [36, 1, 1, 40], [50, 100, 200, 7], [3], [8, 1], [50, 0]),
        [50, 333],  # longer than prepared lengths
        # shorter than the holdback, and without earlier samples
        *([first, last] for first in (0, 1, 5, 6, 30) for last in (1, 2, 5)),
    ],
)
def test_any_lengths(engine: WaveformStage, lengths: list[int]) -> None:
    utterance = Utterance(lengths)
    run(engine, [utterance])
    check(engine, [utterance])


def test_an_end_without_any_frame(engine: WaveformStage) -> None:
    handle = engine.open()
    [audio] = engine.advance([(handle, FrameChunk(a_mel(0), last=True))])
    engine.close(handle)
    assert len(audio) == 0


def test_mixed_batches(engine: WaveformStage) -> None:
    """Starts, middles and ends of all hops run in one batch.

    Prepared numbers of streams are reached, partly filled and exceeded.
    """
    utterances = [
        Utterance([50, 100, 31], start=0, seed=0),
        Utterance([50, 100, 200, 7], start=0, seed=1),
        Utterance([98, 100, 1], start=1, seed=2),
        Utterance([13], start=1, seed=3),
        *(Utterance([50, 50, 50 - index], start=2, seed=4 + index) for index in range(5)),
        Utterance([5, 9, 17, 33, 65], start=0, seed=9),
    ]
    run(engine, utterances)
    check(engine, utterances)
    assert engine.open_streams == 0
    assert engine.store.used == 0


def test_another_geometry() -> None:
    """A vocoder streams with STFT windows of two frames, so its holdback exceeds half a frame."""
    config = CosyVoice3Config.read(DEMO)
    hift, noise = load_network(DEMO, config, "vocoder"), load_source_noise(DEMO, config)
    shapes = likely_pieces(hift, config, config.hops(StreamConfig()), 2)
    for engine in (WaveformStage(hift, noise), WaveformStage(hift, noise, shapes=shapes)):
        utterances = [
            Utterance([50, 100, 31], seed=0),
            Utterance([50, 2], seed=1),
            Utterance([5, 1], seed=2),
        ]
        run(engine, utterances)
        check(engine, utterances)


def test_the_output_delay_is_sufficient_and_minimal(parts: Parts) -> None:
    hift, at = parts.hift, 40
    mel = a_mel(60)[None]
    changed = mel.clone()
    changed[:, :, at:] += 3
    moved = (hift.vocode(changed, parts.source_noise) - hift.vocode(mel, parts.source_noise))[
        0
    ].abs()
    first = SAMPLES * at - hift.output_delay
    assert float(moved[:first].max()) == 0
    assert float(moved[first : first + SAMPLES].max()) > 0
    # the first convolution's look-ahead, and half a window less its hop
    assert hift.output_delay == 4 * SAMPLES + 4
    assert torch.equal(
        hift.vocode(mel, parts.source_noise, final=False),
        hift.vocode(mel, parts.source_noise)[:, : -hift.output_delay],
    )


def test_early_audio_goes_on_with_the_last_frame(parts: Parts) -> None:
    """A mel that stays as its last frame is what early audio expects, so the audio is exact."""
    mel = torch.cat((a_mel(50), a_mel(50)[:, -1:].expand(-1, 30)), dim=1)
    engine = WaveformStage(parts.hift, parts.source_noise, lookahead_frames=1)
    handle = engine.open()
    [audio] = engine.advance([(handle, FrameChunk(mel[:, :50], last=False))])
    engine.close(handle)
    assert len(audio) == SAMPLES * 49
    assert float((audio - engine.whole(mel)[: len(audio)]).abs().max()) <= AUDIO


# States of streams.


def test_a_broken_stream_harms_no_other_stream(engine: WaveformStage) -> None:
    broken, sound = engine.open(), Utterance([50, 50], seed=1)
    other, nan = engine.open(), torch.full((80, 50), torch.nan)
    slot = engine._streams[broken].slot
    for turn in range(2):
        chunk = sound.chunk(turn)
        assert chunk is not None
        bad, good = engine.advance([(broken, FrameChunk(nan, last=False)), (other, chunk)])
        assert not torch.isfinite(bad).any()
        sound.audio.append(good)
    check(engine, [sound])
    engine.close(other)
    engine.close(broken)
    after = engine.open()
    assert engine._streams[after].slot == slot
    mel = a_mel(85, seed=2)
    audio = engine.advance([(after, FrameChunk(mel[:, :60], last=False))])
    audio += engine.advance([(after, FrameChunk(mel[:, 60:], last=True))])
    engine.close(after)
    assert float((torch.cat(audio) - engine.whole(mel)).abs().max()) <= AUDIO


# Requirements of a GPU: few launches, no data from the host, and known lengths.


def test_launches_do_not_grow_with_the_streams(parts: Parts) -> None:
    engine, counts = WaveformStage(parts.hift, parts.source_noise, shapes=prepared(parts)), {}
    assert engine._noise is not None
    engine._noise.prepare(6)
    for streams in (1, 3, 4):
        handles = [engine.open() for _ in range(streams)]
        for turn, frames in enumerate((50, 100, 100)):
            batch = [
                (handle, FrameChunk(a_mel(frames, index), last=False))
                for index, handle in enumerate(handles)
            ]
            with Launches() as launches:
                engine.advance(batch)
            counts[streams, turn] = launches.total
    assert {counts[streams, turn] - counts[1, turn] for streams, turn in counts} == {0}
    assert min(counts.values()) > 50


@pytest.mark.parametrize(("first", "frames_past_end"), [(True, 0), (False, 0), (False, 5)])
def test_captured_code_reads_nothing_from_the_host(
    parts: Parts, first: bool, frames_past_end: int
) -> None:
    """Runs on tensors without content.

    Code that reads a number fails, and a tensor of another device shows up.
    """
    hift = copy.deepcopy(parts.hift).to("meta")
    store = StateStore({"vocoder": state_specs(hift)}, torch.device("meta"))
    step = StreamStep(store.rows("vocoder", 4).views, first, 40, frames_past_end)
    with torch.inference_mode(), OnDevice():
        hift(
            torch.empty(4, 80, 40, device="meta"), torch.empty(4, 40 * SAMPLES, device="meta"), step
        )


@pytest.mark.parametrize("streams", [1, 4])
def test_every_chunk_is_made_up_of_prepared_lengths(
    parts: Parts, streams: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Starts with any part of the prompt's last block, all hops, and ends of any length.

    Also runs more streams than prepared.
    """
    engine = WaveformStage(parts.hift, parts.source_noise, shapes=prepared(parts))
    asked: list[PieceShape] = []

    def note(parts: Sequence[Any]) -> Sequence[Any]:
        asked.extend(part.shape for part in parts)
        return parts

    monkeypatch.setattr(engine._pieces, "run", note)
    monkeypatch.setattr(engine, "_join_pieces", lambda audio: [torch.empty(0)] * len(audio))
    for lengths in ([50 + 2 * 24, 100, 200, 200 + 2 * 27], [74, 50, 6], [8, 2], [2 * 27]):
        utterances = [Utterance(lengths) for _ in range(streams)]
        handles = [engine.open() for _ in utterances]
        for turn in range(len(lengths)):
            chunks = [utterance.chunk(turn) for utterance in utterances]
            engine.advance([(h, chunk) for h, chunk in zip(handles, chunks, strict=True) if chunk])
    prepared_places = {(shape.first, shape.inside, shape.frames) for shape in prepared(parts)}
    assert {(shape.first, shape.inside, shape.frames) for shape in asked} <= prepared_places
    hops = [shape.frames for shape in asked if shape.frames in (100, 200)]
    assert len(hops) == streams * 3  # a hop is one piece, and the last 254 frames begin with one


def test_a_model_with_graphs_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks lengths, engine and streams of a model as it is loaded on a GPU.

    Only the capture of graphs is left out, because it needs a GPU.
    """
    monkeypatch.setattr(assembly, "graphs_enabled", lambda device: True)
    monkeypatch.setattr(assembly, "GraphPool", lambda device: PoolWithoutGraphs())
    monkeypatch.setattr(assembly, "gpu_runs_kernels", lambda device: False)
    # The flow runs as on a CPU. Padding would change its last digits, which would shift phases and
    # hide the effect of the vocoder.
    monkeypatch.setattr(
        assembly, "flow_runner", lambda *parts, **options: backends.flow_runner(*parts)
    )
    monkeypatch.setattr(
        assembly, "encoder_runner", lambda *parts: backends.encoder_runner(*parts[:4])
    )
    runtime = RuntimeConfig(device="cpu", backend="torch")
    captured, tokens, voice = Token2Wav.load(TINY, runtime=runtime), some_tokens(190), a_voice(41)
    assert isinstance(captured.pipeline.vocoder, WaveformStage)
    assert captured.pipeline.vocoder._lengths
    monkeypatch.undo()
    exact = Token2Wav.load(TINY, runtime=runtime)
    assert isinstance(exact.pipeline.vocoder, WaveformStage)
    assert not exact.pipeline.vocoder._lengths
    assert (
        np.abs(captured.synthesize(tokens, voice) - exact.synthesize(tokens, voice)).max() <= AUDIO
    )
    assert captured.pipeline.open_streams == 0

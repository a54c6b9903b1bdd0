"""Properties of the vocoder that only a GPU can show: graphs equal eager runs, both equal the CPU,
and no call waits for the GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch

from testkit.models.golden import TINY, snr_db
from tests.stages.rig import AUDIO, Parts
from token2wav import RuntimeConfig, StreamConfig, Token2Wav
from token2wav.execution.cuda_graphs import SWITCH, CudaGraph, GraphPool
from token2wav.execution.device import keep_arithmetic_exact
from token2wav.execution.staging import to_host
from token2wav.stages.piece_sizes import kernel_sizes
from token2wav.stages.stage import FrameChunk
from token2wav.stages.waveform import WaveformStage, likely_pieces

pytest.importorskip("triton", reason="the Triton language is not installed")
from token2wav.kernels.hift_plan import HiFTPlan
from token2wav.kernels.rounding import Precision
from token2wav.stages.kernel_pieces import kernel_pieces

pytestmark = pytest.mark.gpu
# F0 of another library differs in its last bits, which moves phases; see
# tests/families/cosyvoice3/tolerances.py.
SNR_DB = 50
TF32_DB = 45  # 60 dB on a CPU, and the differences of F0


@dataclass
class Utterance:
    """Mel that is vocoded in pieces of given lengths, from one turn on."""

    lengths: Sequence[int]
    start: int = 0
    seed: int = 0
    audio: list[torch.Tensor] = field(default_factory=list)

    @property
    def mel(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randn(80, sum(self.lengths), generator=generator).to("cuda")

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


@pytest.fixture(scope="module")
def on_gpu() -> Iterator[Parts]:
    keep_arithmetic_exact(torch.device("cuda"))
    parts = Parts.load()
    parts.hift.to("cuda")
    yield parts
    torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def vocoders(on_gpu: Parts) -> dict[bool, WaveformStage]:
    """Vocoders by whether their calls are captured."""
    hift, config = on_gpu.hift, on_gpu.config
    shapes = likely_pieces(hift, config, config.hops(StreamConfig()), 4)
    return {
        capture: WaveformStage(hift, on_gpu.source_noise, shapes=shapes, graphs=graphs)
        for capture, graphs in ((False, None), (True, GraphPool(torch.device("cuda"))))
    }


def on_kernels(parts: Parts, precision: Precision, graphs: GraphPool | None) -> WaveformStage:
    """Returns a vocoder on kernels."""
    hift, config = parts.hift, parts.config
    sizes = kernel_sizes(hift.lookahead_frames, config, config.hops(StreamConfig()), 4)
    kernels = partial(kernel_pieces, HiFTPlan(hift, precision), sizes, graphs)
    return WaveformStage(hift, parts.source_noise, kernels=kernels)


def utterances() -> list[Utterance]:
    return [
        Utterance([50, 100, 200, 31], start=0, seed=0),
        Utterance([98, 100, 1], start=1, seed=1),
        Utterance([13], start=1, seed=2),
        *(Utterance([50, 50, 50 - index], start=2, seed=3 + index) for index in range(6)),
    ]


def test_replay_equals_eager(vocoders: dict[bool, WaveformStage]) -> None:
    eager, captured = utterances(), utterances()
    run(vocoders[False], eager)
    run(vocoders[True], captured)
    for one, other in zip(eager, captured, strict=True):
        assert float((torch.cat(one.audio) - torch.cat(other.audio)).abs().max()) <= AUDIO


def test_audio_is_that_of_the_cpu(parts: Parts, vocoders: dict[bool, WaveformStage]) -> None:
    oracle, streams = WaveformStage(parts.hift, parts.source_noise), utterances()
    run(vocoders[True], streams)
    for utterance in streams:
        expected = oracle.whole(utterance.mel.cpu()).numpy()
        assert snr_db(torch.cat(utterance.audio).cpu().numpy(), expected) >= SNR_DB


@pytest.mark.parametrize(
    ("precision", "least_db"), [("ieee", SNR_DB), ("tf32", TF32_DB), ("float16", TF32_DB)]
)
def test_audio_of_kernels_is_that_of_the_cpu(
    parts: Parts, on_gpu: Parts, precision: Precision, least_db: float
) -> None:
    oracle = WaveformStage(parts.hift, parts.source_noise)
    pool = GraphPool(torch.device("cuda"))
    eager, captured = utterances(), utterances()
    run(on_kernels(on_gpu, precision, None), eager)
    run(on_kernels(on_gpu, precision, pool), captured)
    for one, other in zip(eager, captured, strict=True):
        assert torch.equal(torch.cat(one.audio), torch.cat(other.audio))
        expected = oracle.whole(one.mel.cpu()).numpy()
        assert snr_db(torch.cat(other.audio).cpu().numpy(), expected) >= least_db


@pytest.mark.parametrize("capture", [False, True])
def test_nothing_waits_for_the_device(vocoders: dict[bool, WaveformStage], capture: bool) -> None:
    vocoder = vocoders[capture]
    run(vocoder, utterances())  # draws noise, which waits, and takes memory
    handles, mels = [vocoder.open() for _ in range(4)], torch.zeros(3, 4, 80, 50, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        for turn in mels:
            vocoder.advance(
                [
                    (handle, FrameChunk(mel, last=False))
                    for handle, mel in zip(handles, turn, strict=True)
                ]
            )
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for handle in handles:
        vocoder.close(handle)


def test_a_model_chooses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = RuntimeConfig(device="cuda", backend="torch", cache_mib=512)
    engine = Token2Wav.load(TINY, runtime=runtime).pipeline.vocoder
    assert isinstance(engine, WaveformStage)
    assert engine._lengths
    assert engine._mixes_places, "it runs on kernels"
    buckets = engine._pieces._buckets.values()
    assert all(isinstance(compute, CudaGraph) for _, compute in buckets)
    monkeypatch.setenv(SWITCH, "0")
    engine = Token2Wav.load(TINY, runtime=runtime).pipeline.vocoder
    assert isinstance(engine, WaveformStage)
    assert not engine._lengths


def test_audio_of_a_batch_comes_to_the_host_in_one_copy() -> None:
    audio = [torch.arange(3.0), torch.empty(0), torch.arange(5.0)]
    for array, expected in zip(to_host([samples.cuda() for samples in audio]), audio, strict=True):
        assert torch.equal(torch.from_numpy(array), expected)

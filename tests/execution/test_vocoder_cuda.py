"""Properties of the vocoder that only a GPU can show: graphs equal eager runs, both equal the CPU,
and no call waits for the GPU.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.execution.rig import AUDIO, Parts
from tests.execution.test_vocoder import Utterance, run
from tests.support.golden import TINY, snr_db
from token2wav import RuntimeConfig, StreamConfig, Token2Wav
from token2wav.execution.device import keep_arithmetic_exact
from token2wav.execution.graphs import SWITCH, CudaGraph, GraphPool
from token2wav.execution.stages import FrameChunk
from token2wav.execution.vocoder import StreamingVocoder, likely_pieces
from token2wav.networks.staging import to_host

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
# F0 of another library differs in its last bits, which moves phases; see
# tests/families/cosyvoice3/tolerances.py.
SNR_DB = 50


@pytest.fixture(scope="module")
def on_gpu() -> Iterator[Parts]:
    keep_arithmetic_exact(torch.device("cuda"))
    parts = Parts.load()
    parts.hift.to("cuda")
    yield parts
    torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def vocoders(on_gpu: Parts) -> dict[bool, StreamingVocoder]:
    """Vocoders by whether their calls are captured."""
    config = on_gpu.config
    shapes = likely_pieces(on_gpu.hift.lookahead_frames, config, config.hops(StreamConfig()), 4)
    return {
        capture: StreamingVocoder(on_gpu.hift, on_gpu.source_noise, shapes=shapes, graphs=graphs)
        for capture, graphs in ((False, None), (True, GraphPool(torch.device("cuda"))))
    }


def utterances() -> list[Utterance]:
    return [
        Utterance([50, 100, 200, 31], start=0, seed=0, device="cuda"),
        Utterance([98, 100, 1], start=1, seed=1, device="cuda"),
        Utterance([13], start=1, seed=2, device="cuda"),
        *(
            Utterance([50, 50, 50 - index], start=2, seed=3 + index, device="cuda")
            for index in range(6)
        ),
    ]


def test_replay_equals_eager(vocoders: dict[bool, StreamingVocoder]) -> None:
    eager, captured = utterances(), utterances()
    run(vocoders[False], eager)
    run(vocoders[True], captured)
    for one, other in zip(eager, captured, strict=True):
        assert float((torch.cat(one.audio) - torch.cat(other.audio)).abs().max()) <= AUDIO


def test_audio_is_that_of_the_cpu(parts: Parts, vocoders: dict[bool, StreamingVocoder]) -> None:
    oracle, streams = StreamingVocoder(parts.hift, parts.source_noise), utterances()
    run(vocoders[True], streams)
    for each in streams:
        expected = oracle.whole(each.mel.cpu()).numpy()
        assert snr_db(torch.cat(each.audio).cpu().numpy(), expected) >= SNR_DB


@pytest.mark.parametrize("capture", [False, True])
def test_nothing_waits_for_the_device(
    vocoders: dict[bool, StreamingVocoder], capture: bool
) -> None:
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
    assert isinstance(engine, StreamingVocoder)
    assert engine._lengths
    assert all(isinstance(compute, CudaGraph) for _, compute in engine._pieces._buckets.values())
    monkeypatch.setenv(SWITCH, "0")
    engine = Token2Wav.load(TINY, runtime=runtime).pipeline.vocoder
    assert isinstance(engine, StreamingVocoder)
    assert not engine._lengths


def test_audio_of_a_batch_comes_to_the_host_in_one_copy() -> None:
    audio = [torch.arange(3.0), torch.empty(0), torch.arange(5.0)]
    for array, expected in zip(to_host([samples.cuda() for samples in audio]), audio, strict=True):
        assert torch.equal(torch.from_numpy(array), expected)

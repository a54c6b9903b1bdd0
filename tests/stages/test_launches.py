"""Work of a GPU: launches do not grow with the streams, and captured code reads no number."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch

from testkit.batches import WHOLE_BLOCKS
from testkit.captured_code import OnDevice
from testkit.launches import Launches
from testkit.utterances import a_voice, some_tokens
from tests.stages.rig import Parts
from token2wav import StreamConfig
from token2wav.cache.states import StateStore
from token2wav.execution.batch import Batch
from token2wav.execution.runner import FlowRunner
from token2wav.execution.step import TorchStep
from token2wav.layers.streaming import StreamStep, state_specs
from token2wav.serving.chunking import Chunker
from token2wav.serving.hops import HopSchedule
from token2wav.stages.encoder_runner import BlockEncoderRunner
from token2wav.stages.stage import FrameChunk
from token2wav.stages.waveform import WaveformStage, likely_pieces

SAMPLES = 480  # of a mel frame


class _NoStep(TorchStep):
    """Step function that computes nothing. The launches of the estimator are counted elsewhere."""

    def integrate(self, batch: Batch) -> None:
        pass


@pytest.mark.parametrize("prompt", [0, 41])
def test_launches_of_the_flow(parts: Parts, prompt: int) -> None:
    """First chunks, with prompt mel, and later ones.

    The first stream of a network also packs weights on a CPU (`PackedCopy`), so it runs twice.
    """
    counts = []
    for streams in (1, 1, 5):
        engine, config = parts.incremental(), parts.config
        for steps, runner in engine._runners.items():
            step = _NoStep(runner.step.estimator, runner.step.tables, runner.step.cache)
            engine._runners[steps] = FlowRunner(step, engine.states)
        alone = engine.encoder_runner
        engine.encoder_runner = BlockEncoderRunner(
            parts.flow, alone.cache, engine.states, config.block_tokens
        )
        voice, schedule = a_voice(prompt), HopSchedule.of(WHOLE_BLOCKS, config)
        handles = [engine.open(voice) for _ in range(streams)]
        chunkers = [Chunker(voice.prompt_tokens, config, schedule) for _ in handles]
        for seed, chunker in enumerate(chunkers):
            chunker.push(some_tokens(90, seed), end=True)
        of_chunks = []
        while all(chunker.next_chunk for chunker in chunkers):
            batch = [
                (handle, chunker.next_chunk)
                for handle, chunker in zip(handles, chunkers, strict=True)
            ]
            with Launches() as launches, torch.no_grad():
                engine.advance(batch)  # type: ignore[arg-type]
            of_chunks.append(launches.total)
            for chunker in chunkers:
                chunker.finish_chunk()
        counts.append(of_chunks)
    assert counts[1] == counts[2]
    assert max(itertools.chain(*counts)) <= 70


def test_launches_of_the_vocoder(parts: Parts) -> None:
    shapes = likely_pieces(parts.hift, parts.config, parts.config.hops(StreamConfig()), 4)
    engine, counts = WaveformStage(parts.hift, parts.source_noise, shapes=shapes), {}
    assert engine._noise is not None
    engine._noise.prepare(6)
    for streams in (1, 3, 4):
        handles = [engine.open() for _ in range(streams)]
        for turn, frames in enumerate((50, 100, 100)):
            chunk = FrameChunk(torch.randn(80, frames), last=False)
            with Launches() as launches:
                engine.advance([(handle, chunk) for handle in handles])
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

"""The launches of a batch do not grow with its streams."""

from __future__ import annotations

import itertools

import pytest
import torch

from testkit.batches import WHOLE_BLOCKS
from testkit.launches import Launches
from testkit.utterances import a_voice, some_tokens
from tests.stages.rig import Parts
from token2wav.execution.batch import Batch
from token2wav.execution.runner import FlowRunner
from token2wav.execution.step import TorchStep
from token2wav.serving.chunking import Chunker
from token2wav.serving.hops import HopSchedule
from token2wav.stages.encoder_runner import BlockEncoderRunner


class _NoStep(TorchStep):
    """Step function that computes nothing. The launches of the estimator are counted elsewhere."""

    def integrate(self, batch: Batch) -> None:
        pass


@pytest.mark.parametrize("prompt", [0, 41])
def test_launches_do_not_grow_with_the_streams(parts: Parts, prompt: int) -> None:
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

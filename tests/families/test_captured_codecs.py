"""Codecs on a GPU: streams in CUDA graphs equal the CPU, alone and in batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from testkit.batches import spoken_together
from testkit.models.codec_models import CODECS, drawn_tokens
from testkit.models.folders import write_folder
from testkit.utterances import chunks_of, joined, off, portions
from token2wav import RuntimeConfig, StreamConfig, Token2Wav
from token2wav.execution.cuda_graphs import CudaGraph
from token2wav.voice import voice_for

pytestmark = pytest.mark.gpu
# Of the deviation of the audio. A GPU sums in another order than a CPU.
PARITY = 1e-4


@pytest.mark.parametrize("name", CODECS)
def test_captured_streams_equal_the_cpu(name: str, tmp_path: Path) -> None:
    folder = write_folder(name, tmp_path)
    windows = CODECS[name].windows
    # Early audio depends on how tokens are portioned. Whole utterances have no graphs.
    exact = StreamConfig() if windows else StreamConfig(lookahead_frames=0)
    cpu, gpu = (
        Token2Wav.load(
            folder, stream=exact, runtime=RuntimeConfig(device=device, precision="float32")
        )
        for device in ("cpu", "cuda")
    )
    [decoder] = gpu.pipeline.stages.values()
    stage: Any = decoder
    buckets = (stage._batches if windows else stage._pieces)._buckets.values()
    assert buckets
    assert all(isinstance(compute, CudaGraph) for _, compute in buckets)
    tokens = [drawn_tokens(cpu.config, count) for count in (140, 33, 33)]
    references = [cpu.synthesize(codes) for codes in tokens]
    alone = joined(chunks_of(gpu, portions(tokens[0], [3, 40, 1])))
    assert off(alone, references[0]) <= PARITY * references[0].std()
    together = spoken_together(
        gpu.pipeline, [(voice_for(gpu.config, None), codes, 0) for codes in tokens]
    )
    for audio, expected in zip(together, references, strict=True):
        assert off(audio, expected) <= PARITY * expected.std()

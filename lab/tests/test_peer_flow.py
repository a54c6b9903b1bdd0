"""The ways to compute a flow that section baselines compares have the results of the library."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch

from benchmarks.gpu.parity import Utterance, check, speak, utterance
from benchmarks.gpu.settings import OURS, Settings
from lab.peers.flow_baselines import PEERS, SYSTEMS, baselines, system
from testkit.models.golden import TINY
from testkit.models.sized import a_voice
from token2wav import RuntimeConfig, StreamConfig, Token2Wav
from token2wav.stages.stage import TokenChunk

SETTINGS = Settings(device="cpu").rehearsal()
EAGER_PEERS = "peers' algorithm"
BOUND = 1e-5  # all round in float32


@pytest.fixture(scope="module")
def library() -> Token2Wav:
    return Token2Wav.load(
        TINY, stream=StreamConfig(first_tokens=0), runtime=RuntimeConfig("cpu", "torch")
    )


@pytest.fixture(scope="module")
def expected(library: Token2Wav) -> list[Utterance]:
    """Prompts of 75, 30 and 0 tokens; chunks of 1, 2 and 4 blocks, and a last part of a block."""
    return [speak(library, [utterance(library.config, index)])[0] for index in range(3)]


@pytest.mark.parametrize("name", [EAGER_PEERS, pytest.param(PEERS, marks=pytest.mark.slow)])
def test_streams_equal_those_of_the_library(name: str, expected: list[Utterance]) -> None:
    model = system(name, TINY, SETTINGS)(3, 13.0)
    assert check(model, 3, expected, BOUND)["problem"] is None


def test_a_batch_and_used_rows_change_nothing(library: Token2Wav) -> None:
    """The rows of three streams in one batch hold another voice in between."""
    flows = system(EAGER_PEERS, TINY, SETTINGS)(3, 4.0).pipeline.flow, library.pipeline.flow
    config = library.config
    for seed in (1, 2, 1):
        voice = a_voice(config, seed)
        tokens = np.concatenate(
            (voice.prompt_tokens, config.tokens.draw(103, np.random.default_rng(seed)))
        )
        handles = [[flow.open(voice) for _ in range(3)] for flow in flows]
        for start, stop in ((50, 100), (100, 125), (125, 175)):
            chunk = TokenChunk(tokens[start : stop + 3], start, stop, last=False)
            peers, ours = (
                torch.stack(flow.advance([(handle, chunk) for handle in opened]))
                for flow, opened in zip(flows, handles, strict=True)
            )
            assert torch.allclose(peers, ours, atol=1e-4)
        for flow, opened in zip(flows, handles, strict=True):
            for handle in opened[::-1]:  # the next streams get the same rows in the same order
                flow.close(handle)


def test_the_section_compares_all_systems(tmp_path: Path) -> None:
    """Without compilation, which takes a minute: the slow test of streams compiles."""
    settings = replace(SETTINGS, out=tmp_path, batches=(1, 2))
    with patch("lab.peers.flow_baselines.compile_layers"):
        rows = {key: measure() for key, measure in baselines(TINY, settings)}
    assert [row for row in rows.values() if row.get("problem")] == []
    for name in SYSTEMS:
        assert rows[f"{name}: one stream"]["mel_error"] < BOUND
        alone = rows[f"{name}: 1 streams, 25 tokens after 2 s"]
        assert alone["total_ms"][0] > alone["flow_ms"][0] > 0
        assert (f"{name}: 2 streams, 25 tokens after 2 s" in rows) == (name in (PEERS, OURS))

"""Attention of all blocks of a chunk at once equals attention of every block alone."""

from __future__ import annotations

import pytest
import torch

from testkit.utterances import a_voice, off, portions, some_tokens
from tests.stages.rig import MEL, Parts, flow_mel
from token2wav.execution import step
from token2wav.execution.chunk_attention import chunk_attention
from token2wav.networks.estimator import attended
from token2wav.stages.cached_flow import CachedFlow

HEADS = 3
ROUNDING = 1e-6  # float32, for values of about 1


@pytest.mark.parametrize(
    "visible",
    [(7, 12, 17, 22), (40, 45, 48), (1, 6), (9,), (20, 20, 20)],
    ids=["growing", "a short last block", "nearly no past", "one block", "full attention"],
)
def test_a_chunk_equals_its_blocks(visible: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    q = torch.randn(2, len(visible), 5, HEADS * 8)
    k, v = (torch.randn(2, visible[-1], HEADS * 8) for _ in range(2))

    together = chunk_attention(q, k, v, visible, HEADS)

    for block, count in enumerate(visible):
        alone = attended(HEADS, q[:, block], k[:, :count], v[:, :count], None)
        assert off(together[:, block], alone) <= ROUNDING


@pytest.mark.parametrize("prompt", [0, 41])
def test_mel_of_long_chunks(
    parts: Parts, engine: CachedFlow, prompt: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step, "_LONG_PAST", 0)
    voice, tokens = a_voice(prompt), some_tokens(260)
    assert (
        off(flow_mel(parts, engine, portions(tokens, [130]), voice), parts.whole(tokens, voice))
        <= MEL
    )

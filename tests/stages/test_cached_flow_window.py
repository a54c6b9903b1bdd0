"""Attention to a bounded past: the mask, and streams that release the pages that it hides."""

from __future__ import annotations

import pytest

from testkit.utterances import a_voice, off, portions, some_tokens
from tests.stages.rig import MEL, Parts, flow_mel
from token2wav import StreamConfig

LEFT_BLOCKS = [0, 1, 2, 8]


@pytest.mark.parametrize("left_blocks", LEFT_BLOCKS)
@pytest.mark.parametrize("prompt", [0, 75])
def test_streams_equal_the_whole_under_the_mask(
    parts: Parts, left_blocks: int, prompt: int
) -> None:
    stream = StreamConfig(first_tokens=0, left_blocks=left_blocks)
    voice, tokens = a_voice(prompt), some_tokens(180)
    whole = parts.whole(tokens, voice, left_blocks=left_blocks)
    for engine in (
        parts.incremental(left_blocks=left_blocks),
        parts.recompute(left_blocks=left_blocks),
    ):
        assert off(flow_mel(parts, engine, portions(tokens, [17]), voice, stream), whole) <= MEL
    fixed = StreamConfig(first_tokens=0, max_hop_tokens=25, left_blocks=left_blocks)
    assert (
        off(
            flow_mel(parts, parts.incremental(left_blocks=left_blocks), [tokens], voice, fixed),
            whole,
        )
        <= MEL
    )


def test_window_as_long_as_the_utterance_is_exact(parts: Parts) -> None:
    voice, tokens = a_voice(41), some_tokens(160)
    mel = flow_mel(
        parts, parts.incremental(left_blocks=8), [tokens], voice, StreamConfig(left_blocks=8)
    )
    assert off(mel, parts.whole(tokens, voice)) <= MEL


def test_narrow_window_is_an_approximation(parts: Parts) -> None:
    voice, tokens = a_voice(0), some_tokens(160)
    assert off(parts.whole(tokens, voice, left_blocks=1), parts.whole(tokens, voice)) > 1e-2


def test_prompt_stays_in_view(parts: Parts) -> None:
    """Without the prefix, a window of no blocks would limit every block to itself."""
    tokens = some_tokens(160)
    engine = parts.incremental(left_blocks=0)
    stream = StreamConfig(left_blocks=0)
    last = [
        flow_mel(parts, engine, [tokens], a_voice(28, seed), stream)[:, -40:] for seed in (0, 1)
    ]
    assert off(*last) > 1e-2

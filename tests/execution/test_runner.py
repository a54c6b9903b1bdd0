"""Runner of the flow in buckets: histories that are longer than all buckets."""

from __future__ import annotations

import logging

import pytest

from testkit.packing import pad_batches
from testkit.utterances import a_voice, off, some_tokens
from tests.stages.rig import Parts, flow_mel
from token2wav import backends
from token2wav.config import LimitConfig
from token2wav.execution.captured_sizes import PAST_PAGES

PROMPT_TOKENS = 750  # longest prompt that a server accepts
BATCHED = 1e-5  # of the mel, as in test_batch.py


def test_tables_have_room_for_the_longest_stream_of_a_server(parts: Parts) -> None:
    tokens = PROMPT_TOKENS + LimitConfig().stream_tokens
    assert tokens // parts.config.block_tokens <= PAST_PAGES


def test_a_longer_history_runs_eagerly_and_is_reported_once(
    parts: Parts, caplog: pytest.LogCaptureFixture
) -> None:
    engine = pad_batches(parts.incremental(), backends.exported_buckets(4, (2,)))
    voice = a_voice(30)
    with caplog.at_level(logging.WARNING):
        flow_mel(parts, engine, [some_tokens(25)], voice)
        assert not caplog.messages
        for length in (130, 200):
            tokens = some_tokens(length)
            mel = flow_mel(parts, engine, [tokens], voice)
            assert off(mel, parts.whole(tokens, voice)) <= 2 * BATCHED
    [warning] = caplog.messages
    assert "past blocks, and batches are prepared for 2" in warning

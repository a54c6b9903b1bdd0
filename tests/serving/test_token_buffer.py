"""Buffer of a stream's tokens: its memory stays bounded, and the needed tokens stay in it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.support.tiny_model import TINY
from token2wav import InputError
from token2wav.config.token_format import NO_CODE, TokenFormat
from token2wav.families.cosyvoice3.config import CosyVoice3Config
from token2wav.serving.token_buffer import TokenBuffer

CONFIG = CosyVoice3Config.read(TINY)


def test_an_endless_stream_keeps_only_the_needed_tokens() -> None:
    buffer = TokenBuffer(np.arange(30, dtype=np.int32), CONFIG)
    room = len(buffer._tokens)
    for start in range(30, 100_000, 7):
        needed = max(0, start - 50)
        buffer.add(np.arange(start, start + 7, dtype=np.int32), needed)
        assert np.array_equal(buffer.copy(needed, start + 7), np.arange(needed, start + 7))
    assert len(buffer._tokens) == room


def test_the_first_tokens_decide_about_the_number_of_codebooks() -> None:
    config = replace(CONFIG, tokens=TokenFormat.codes(4, 50, fewer=True))
    buffer = TokenBuffer(np.zeros((0, 4), np.int32), config)
    buffer.add(config.tokens.checked([[1, 2]]), 0)
    assert buffer.copy(0, 1).tolist() == [[1, 2, NO_CODE, NO_CODE]]
    with pytest.raises(InputError, match="3 codebooks, but the stream began with 2"):
        buffer.add(config.tokens.checked([[1, 2, 3]]), 0)
    assert buffer.received == 1

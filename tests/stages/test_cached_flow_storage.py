"""Cached flow on keys and values in smaller types: the error of the mel."""

from __future__ import annotations

import numpy as np
import pytest

from testkit.utterances import Mel, a_voice, off, portions, some_tokens
from tests.stages.rig import MEL, Parts, flow_mel
from token2wav import StreamConfig
from token2wav.cache.paged_kv_cache import Storage

STORAGES: list[Storage] = ["float32", "float16", "int8", "float8"]
# Of the mel, relative to its deviation; measured 5.6e-5, 1.3e-3 and 7.0e-3.
ERROR = {"float32": 5e-6, "float16": 1.5e-4, "int8": 3e-3, "float8": 1.5e-2}
# Chunks of other lengths round sums differently, and a value beside a rounding step of the storage
# then moves by a whole step. In double precision the chunks make no difference (4e-15); measured in
# single 3e-6 and 3e-5.
CHUNKING = {"float32": 5e-6, "float16": 1e-5, "int8": 1e-4, "float8": 1e-3}


def relative_rms(error: Mel, reference: Mel) -> float:
    return float(np.sqrt(np.square(error).mean()) / reference.std())


@pytest.mark.parametrize("storage", STORAGES)
def test_mel_is_close_and_hardly_depends_on_the_chunks(parts: Parts, storage: Storage) -> None:
    voice, tokens = a_voice(41), some_tokens(210)
    growing = flow_mel(parts, parts.incremental(storage=storage), [tokens], voice)
    by_block = StreamConfig(first_tokens=0, max_hop_tokens=25)
    fixed = flow_mel(
        parts, parts.incremental(storage=storage), portions(tokens, [9]), voice, by_block
    )
    whole = parts.whole(tokens, voice)
    assert relative_rms(growing - whole, whole) <= ERROR[storage]
    assert relative_rms(growing - fixed, whole) <= CHUNKING[storage]
    if storage == "float32":
        assert off(growing, fixed) <= MEL

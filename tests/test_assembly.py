"""Loading of a model: memory that is allocated, and networks that are incomplete."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest

from testkit.models.golden import TINY
from testkit.utterances import a_voice, some_tokens
from token2wav import RuntimeConfig, Token2Wav
from token2wav.cache.states import StateStore
from token2wav.networks.hift import HiFT

STREAMS = 70  # more than a store adds when it grows


def load(streams: int, cache_mib: int = 512) -> Token2Wav:
    runtime = RuntimeConfig(device="cpu", cache_mib=cache_mib)
    return Token2Wav.load(TINY, runtime=runtime, streams=streams)


def stores(model: Token2Wav) -> list[StateStore]:
    return [model.pipeline.flow.states, model.pipeline.vocoder.store]


def addresses(model: Token2Wav) -> list[int]:
    return [table.data_ptr() for store in stores(model) for table in store._all_tables()]


def test_streams_of_the_limit_allocate_no_states() -> None:
    model, voice = load(STREAMS), a_voice(0)
    before = addresses(model)
    with ExitStack() as opened:
        for _ in range(STREAMS):
            opened.enter_context(model.stream(voice)).push(some_tokens(1))
        assert [store.used for store in stores(model)] == [STREAMS + 1, STREAMS]  # and a prompt
        assert addresses(model) == before
        for _ in range(20):  # more than the spare slots for prompts
            opened.enter_context(model.stream(voice)).push(some_tokens(1))
        assert addresses(model) != before


@pytest.mark.parametrize("streams", [0, 10_000])
def test_any_number_of_streams(streams: int) -> None:
    """Streams that the cache has no pages for get no slots, and unprepared streams still run."""
    model = load(streams, cache_mib=8)
    flow, _ = stores(model)
    assert flow._slots <= 1 + 16 + model.pipeline.usage().capacity
    assert len(model.synthesize(some_tokens(30), a_voice(0))) == 30 * 960


def test_a_network_without_the_timing_of_its_audio_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    construct = HiFT.__init__

    def forget(network: HiFT, *arguments: Any, **options: Any) -> None:
        construct(network, *arguments, **options)
        del network.output

    monkeypatch.setattr(HiFT, "__init__", forget)
    with pytest.raises(RuntimeError, match=r"HiFT: the constructor .* must set `output`"):
        load(1)

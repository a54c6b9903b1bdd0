"""Schedule of hops, from the settings of streams and the sizes of a model."""

from __future__ import annotations

import pytest

from tests.support.tiny_model import TINY
from token2wav import ConfigError, StreamConfig
from token2wav.families.cosyvoice3.config import CosyVoice3Config
from token2wav.serving.hops import HopSchedule

CONFIG = CosyVoice3Config.read(TINY)


def test_hops_double_up_to_the_longest() -> None:
    schedule = HopSchedule.of(StreamConfig(), CONFIG)
    assert [schedule.hop(index) for index in range(5)] == [25, 50, 100, 100, 100]


@pytest.mark.parametrize(("withheld_tokens", "expected"), [(0, 6), (3, 6), (4, 7), (10, 13)])
def test_a_first_chunk_has_audio_for_half_of_its_tokens(
    withheld_tokens: int, expected: int
) -> None:
    withheld = withheld_tokens * CONFIG.samples_per_token
    schedule = HopSchedule.of(StreamConfig(first_tokens=6), CONFIG, withheld)
    assert schedule.first_tokens == expected
    assert schedule.least_tokens == 3


def test_no_provisional_chunks_with_fixed_ends() -> None:
    for stream in (StreamConfig(first_tokens=0), StreamConfig(reference=True)):
        assert HopSchedule.of(stream, CONFIG).first_tokens == 0
    assert not HopSchedule.of(StreamConfig(reference=True), CONFIG).adaptive


def test_provisional_chunks_need_no_more_lookahead_than_others() -> None:
    many = StreamConfig(provisional_lookahead_tokens=9)
    assert HopSchedule.of(many, CONFIG).provisional_lookahead == CONFIG.lookahead_tokens == 3


@pytest.mark.parametrize(("longest", "words"), [(90, "is not a multiple"), (0, "is below")])
def test_a_longest_hop_that_cannot_be(longest: int, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"stream\.max_hop_tokens: {longest} {words}"):
        HopSchedule(25, longest, 25)

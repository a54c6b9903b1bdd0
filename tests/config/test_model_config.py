"""Configuration of a model: values of the model, and settings and requests that override them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from token2wav import ConfigError, InputError, StreamConfig
from token2wav.config.block_grid import BlockGrid
from token2wav.config.model_config import ModelConfig
from token2wav.config.token_format import TokenFormat


@dataclass(frozen=True, kw_only=True)
class Config(ModelConfig):
    ode_steps: int = 10
    fixed_steps: bool = False
    left_blocks: int = 2
    adds_noise: bool = False


MODEL = Config(
    tokens=TokenFormat.numbers(6561),
    sample_rate=24_000,
    samples_per_token=960,
    stages=("flow", "vocoder"),
    block_tokens=25,
    lookahead_tokens=3,
)


def test_settings_override_the_values_of_the_model() -> None:
    default = StreamConfig()
    changed = StreamConfig(max_hop_tokens=50, left_blocks=-1, lookahead_frames=4, steps=(4, 10))
    assert (MODEL.hops(default), MODEL.hops(changed)) == ((25, 100), (25, 50))
    assert (MODEL.window(default), MODEL.window(changed)) == (2, -1)
    assert (MODEL.withheld_frames(default), MODEL.withheld_frames(changed)) == (0, 4)
    assert (MODEL.allowed_steps(()), MODEL.allowed_steps(changed.steps)) == ((10,), (4, 10))


def test_a_fixed_list_of_times_allows_no_other_number_of_steps() -> None:
    fixed = replace(MODEL, fixed_steps=True)
    fixed.check(StreamConfig(steps=(10,)))
    with pytest.raises(ConfigError, match=r"stream\.steps: 4, 10, but the model has a fixed list"):
        fixed.check(StreamConfig(steps=(4, 10)))


def test_the_prefix_ends_where_no_later_token_reaches() -> None:
    prefixes = [MODEL.grid(prompt).prefix for prompt in (0, 27, 28, 52, 53)]
    assert prefixes == [0, 0, 25, 25, 50]
    assert MODEL.grid(28, 3) == BlockGrid(25, 28, 25, left_blocks=3)


def test_noise_of_a_request() -> None:
    noisy, quiet = replace(MODEL, adds_noise=True), StreamConfig(decoder_noise=False)
    assert noisy.decoder_noise(None, StreamConfig())
    assert not noisy.decoder_noise(None, quiet)
    assert noisy.decoder_noise(True, quiet)
    with pytest.raises(InputError, match="decoder_noise: given, but the decoder of this model"):
        MODEL.decoder_noise(False, StreamConfig())


def test_a_model_without_a_mel_has_one_speed() -> None:
    MODEL.check_speed(1)
    with pytest.raises(InputError, match=r"^speed: 1\.5, but this model has no mel"):
        MODEL.check_speed(1.5)

"""Codes in a delay pattern: any cut of the rows gives the frames, as in the client."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from testkit.models.folders import write_folder
from testkit.replies import FakeClock, Make, send
from token2wav import InputError, RuntimeConfig, Token2Wav, UtteranceOptions
from token2wav.config.model_config import ModelConfig
from token2wav.config.token_format import TokenFormat
from token2wav.serving.delays import DelayPattern
from token2wav.voice import voice_for
from token2wav_client import CodeAligner

CONFIG = ModelConfig(
    tokens=TokenFormat.codes(3, 16),
    sample_rate=1000,
    samples_per_token=40,
    stages=("decoder",),
)
START, END = 16, 17


def with_tokens(tokens: TokenFormat) -> ModelConfig:
    return replace(CONFIG, tokens=tokens)


def rows_of(frames: Any, delays: tuple[int, ...]) -> Any:
    """Returns two rows of starts, the pattern, and two rows of ends."""
    rows = np.full((len(frames) + max(delays) + 4, len(delays)), END)
    for k, delay in enumerate(delays):
        rows[: delay + 2, k] = START
        rows[delay + 2 : delay + 2 + len(frames), k] = frames[:, k]
    return rows


def frames_of(count: int) -> Any:
    return np.random.default_rng(count).integers(0, 16, (count, 3))


@pytest.mark.parametrize("delays", [(0, 1, 2), (0, 8, 3), (0, 0, 0)])
@pytest.mark.parametrize("count", [0, 1, 7, 30])
@pytest.mark.parametrize("size", [1, 3, 100])
def test_any_cut_gives_the_frames(delays: tuple[int, ...], count: int, size: int) -> None:
    frames = frames_of(count)
    pattern, client = DelayPattern(delays, CONFIG), CodeAligner(delays, codebook_size=16)
    rows = rows_of(frames, delays)
    parts = [rows[start : start + size] for start in range(0, len(rows), size)]
    portions = [pattern.frames(part) for part in parts]
    np.testing.assert_array_equal(np.concatenate(portions), frames)
    for part, portion in zip(parts, portions, strict=True):
        np.testing.assert_array_equal(client.feed(part), portion)
    assert not len(pattern.frames(frames_of(20))) or not count  # rows after the end


def test_a_mark_inside_a_frame_is_the_highest_code_of_its_codebook() -> None:
    rows = rows_of(frames_of(4) % 5, (0, 1, 2))
    rows[4, 1] = END
    uneven = with_tokens(TokenFormat.uneven_codes((16, 9, 5)))
    for config, highest in ((CONFIG, 15), (uneven, 8)):
        assert DelayPattern((0, 1, 2), config).frames(rows)[1, 1] == highest


def test_rows_that_are_refused_change_nothing() -> None:
    frames = frames_of(5)
    pattern = DelayPattern((0, 1, 2), CONFIG)
    rows = rows_of(frames, (0, 1, 2))
    portions = [pattern.frames(rows[:4])]
    for bad, message in (
        ([[1, 2]], "shape"),
        ([[1, 2, -1]], "-1 is below 0"),
        ([[0.5] * 3], "int"),
    ):
        with pytest.raises(InputError, match=f"tokens: .*{message}"):
            pattern.frames(bad)
    portions.append(pattern.frames(rows[4:]))
    np.testing.assert_array_equal(np.concatenate(portions), frames)


@pytest.mark.parametrize(
    ("delays", "config", "message"),
    [
        ((0, 1), CONFIG, "2 given, but the model has 3 codebooks"),
        (
            (),
            with_tokens(TokenFormat.codes(3, 16, fewer=True)),
            "0 given, but .* has 1 to 3 codebooks",
        ),
        ((1, 0, 0), CONFIG, "1, 0, 0; the first must be 0, and all between 0 and 100"),
        ((0, 101, 0), CONFIG, "the first must be 0, and all between 0 and 100"),
        (3, CONFIG, r"shape \(\), expected one dimension"),
        ("0,1,2", CONFIG, r"shape \(\), expected one dimension"),
        ((0, 1.5, 2), CONFIG, "type float64, expected integers"),
        ((0, 2**64, 2), CONFIG, "values do not fit 32 bits"),
        ((0,), with_tokens(TokenFormat.numbers(16)), "a token of this model has no codebooks"),
        ((0, 0, 0), with_tokens(TokenFormat.latents(3)), "this model has no codebooks"),
    ],
)
def test_delays_that_are_refused(delays: Any, config: ModelConfig, message: str) -> None:
    with pytest.raises(InputError, match=f"delays: .*{message}"):
        DelayPattern(delays, config)


def test_a_stream_of_the_library_takes_delayed_codes(tmp_path: Path) -> None:
    """A stream may have fewer codebooks than the model, also in a delay pattern."""
    folder = write_folder("higgs", tmp_path)
    model = Token2Wav.load(folder, runtime=RuntimeConfig(device="cpu"))
    codes = np.random.default_rng(3).integers(0, 16, (30, 3))
    rows = rows_of(codes, (0, 1, 2))
    np.testing.assert_array_equal(
        model.synthesize(rows, options=UtteranceOptions(delays=range(3))), model.synthesize(codes)
    )


def test_a_stream_whose_rows_complete_no_frame_yet_is_not_idle(make: Make, tmp_path: Path) -> None:
    folder, clock = write_folder("higgs", tmp_path), FakeClock()
    model = Token2Wav.load(folder, runtime=RuntimeConfig(device="cpu"))
    workers = make(model, clock=clock, idle_seconds=10.0)
    options = UtteranceOptions(delays=(0, 50, 100))
    utterance = workers.utterances.open(voice_for(model.config, None), options=options)
    for rows in (1, 1, 0):
        send(workers, utterance, np.zeros((rows, 3), int)).succeeded()
        clock.now += 6.0
        workers.utterances.drop_abandoned()
        assert not utterance.over or not rows
    assert "no tokens for 10 s" in utterance.why_closed  # a message without rows does not count

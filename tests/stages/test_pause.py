"""Backend `pause`: chunk lengths of the real stages, time of a batch, and test signal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from testkit.models.codec_models import drawn_tokens
from testkit.models.folders import CPU, write_folder
from testkit.models.golden import TINY
from testkit.models.sized import a_voice
from testkit.models.tiny_model import demo_tokens, demo_voice
from testkit.utterances import Audio, chunks_of, portions, streamed
from token2wav import ConfigError, RuntimeConfig, StreamConfig, Token2Wav, Voice
from token2wav.serving.options import UtteranceOptions
from token2wav.stages.pause import Pause, PauseFlow, PauseVocoder
from token2wav.stages.stage import TokenChunk

PAUSE = RuntimeConfig(device="cpu", backend="pause", pause_batch_ms=0, pause_token_ms=0)
FEW_STEPS = StreamConfig(steps=(2,))
EARLY = StreamConfig(steps=(2,), lookahead_frames=1)  # the end of a chunk is extrapolated
NOBODY = Voice(np.zeros(0, np.int32), np.zeros((0, 80), np.float32), np.zeros(192, np.float32))


# Models, and settings of their streams.
MODELS = [
    ("cosyvoice3", FEW_STEPS),
    ("cosyvoice3", EARLY),
    ("chatterbox", FEW_STEPS),
    ("streamflow", FEW_STEPS),
    *((codec, StreamConfig()) for codec in ("mimi", "snac", "voxcpm", "moss_stereo")),
]


def shapes(
    model: Token2Wav, tokens: NDArray[Any], sizes: Sequence[int], voice: Voice | None
) -> list[tuple[int, ...]]:
    """Returns the shapes of the chunks of a stream whose tokens arrive in portions of these sizes,
    at the pace of speech on a clock of its own.
    """
    now = 0.0
    model.pipeline.clock = lambda: now

    def arriving() -> Iterator[NDArray[Any]]:
        nonlocal now
        for portion in portions(tokens, sizes):
            now += len(portion) / model.config.token_frame_rate
            yield portion

    return [chunk.audio.shape for chunk in chunks_of(model, arriving(), voice)]


@pytest.mark.parametrize(("name", "stream"), MODELS)
def test_chunks_have_the_lengths_of_the_real_stages(
    name: str, stream: StreamConfig, tmp_path: Path
) -> None:
    folder = write_folder(name, tmp_path)
    paused = Token2Wav.load(folder, stream=stream, runtime=PAUSE)
    real = Token2Wav.load(folder, stream=stream, runtime=CPU)
    voice = a_voice(real.config, prompt_tokens=30) if real.config.takes_voice else None
    for count, sizes in (1, [1]), (11, [3]), (140, [9, 1, 30]):
        tokens = drawn_tokens(real.config, count)
        assert shapes(paused, tokens, sizes, voice) == shapes(real, tokens, sizes, voice), count
    assert paused.pipeline._withheld_samples == real.pipeline._withheld_samples


@pytest.fixture(scope="module")
def model() -> Token2Wav:
    return Token2Wav.load(TINY, runtime=PAUSE)


def test_the_signal_depends_on_the_tokens_and_not_on_the_chunks(model: Token2Wav) -> None:
    voice, tokens = demo_voice(30), demo_tokens(90)
    whole: Audio = model.synthesize(tokens, voice)
    for sizes in [1], [7, 2], [90]:
        assert np.array_equal(streamed(model, portions(tokens, sizes), voice), whole)
    levels = whole.reshape(90, 960)
    assert np.ptp(levels, axis=1).max() == 0  # a token is a constant
    assert len(np.unique(levels[:, 0])) == len(np.unique(tokens))
    assert levels.min() >= 0.25
    assert levels.max() <= 0.75


def test_speed_and_whole_mels_have_the_lengths_of_the_real_stages(model: Token2Wav) -> None:
    voice, tokens = demo_voice(30), demo_tokens(30)
    real = Token2Wav.load(TINY, stream=FEW_STEPS, runtime=CPU)
    fast = UtteranceOptions(speed=1.5)
    assert model.synthesize(tokens, voice, fast).shape == real.synthesize(tokens, voice, fast).shape
    mel = model.mel(tokens, voice)
    assert mel.shape == (80, 60)
    assert np.array_equal(model.vocode(mel), model.synthesize(tokens, voice))


def test_a_batch_takes_a_time_and_each_token_some_more(model: Token2Wav, tmp_path: Path) -> None:
    slept = list[float]()
    pause = Pause(5, 0.08, slept.append)
    flow = PauseFlow(model.config, pause)
    tokens = demo_tokens(40)
    batch = [(flow.open(NOBODY), TokenChunk(tokens, 0, count, last=False)) for count in (25, 10)]
    mels = flow.advance(batch)
    assert [mel.shape for mel in mels] == [(80, 50), (80, 20)]
    [mel] = flow.advance([(flow.open(NOBODY), TokenChunk(tokens[:0], 0, 0, last=True))])
    assert mel.shape == (80, 0)
    flow.whole(tokens, NOBODY, streaming=True)

    codec = Token2Wav.load(write_folder("mimi", tmp_path), runtime=PAUSE)
    [real] = codec.pipeline.stages.values()
    decoder = PauseVocoder(real._net, 0, pause)  # type: ignore[attr-defined]
    tokens = drawn_tokens(codec.config, 12)
    decoder.advance([(decoder.open(), TokenChunk(tokens, 0, 10, last=False))])
    steps = model.config.ode_steps
    of_steps = [seconds / steps for seconds in (0.0078, 0.005) for _ in range(steps)]
    assert slept == pytest.approx([*of_steps, 0.0082, 0.0058])


def test_settings_that_do_not_fit_are_refused() -> None:
    reference = StreamConfig(reference=True)
    with pytest.raises(ConfigError, match=r"pause cannot run stream\.reference; set torch"):
        Token2Wav.load(TINY, stream=reference, runtime=PAUSE)
    with pytest.raises(ConfigError, match=r"stream\.lookahead_frames: 9, expected 0 to 4"):
        Token2Wav.load(TINY, stream=StreamConfig(lookahead_frames=9), runtime=PAUSE)


def test_no_weights_are_needed(tmp_path: Path) -> None:
    (tmp_path / "cosyvoice3.yaml").symlink_to(TINY / "cosyvoice3.yaml")
    model = Token2Wav.load(tmp_path, runtime=PAUSE)
    assert model.synthesize(demo_tokens(3), demo_voice(30)).shape == (2880,)

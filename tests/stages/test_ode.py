"""ODE steps in other numbers and at other times, and models without guidance."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from testkit.batches import spoken_together
from testkit.flows import recomputing
from testkit.models.golden import TINY
from testkit.models.tiny_model import one_line
from testkit.utterances import Mel, a_voice, off, some_tokens
from tests.stages.rig import MEL
from token2wav import (
    ConfigError,
    InputError,
    RuntimeConfig,
    StreamConfig,
    Token2Wav,
    UtteranceOptions,
    Voice,
)
from token2wav.assembly import load_network
from token2wav.families.cosyvoice3 import CosyVoice3Config
from token2wav.families.cosyvoice3.noise import load_flow_noise
from token2wav.stages.stage import StreamOptions
from token2wav_export.verify import stream_mel

COSINE, LINEAR, LIST = "'cosine'", "'linear'", "'cosine'\n                times: [0, 0.4, 0.9, 1]"
TOKENS = some_tokens(130)


def edited(folder: Path, scheduler: str = COSINE, guidance: float = 0.7) -> Path:
    """Writes a copy of the tiny model with another schedule and guidance rate."""
    shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns("golden*", "report*"))
    text = (
        (TINY / "cosyvoice3.yaml")
        .read_text()
        .replace("t_scheduler: 'cosine'", f"t_scheduler: {scheduler}")
    )
    (folder / "cosyvoice3.yaml").write_text(
        re.sub("inference_cfg_rate: 0.7", f"inference_cfg_rate: {guidance}", text)
    )
    return folder


def reference(folder: Path, grid: Sequence[float], guidance: float, voice: Voice) -> Mel:
    """Computes a mel by the public call of the estimator, row by row, and Euler's rule."""
    config = CosyVoice3Config.read(folder)
    flow, noise = load_network(folder, config, "flow"), load_flow_noise(folder, config)
    with torch.inference_mode():
        mu = flow.mu(torch.from_numpy(np.concatenate((voice.prompt_tokens, TOKENS)))[None])
        cond = torch.zeros_like(mu)
        cond[0, :, : len(voice.prompt_mel)] = torch.tensor(voice.prompt_mel).T
        spk = flow.speaker(torch.tensor(voice.speaker_embedding))[None]
        x, mask = noise.window(0, mu.shape[2])[None], torch.ones(1, 1, mu.shape[2])
        for t, end in pairwise(grid):
            rows = [
                flow.estimator(
                    x,
                    mask,
                    scale * mu,
                    torch.tensor([t], dtype=torch.float32),
                    scale * spk,
                    scale * cond,
                    streaming=True,
                )
                for scale in (1, 0)
            ]
            x = x + float(end - t) * ((1 + guidance) * rows[0] - guidance * rows[1])
    return x[0, :, len(voice.prompt_mel) :].numpy()


@pytest.mark.parametrize("incremental", [True, False])
@pytest.mark.parametrize(
    ("scheduler", "steps", "grid", "guidance"),
    [
        (COSINE, 5, [1 - np.cos(np.pi / 2 * k / 5) for k in range(6)], 0.7),
        (COSINE, 1, [0, 1], 0.7),
        (LINEAR, 3, [0, 1 / 3, 2 / 3, 1], 0.7),
        (LIST, 3, [0, 0.4, 0.9, 1], 0.7),
        (LIST, 3, [0, 0.4, 0.9, 1], 0.0),
    ],
)
def test_streams_equal_the_public_arithmetic_at_their_times(
    tmp_path: Path,
    scheduler: str,
    steps: int,
    grid: list[float],
    guidance: float,
    incremental: bool,
) -> None:
    folder, voice = edited(tmp_path / "model", scheduler, guidance), a_voice(40)
    stream = StreamConfig(steps=(steps,))
    cached = partial(Token2Wav.load, stream=stream, runtime=RuntimeConfig(cache_mib=64))
    model = cached(folder) if incremental else recomputing(folder, stream)
    expected = reference(folder, grid, guidance, voice)
    # times in float32, rounded in another order
    assert off(model.mel(TOKENS, voice), expected) <= 10 * MEL
    assert off(stream_mel(model, TOKENS, voice, steps), model.mel(TOKENS, voice)) <= MEL
    assert off(stream_mel(model, TOKENS, voice, 0), model.mel(TOKENS, voice, steps=steps)) <= MEL


@pytest.mark.parametrize(
    ("folder_steps", "setting", "expected"),
    [(10, 0, 3), (10, 4, 4), (25, 0, 8), (5, 0, 3), (2, 0, 2), (2, 1, 1), (2, 5, 2)],
)
def test_provisional_chunks_have_three_tenths_of_the_steps(
    folder_steps: int, setting: int, expected: int
) -> None:
    config = CosyVoice3Config.read(TINY)
    assert (
        config.provisional_steps(StreamConfig(provisional_steps=setting), folder_steps) == expected
    )


def test_provisional_chunks_of_a_list_of_times_have_all_steps(tmp_path: Path) -> None:
    config = CosyVoice3Config.read(edited(tmp_path / "model", LIST))
    assert config.provisional_steps(StreamConfig(), config.ode_steps) == config.ode_steps == 3


@pytest.fixture(scope="module")
def model() -> Token2Wav:
    return Token2Wav.load(
        TINY, stream=StreamConfig(steps=(10, 5, 2)), runtime=RuntimeConfig(cache_mib=64)
    )


def test_a_batch_of_different_steps_equals_its_streams_alone(model: Token2Wav) -> None:
    cases = [
        (a_voice(prompt), steps) for prompt, steps in ((30, 10), (30, 5), (75, 2), (30, 5), (0, 10))
    ]
    audio = spoken_together(model.pipeline, [(voice, TOKENS, steps) for voice, steps in cases])
    for samples, (voice, steps) in zip(audio, cases, strict=True):
        assert (
            np.abs(samples - model.synthesize(TOKENS, voice, UtteranceOptions(steps))).max() <= 1e-3
        )
    assert model.pipeline.open_streams == 0


def test_prompts_belong_to_a_number_of_steps_and_share_one_pool(model: Token2Wav) -> None:
    flow, voice = model.pipeline.flow, a_voice(90, seed=5)
    before = flow.usage()
    handles = [flow.open(voice, StreamOptions(steps)) for steps in (10, 5, 5, 2)]
    after = flow.usage()
    assert after.prompt_misses - before.prompt_misses == 3
    assert after.prompt_hits - before.prompt_hits == 1
    assert after.shared - before.shared == after.shared - after.idle == 3 * 3
    assert after.capacity == before.capacity
    for handle in handles:
        flow.close(handle)
    flow.close(handles[0])
    # prompts stay for every number of steps
    assert flow.usage().used == flow.usage().shared == flow.usage().idle
    assert flow.open_streams == 0


def test_no_guidance_has_no_unconditional_rows(tmp_path: Path) -> None:
    folder = edited(tmp_path / "model", guidance=0)
    with_guidance, without = (
        Token2Wav.load(path, runtime=RuntimeConfig(cache_mib=64)) for path in (TINY, folder)
    )
    assert (
        2 * without.pipeline.flow.usage().page_bytes
        == with_guidance.pipeline.flow.usage().page_bytes
    )


def test_steps_that_are_not_allowed(model: Token2Wav) -> None:
    for call in (
        lambda: model.stream(a_voice(30), UtteranceOptions(7)),
        lambda: model.mel(TOKENS, a_voice(30), steps=7),
        lambda: model.synthesize(TOKENS, a_voice(30), UtteranceOptions(-1)),
    ):
        with pytest.raises(InputError, match=r"steps: -?\d is not one of 10, 5, 2"):
            call()


WRONG = {
    "twice": (COSINE, (5, 5), "stream.steps[1]: 5 appears more than once"),
    "none": (COSINE, (0,), "stream.steps[0]: 0 is not between 1 and 100"),
    "many": (COSINE, (10, 101), "stream.steps[1]: 101 is not between 1 and 100"),
    "distilled": (
        LIST,
        (10,),
        "stream.steps: 10, but the model has a fixed list of times for 3 steps only",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_schedule_that_cannot_be(tmp_path: Path, name: str) -> None:
    scheduler, steps, message = WRONG[name]
    folder = edited(tmp_path / "model", scheduler)
    with pytest.raises(ConfigError) as caught:
        Token2Wav.load(folder, stream=StreamConfig(steps=steps))
    assert message in one_line(caught.value)


def test_a_folder_can_say_its_own_number_of_steps(tmp_path: Path) -> None:
    folder = edited(tmp_path / "model", f"{COSINE}\n                n_timesteps: 4")
    assert Token2Wav.load(folder).pipeline.steps == (4,)

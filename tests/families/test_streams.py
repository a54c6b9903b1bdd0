"""Contract of flows with a cache: streams equal the whole, alone, in batches and without cache.

The rows are the families, and CosyVoice3 with several codes for each token and with a BigVGAN.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from testkit.batches import WHOLE_BLOCKS
from testkit.models.codec_models import drawn_tokens
from testkit.models.folders import CACHING, CPU, write_folder
from testkit.models.golden import snr_db
from testkit.models.sized import a_voice
from testkit.models.tiny_model import ODE_STEPS
from testkit.utterances import off, streamed, streamed_mels
from token2wav import RuntimeConfig, StreamConfig, Token2Wav
from token2wav.serving.chunking import Chunker
from token2wav.serving.hops import HopSchedule

MEL = 2e-5  # tolerance between float32 results with values up to 7
AUDIO = 1e-4
# Weights that turn the ODE time into shifts, scales and gates.
OF_TIME = re.compile(r"time_|t_embedder|attn_norm|norm_out|adaLN|\.0\.mlp\.1\.")
SNR_DB = 40  # end to end, because F0 turns rounding of the mel into phase


@pytest.fixture(
    scope="module", params=[*CACHING, "cosyvoice3", "codebooks", "joined_codebooks", "bigvgan"]
)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(family, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def few_steps(family: str) -> StreamConfig:
    """Default settings with few ODE steps. Turbo always has two."""
    return StreamConfig(steps=() if family == "turbo" else (ODE_STEPS,))


@pytest.fixture(scope="module")
def model(folder: Path, few_steps: StreamConfig) -> Token2Wav:
    stream = replace(few_steps, first_tokens=WHOLE_BLOCKS.first_tokens)
    return Token2Wav.load(folder, stream=stream, runtime=CPU)


@pytest.fixture(scope="module")
def windowed(folder: Path, few_steps: StreamConfig) -> Callable[[int | None], Token2Wav]:
    """Returns the model with an attention window of so many blocks; otherwise with its defaults."""
    return cache(
        lambda left_blocks: Token2Wav.load(
            folder, stream=replace(few_steps, left_blocks=left_blocks), runtime=CPU
        )
    )


@pytest.mark.parametrize("left_blocks", [-1, 1, None])
@pytest.mark.parametrize(("prompt", "count"), [(0, 53), (1, 1), (30, 128)])
def test_a_streamed_mel_is_that_of_the_whole(
    windowed: Callable[[int | None], Token2Wav], left_blocks: int | None, prompt: int, count: int
) -> None:
    model = windowed(left_blocks)
    voice, tokens = a_voice(model.config, 1, prompt), drawn_tokens(model.config, count)
    [mel] = streamed_mels(model, (tokens, voice))
    assert off(mel, model.mel(tokens, voice)) <= MEL


def test_a_window_changes_the_mel(windowed: Callable[[int | None], Token2Wav]) -> None:
    narrow, wide = windowed(1), windowed(-1)
    voice, tokens = a_voice(wide.config, 1, 30), drawn_tokens(wide.config, 130)
    assert off(narrow.mel(tokens, voice), wide.mel(tokens, voice)) > 0.01


def test_portions_do_not_matter(model: Token2Wav) -> None:
    voice, tokens = a_voice(model.config, 1, 30), drawn_tokens(model.config, 130)
    whole = model.synthesize(tokens, voice)
    assert len(whole) == model.config.samples_per_token * len(tokens)
    for seed in range(2):
        cuts = np.sort(np.random.default_rng(seed).integers(0, len(tokens), 9))
        assert off(streamed(model, np.split(tokens, cuts), voice), whole) <= AUDIO
    assert snr_db(whole, model.vocode(model.mel(tokens, voice))) > SNR_DB


def test_voices_and_lengths_mix_in_a_batch(model: Token2Wav) -> None:
    utterances = [
        (drawn_tokens(model.config, count), a_voice(model.config, prompt, prompt))
        for prompt, count in ((0, 60), (30, 90), (1, 41), (75, 110))
    ]
    for utterance, mel in zip(utterances, streamed_mels(model, *utterances), strict=True):
        [alone] = streamed_mels(model, utterance)
        assert off(mel, alone) <= MEL


def test_a_loaded_flow_has_no_weights_of_the_time(model: Token2Wav) -> None:
    """Tables of the solver replace them: 43 % of the weights of CosyVoice3."""
    flow: Any = model.pipeline.flow
    names = [name for name, _ in flow._encoder.estimator.named_parameters()]
    assert names
    assert not [name for name in names if OF_TIME.search(name)]


def test_prompts_are_shared(model: Token2Wav) -> None:
    flow, voice = model.pipeline.flow, a_voice(model.config, 5, 75)
    hits = flow.usage().prompt_hits
    with model.stream(voice), model.stream(voice):
        assert flow.usage().prompt_hits == hits + 1
    assert model.pipeline.open_streams == 0


def test_a_full_cache(
    folder: Path, few_steps: StreamConfig, windowed: Callable[[int | None], Token2Wav]
) -> None:
    """A stream without room in the cache continues by recomputing, with the same result."""
    roomy, unbounded = windowed(-1), replace(few_steps, left_blocks=-1)
    voice, tokens = a_voice(roomy.config, 1, 30), drawn_tokens(roomy.config, 150)
    grid = roomy.config.grid(len(voice.prompt_tokens))
    # of the prompt, and those that a stream takes when it opens
    pages = grid.prefix_blocks + 3 + roomy.config.hop_blocks[0]
    room = pages * roomy.pipeline.flow.usage().page_bytes
    small = RuntimeConfig(device="cpu", cache_mib=-(-room >> 20))
    model = Token2Wav.load(folder, stream=unbounded, runtime=small)
    [mel] = streamed_mels(model, (tokens, voice))
    assert off(mel, roomy.mel(tokens, voice)) <= MEL
    assert model.pipeline.flow.usage().used == model.pipeline.flow.usage().shared


@pytest.mark.parametrize("prompt", [0, 30, 75])
def test_provisional_audio_leaves_no_trace_in_later_blocks(
    windowed: Callable[[int | None], Token2Wav], prompt: int
) -> None:
    model = windowed(None)
    voice, tokens, flow = (
        a_voice(model.config, 1, prompt),
        drawn_tokens(model.config, 120),
        model.pipeline.flow,
    )
    ratio = model.config.token_mel_ratio
    held = model.pipeline.stages["vocoder"].withheld_samples
    schedule = HopSchedule.of(StreamConfig(), model.config, held)
    chunker, handle = Chunker(voice.prompt_tokens, model.config, schedule), flow.open(voice)
    mels, provisional = [], 0
    first = schedule.first_tokens + schedule.provisional_lookahead
    for portion in np.split(tokens, [first, first + 1, 40]):
        chunker.push(portion, end=chunker.new_tokens >= 40)
        while (chunk := chunker.next_chunk) is not None:
            [mel] = flow.advance([(handle, chunk)])
            mels.append(mel.numpy()[:, ratio * chunk.skip :])
            provisional = chunk.stop - prompt if chunk.provisional else provisional
            chunker.finish_chunk()
    flow.close(handle)
    assert provisional == schedule.first_tokens
    spoken, whole = np.concatenate(mels, axis=1), model.mel(tokens, voice)
    frames = ratio * provisional
    assert spoken.shape == whole.shape
    assert off(spoken[:, frames:], whole[:, frames:]) <= MEL
    assert off(spoken[:, :frames], whole[:, :frames]) > MEL


@pytest.mark.parametrize("lookahead_frames", [0, 3])
def test_the_first_chunk_has_audio(folder: Path, lookahead_frames: int) -> None:
    """The vocoder holds back the audio of up to 10 tokens, so the first chunk has more tokens."""
    settings = StreamConfig(lookahead_frames=lookahead_frames)
    model = Token2Wav.load(folder, stream=settings, runtime=CPU)
    held = model.pipeline.stages["vocoder"].withheld_samples
    schedule = HopSchedule.of(settings, model.config, held)
    tokens = drawn_tokens(model.config, schedule.first_tokens + schedule.provisional_lookahead)
    with model.stream(a_voice(model.config, 1, 30)) as stream:
        assert not list(stream.push(tokens[:-1]))
        [chunk] = stream.push(tokens[-1:])
    assert len(chunk.audio) >= model.config.samples_per_token * settings.first_tokens / 2

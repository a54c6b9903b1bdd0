"""Stages of the ensemble on a batch: the library's audio; bad numbers fail only their stream."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from examples import demo
from testkit.batches import WHOLE_BLOCKS
from testkit.models.codec_models import CODECS
from testkit.models.family_golden import FamilyGolden
from testkit.models.tiny_model import TINY, FaultyVocoder, demo_tokens, demo_voice, schedule_of
from token2wav import AudioChunk, Token2Wav, Voice
from token2wav.assembly import withheld_samples
from token2wav.config import RuntimeConfig, ServerConfig, StreamConfig
from token2wav.errors import BackendError, CheckpointError, ConfigError, StreamClosedError
from token2wav.published.registry import read_config
from token2wav.serving.audio_output import AudioFormat
from token2wav.serving.chunking import Chunker
from token2wav.serving.options import UtteranceOptions
from token2wav.stages.stage import FrameChunk, TokenChunk
from token2wav_server.ensemble.stage_streams import Label
from token2wav_server.ensemble.stages import (
    FlowContent,
    FlowStage,
    VocoderStage,
    load_flow,
    load_vocoder,
)

LABEL = Label(1, 0, last=False, audio_format=AudioFormat())


def contents(
    model: Token2Wav, tokens: NDArray[np.int32], voice: Voice, steps: int = 0
) -> list[FlowContent]:
    """Returns the chunks of a whole utterance, as the accumulator sends them."""
    chunker = Chunker(voice.prompt_tokens, model.config, schedule_of(model.config))
    chunker.push(tokens, end=True)
    flow_contents: list[FlowContent] = []
    while (chunk := chunker.next_chunk) is not None:
        flow_contents.append(FlowContent(chunk, None if flow_contents else voice, steps))
        chunker.finish_chunk()
    return flow_contents


@pytest.fixture(scope="module")
def two_steps() -> Token2Wav:
    """The tiny model, whose streams may choose 2 ODE steps, and have 4 by default."""
    return Token2Wav.load(TINY, stream=replace(WHOLE_BLOCKS, steps=(4, 2)))


@pytest.mark.parametrize(("prompt_tokens", "steps"), [(0, 0), (25, 2), (30, 0)])
def test_stages_give_the_audio_of_the_library(
    two_steps: Token2Wav, prompt_tokens: int, steps: int
) -> None:
    model, tokens, voice = two_steps, demo_tokens(90), demo_voice(prompt_tokens)
    flow, vocoder = FlowStage(model), VocoderStage(model)
    chunks = contents(model, tokens, voice, steps)
    assert len(chunks) > 1
    flow_state, vocoder_state = (
        flow.open(LABEL, chunks[0]),
        vocoder.open(LABEL, FrameChunk(torch.zeros(80, 0), last=False)),
    )
    audio = []
    for content in chunks:
        [mel] = flow.advance([(flow_state, content)])
        assert not isinstance(mel, BackendError)
        [chunk] = vocoder.advance(
            [(vocoder_state, FrameChunk(torch.from_numpy(mel).T, content.chunk.last))]
        )
        assert isinstance(chunk, AudioChunk)
        audio.append(chunk.audio)
    flow.close(flow_state)
    vocoder.close(vocoder_state)
    expected = model.synthesize(tokens, voice, UtteranceOptions(steps))
    assert np.array_equal(np.concatenate(audio), expected)
    assert model.pipeline.open_streams == 0


def test_broken_audio_is_found_and_stays_with_its_stream(
    faulty: tuple[Token2Wav, FaultyVocoder],
) -> None:
    model, engine = faulty
    stage = VocoderStage(model)
    mel = FrameChunk(torch.zeros(80, 40), last=True)
    states = [stage.open(LABEL, mel) for _ in range(2)]
    engine.fault = float("nan")
    broken, whole = stage.advance([(state, mel) for state in states])
    assert isinstance(broken, BackendError)
    assert str(broken) == "backend: the model produced NaN or infinite audio"
    assert not isinstance(whole, BackendError)
    for state in states:
        stage.close(state)


def test_first_chunk_without_a_voice_is_refused(model: Token2Wav) -> None:
    flow = FlowStage(model)
    with pytest.raises(StreamClosedError, match="the first chunk of the stream has no voice"):
        flow.open(LABEL, FlowContent(TokenChunk(demo_tokens(28), 0, 25, last=False), None))


@pytest.mark.parametrize("lookahead_frames", [0, 2])
def test_held_samples_are_the_audio_that_the_vocoder_keeps(lookahead_frames: int) -> None:
    """The mel is loud, so that no silence is trimmed."""
    stream = StreamConfig(lookahead_frames=lookahead_frames)
    model = Token2Wav.load(TINY, stream=stream)
    stage = VocoderStage(model)
    mel = FrameChunk(torch.zeros(80, 50), last=False)
    state = stage.open(LABEL, mel)
    [chunk] = stage.advance([(state, mel)])
    stage.close(state)
    assert isinstance(chunk, AudioChunk)
    missing = 50 * model.config.samples_per_token // model.config.token_mel_ratio - len(chunk.audio)
    assert missing == model.pipeline.stages["vocoder"].withheld_samples > 0
    assert missing == withheld_samples(model.config, stream)


def test_a_codec_has_no_flow(tmp_path: Path) -> None:
    folder = CODECS["mimi"].write(tmp_path, FamilyGolden("mimi", "tiny"))
    with pytest.raises(ConfigError, match="has no flow stage, only decoder; serve it without the"):
        load_flow(folder, ServerConfig())


def test_the_ensemble_has_one_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(read_config(TINY)), "channels", 2)
    with pytest.raises(ConfigError, match="has 2 channels, but the ensemble has 1; serve it with"):
        load_flow(TINY, ServerConfig())


def test_the_vocoder_needs_no_pages_for_the_window_of_the_flow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The cache of 1 MiB has room for less, and the vocoder's process makes none."""
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)  # the limit is for a process
    server = ServerConfig(
        stream=StreamConfig(left_blocks=500, max_hop_tokens=5000),
        runtime=RuntimeConfig(cache_mib=1),
    )
    with pytest.raises(ConfigError, match="500 past blocks and a chunk of 5000 tokens need"):
        load_flow(TINY, server)
    assert isinstance(load_vocoder(TINY, server), VocoderStage)


def test_the_vocoder_trims_as_much_silence_as_the_settings_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    server = ServerConfig(stream=StreamConfig(trim_silence_ms=500))
    stage = load_vocoder(demo.MODEL, server)
    silence = FrameChunk(torch.full((80, 50), -12.0), last=True)  # a second
    state = stage.open(LABEL, silence)
    [chunk] = stage.advance([(state, silence)])
    stage.close(state)
    assert isinstance(chunk, AudioChunk)
    assert (chunk.samples_trimmed, len(chunk.audio)) == (12_000, 12_000)


def test_a_process_reads_the_weights_of_its_stage_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    folder = shutil.copytree(TINY, tmp_path / "model")
    next(folder.glob("flow.*")).unlink()
    assert isinstance(load_vocoder(folder, ServerConfig()), VocoderStage)
    with pytest.raises(CheckpointError, match="flow"):
        load_flow(folder, ServerConfig())

"""A StreamFlow folder: the values that its YAML may have, and the library on such a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from testkit.models.streamflow_model import (
    SAMPLE_RATE,
    SAMPLES_PER_TOKEN,
    a_voice,
    write_model,
)
from testkit.utterances import chunks_of, joined
from token2wav import ConfigError, InputError, RuntimeConfig, StreamConfig, Token2Wav, Voice
from token2wav.families.streamflow import GuidedFlowConfig, StreamFlowConfig
from token2wav.families.streamflow.flow import WindowFlow
from token2wav.published.sizes import GuidedAttention

AUDIO = 1e-4
CPU = RuntimeConfig(device="cpu")
TOKENS = np.random.default_rng(3).integers(0, 6561, 100).astype(np.int32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "streamflow")


def written(folder: Path, target: Path, **flow: Any) -> Path:
    """Writes the folder's YAML with other values, beside its vocoder and without weights."""
    document = yaml.safe_load((folder / "streamflow.yaml").read_text())
    document["flow"].update(flow)
    (target / "streamflow.yaml").write_text(yaml.safe_dump(document))
    (target / "bigvgan").symlink_to(folder / "bigvgan")
    return target


def test_defaults_are_the_published_sizes(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "streamflow.yaml").write_text(
        "sample_rate: 16000\nflow: {type: streamflow}\nvocoder: {type: bigvgan, folder: bigvgan}\n"
    )
    (tmp_path / "bigvgan").symlink_to(folder / "bigvgan")
    config = StreamFlowConfig.read(tmp_path)
    flow, estimator = config.flow, config.flow.estimator
    assert isinstance(flow, GuidedFlowConfig)
    assert flow.guided == GuidedAttention.assigned(22, (7, 14), (1,))
    assert (estimator.dim, estimator.depth, estimator.heads) == (1024, 22, 16)
    assert (estimator.static_chunk_size, flow.n_timesteps, flow.inference_cfg_rate) == (24, 10, 0.5)
    assert (flow.mel_bands, flow.token_mel_ratio, config.samples_per_token) == (80, 4, 640)
    assert (config.sample_rate, config.token_frame_rate) == (16000, 25)
    assert config.hops(StreamConfig()) == (12, 12)
    assert (flow.past_tokens, flow.lookahead_tokens) == (12, 6)


def test_an_engine_that_cannot_run_streamflow_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"runtime\.backend: onnx cannot run guided attention"):
        Token2Wav.load(folder, runtime=RuntimeConfig(device="cpu", backend="onnx"))


def test_streams_of_one_step_are_the_whole(folder: Path) -> None:
    """A window contains every frame that one evaluation depends on."""
    model, voice = Token2Wav.load(folder, stream=StreamConfig(steps=(1,)), runtime=CPU), a_voice()
    assert isinstance(model.pipeline.flow, WindowFlow)
    chunks = chunks_of(model, np.array_split(TOKENS, 9), voice)
    audio = joined(chunks)
    assert len(audio) == len(TOKENS) * SAMPLES_PER_TOKEN
    assert {chunk.sample_rate for chunk in chunks} == {SAMPLE_RATE}
    assert np.abs(audio - model.vocode(model.mel(TOKENS, voice))).max() <= AUDIO
    assert np.abs(audio).max() > 0.01
    assert model.pipeline.open_streams == 0


def test_no_guidance_has_no_unconditional_rows(folder: Path, tmp_path: Path) -> None:
    unguided = written(folder, tmp_path, inference_cfg_rate=0, t_scheduler="linear")
    (tmp_path / "flow.safetensors").symlink_to(folder / "flow.safetensors")
    model = Token2Wav.load(unguided, stream=StreamConfig(steps=(1,)), runtime=CPU)
    audio = model.synthesize(TOKENS[:70], a_voice())
    assert np.abs(audio - model.vocode(model.mel(TOKENS[:70], a_voice()))).max() <= AUDIO


def test_a_voice_with_a_prompt_is_refused(folder: Path) -> None:
    model = Token2Wav.load(folder, runtime=CPU)
    voice = Voice(np.arange(5), np.zeros((20, 80), np.float32), np.ones(192, np.float32))
    with pytest.raises(
        InputError, match="prompt_tokens: 5 tokens, expected 0; this model uses a speaker embedding"
    ):
        model.stream(voice)

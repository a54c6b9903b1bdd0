"""StreamFlow: the values of its YAML, streams in windows, and batches of fixed size as CUDA graphs
compute them. `../qwen25_omni` compares the same windows with public code.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from testkit.graph_pool import PoolWithoutGraphs
from testkit.models.sized import a_voice
from testkit.models.streamflow_model import SAMPLE_RATE, SAMPLES_PER_TOKEN, write_model
from testkit.utterances import chunks_of, joined, off, some_tokens, streamed_mels
from token2wav import ConfigError, InputError, RuntimeConfig, StreamConfig, Token2Wav, Voice
from token2wav.families.streamflow import GuidedFlowConfig, StreamFlowConfig, flow
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
    values, estimator = config.flow, config.flow.estimator
    assert isinstance(values, GuidedFlowConfig)
    assert values.guided == GuidedAttention.assigned(22, (7, 14), (1,))
    assert (estimator.dim, estimator.depth, estimator.heads) == (1024, 22, 16)
    assert estimator.static_chunk_size == 24
    assert (values.n_timesteps, values.inference_cfg_rate) == (10, 0.5)
    assert (values.mel_bands, values.token_mel_ratio, config.samples_per_token) == (80, 4, 640)
    assert (config.sample_rate, config.token_frame_rate) == (16000, 25)
    assert config.hops(StreamConfig()) == (12, 12)
    assert (values.past_tokens, values.lookahead_tokens) == (12, 6)
    wider = GuidedAttention.assigned(22, (7, 14), (1, 22))
    assert (wider.past_blocks, wider.future_blocks) == (2, 2)


@pytest.mark.parametrize("settings", [{"left_blocks": 3}, {"reference": True}], ids=str)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], folder: Path) -> None:
    [(name, value)] = settings.items()
    message = rf"stream\.{name}: {value} cannot be combined with guided attention"
    with pytest.raises(ConfigError, match=message):
        Token2Wav.load(folder, stream=StreamConfig(**settings), runtime=CPU)


def test_an_engine_that_cannot_run_streamflow_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"runtime\.backend: onnx cannot run guided attention"):
        Token2Wav.load(folder, runtime=RuntimeConfig(device="cpu", backend="onnx"))


def test_streams_of_one_step_are_the_whole(folder: Path) -> None:
    """A window contains every frame that one evaluation depends on."""
    model = Token2Wav.load(folder, stream=StreamConfig(steps=(1,)), runtime=CPU)
    voice = a_voice(model.config)
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
    voice = a_voice(model.config)
    audio = model.synthesize(TOKENS[:70], voice)
    assert np.abs(audio - model.vocode(model.mel(TOKENS[:70], voice))).max() <= AUDIO


def test_a_voice_with_a_prompt_is_refused(folder: Path) -> None:
    model = Token2Wav.load(folder, runtime=CPU)
    voice = Voice(np.arange(5), np.zeros((20, 80), np.float32), np.ones(192, np.float32))
    with pytest.raises(
        InputError, match="prompt_tokens: 5 tokens, expected 0; this model uses a speaker embedding"
    ):
        model.stream(voice)


def with_graphs(folder: Path, device: str) -> Token2Wav:
    """Returns the model with windows in batches of fixed size, without graphs on a CPU."""
    runtime = RuntimeConfig(device=device, precision="float32")
    model = Token2Wav.load(folder, runtime=runtime)
    if device == "cpu":
        pool = PoolWithoutGraphs(runs=3)
        eager: Any = model.pipeline.flow
        captured = WindowFlow(
            model.config,
            eager._encoder,
            eager._noise,
            eager._solvers,
            eager._past_tokens,
            graphs=pool,
            longest_hop=model.config.hops(StreamConfig())[1],
        )
        model.pipeline.stages = {**model.pipeline.stages, "flow": captured}
        assert pool.captures == 2
    return model


# Libraries round products of other shapes differently, on a GPU more than on a CPU.
@pytest.mark.parametrize(
    ("device", "mel_error"), [("cpu", 1e-5), pytest.param("cuda", 1e-4, marks=pytest.mark.gpu)]
)
def test_windows_in_graphs_equal_eager_windows(
    device: str, mel_error: float, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First, inner and last windows of any length run in one batch. Five streams need two batches,
    and unused rows keep the windows of earlier batches. A whole utterance fits no graph.
    """
    monkeypatch.setattr(flow, "CAPTURED_WINDOWS", (1, 4))
    eager, model = Token2Wav.load(folder, runtime=CPU), with_graphs(folder, device)
    counts = (36, 24, 39, 1, 41)
    utterances = [(some_tokens(count), a_voice(model.config, count)) for count in counts]
    expected = [streamed_mels(eager, utterance)[0] for utterance in utterances]
    for together in (range(len(counts)), [3], [0, 2]):
        mels = streamed_mels(model, *(utterances[index] for index in together))
        for index, mel in zip(together, mels, strict=True):
            assert off(mel, expected[index]) <= mel_error
    tokens, voice = some_tokens(90), a_voice(model.config)
    assert off(model.mel(tokens, voice), eager.mel(tokens, voice)) <= mel_error

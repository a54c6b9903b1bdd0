"""Qwen2.5-Omni: whole utterances against `transformers`, streams in windows, and its voices."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from testkit.captured_code import NothingCopied, OnDevice
from testkit.models.family_golden import FamilyGolden
from testkit.models.folders import golden_of, write_folder
from testkit.models.qwen25_omni_model import SPEAKERS, a_voice, speakers
from testkit.utterances import off, portions, some_tokens, streamed, streamed_mels
from token2wav import CheckpointError, RuntimeConfig, StreamConfig, Token2Wav, Voice
from token2wav.assembly import assemble, load_network
from token2wav.config.token_format import TokenFormat
from token2wav.execution.buckets import PaddedSize
from token2wav.families.qwen25_omni import Qwen25OmniConfig
from token2wav.families.qwen25_omni.family import FAMILY
from token2wav.families.qwen25_omni.voices import named_voices, write_voices
from token2wav.families.streamflow.solver import GuidedSolver
from token2wav.families.streamflow.window_batch import WindowBatch
from token2wav.networks.masks import guided_biases
from token2wav.networks.noise import FlowNoise
from token2wav.networks.ode import EulerSolver
from token2wav.published.registry import read_config

CPU = RuntimeConfig(device="cpu")
PARITY = 2e-5  # of float32 with values up to 5, after 36 evaluations
CLOSE = 1e-5  # of float32 in batches of other shapes
AUDIO = 2e-5
TIME = 0.3  # of the single evaluation in the golden set
SIZES = ["tiny", "small"]


@pytest.fixture(scope="module", params=SIZES)
def golden(request: pytest.FixtureRequest) -> FamilyGolden:
    return golden_of("qwen25_omni", request.param)


@pytest.fixture(scope="module")
def folder(golden: FamilyGolden, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder("qwen25_omni", tmp_path_factory.mktemp("omni"), golden.size)


@pytest.fixture(scope="module")
def model(folder: Path) -> Token2Wav:
    return Token2Wav.load(folder, runtime=CPU)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder("qwen25_omni", tmp_path_factory.mktemp("omni"))


def widened(folder: Path, factor: int, *steps: int) -> Token2Wav:
    """Returns the model with windows that have more blocks on both sides."""
    config: Any = read_config(folder)
    flow = dataclasses.replace(config.flow, widening=factor)
    config = Qwen25OmniConfig.of(flow, config.vocoder, schedule=config.schedule)
    stream = StreamConfig(steps=steps)
    return Token2Wav(config, assemble(folder, config, stream, CPU), stream, "widened")


def codes_of(config: Any, count: int, seed: int = 0) -> Any:
    return some_tokens(count, seed, vocabulary=config.flow.vocab_size)


PUBLISHED = """
model_type: qwen2_5_omni
token2wav_config:
  dit_config:
    {_attn_implementation_autoset: true, architectures: null, initializer_range: 0.02,
     torch_dtype: float32, use_cache: true, model_type: qwen2_5_omni_dit, dim: 1024, depth: 22,
     heads: 16, head_dim: 64, ff_mult: 2, dropout: 0.1, emb_dim: 512, enc_attention_channels: 64,
     enc_channels: [256, 256, 256, 256, 768], enc_dilations: [1, 2, 3, 4, 1], enc_dim: 128,
     enc_emb_dim: 192, enc_global_context: true, enc_kernel_sizes: [5, 3, 3, 3, 1],
     enc_lin_neurons: 192, enc_res2net_scale: 2, enc_se_channels: 64, long_skip_connection: false,
     max_position_embeddings: 32768, mel_dim: 80, num_embeds: 8193, repeats: 2,
     rope_parameters: {rope_type: default, rope_theta: 10000.0}, rope_scaling: null,
     rope_theta: 10000.0}
  bigvgan_config:
    {_attn_implementation_autoset: true, architectures: null, initializer_range: 0.02,
     torch_dtype: float32, use_cache: true, model_type: qwen2_5_omni_bigvgan,
     activation: snakebeta, snake_logscale: true, use_bias_at_final: false,
     use_tanh_at_final: false}
"""


def test_published_sizes(tmp_path: Path) -> None:
    """The published file has older names of three sizes, and leaves the attention masks out. Other
    files have more keys, with one possible value or without effect.
    """
    (tmp_path / "config.json").write_text(json.dumps(yaml.safe_load(PUBLISHED)))
    config: Any = read_config(tmp_path)
    assert (config.token_frame_rate, config.sample_rate, config.samples_per_token) == (
        50,
        24000,
        480,
    )
    assert (config.tokens, config.speaker_size) == (TokenFormat.numbers(8193), 192 + 128)
    assert (config.block_tokens, config.flow.past_tokens, config.lookahead_tokens) == (12, 24, 12)
    assert config.hops(StreamConfig()) == (36, 36)
    assert config.ode_steps == 9
    masks = config.flow.guided.layers
    assert [index for index, mask in enumerate(masks) if mask == "backward"] == [0, 20]
    assert [index for index, mask in enumerate(masks) if mask == "forward"] == [10]


def test_ecapa_equals_the_public_code(golden: FamilyGolden, folder: Path) -> None:
    voice = a_voice(folder)
    expected = torch.cat((golden["cond"][0], golden["ecapa"]))
    assert off(voice.speaker_embedding, expected.numpy()) <= PARITY


def test_one_evaluation_equals_the_public_code(golden: FamilyGolden, folder: Path) -> None:
    config: Any = read_config(folder)
    flow = load_network(folder, config, "flow")
    estimator, expected = flow.estimator, golden["velocity"]
    frames = expected.shape[2]
    voice = torch.tensor(a_voice(folder).speaker_embedding)[None]
    biases = guided_biases(config.flow.guided, frames, estimator.block_frames)
    with torch.inference_mode():
        conditions = estimator.project_conditions(flow.mu(golden["codes"][None].int()), voice, None)
        both = torch.cat((conditions, flow.unconditional().expand_as(conditions)))
        noise = FlowNoise(config.mel_bands).window(0, frames)[None]
        time = torch.tensor([TIME])
        velocity, later = (
            estimator.velocity(
                noise.expand(2, -1, -1),
                both,
                estimator.modulation(at),
                biases,
                rope=estimator.rope(torch.arange(frames)),
            )
            for at in (time, torch.nextafter(time, torch.ones(1)))
        )
    # The estimator takes sines of 1000 times the time. CPUs round their frequencies differently,
    # and the least change of the time changes the velocity of these small networks by 1e-4 to 3e-4.
    assert off(velocity, expected) <= PARITY + off(later, velocity)
    assert off(later, velocity) <= 5e-4


def test_whole_utterances_equal_the_public_code(
    golden: FamilyGolden, model: Token2Wav, folder: Path
) -> None:
    mel = model.mel(golden["codes"].numpy(), a_voice(folder))
    assert off(mel, golden["mel"].numpy()) <= PARITY
    audio = golden["audio"].numpy()
    assert off(model.vocode(mel), audio) <= AUDIO
    assert 0.1 < np.abs(audio).max() < 1


def test_portions_do_not_matter(model: Token2Wav, folder: Path) -> None:
    voice, tokens = a_voice(folder), codes_of(model.config, 61)
    expected = model.synthesize(tokens, voice)
    assert len(expected) == len(tokens) * model.config.samples_per_token
    for size in (1, 7):
        assert off(streamed(model, portions(tokens, [size]), voice), expected) <= AUDIO


def test_a_window_with_the_reach_of_all_evaluations_is_exact(tiny: Path) -> None:
    """Two steps have 8 evaluations, which reach 8 times as far as one."""
    model, voice = widened(tiny, 8, 2), a_voice(tiny)
    # 2 * 8 blocks before a chunk, the chunk, and 8 blocks after it
    tokens = codes_of(model.config, 3 * (16 + 3 + 8 + 15) + 1)
    [mel] = streamed_mels(model, (tokens, voice))
    assert off(mel, model.mel(tokens, voice)) <= 2 * CLOSE


def test_captured_code_never_synchronizes(tiny: Path) -> None:
    config: Any = read_config(tiny)
    with torch.device("meta"):
        flow: Any = FAMILY.network(config, "flow").eval().requires_grad_(False)
    solver = EulerSolver(flow.estimator, 2, 0.5, config.schedule)
    windows = GuidedSolver(flow.estimator, solver.tables, flow.unconditional())
    noise = FlowNoise(config.mel_bands).to(torch.device("meta"))
    batch = WindowBatch(PaddedSize(6 * config.block_tokens, 2), flow, noise, windows)
    with NothingCopied(), OnDevice():
        batch.compute()


def test_voices_of_a_folder(tiny: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "token2wav.families.qwen25_omni.voices", str(tiny)]
    subprocess.run([*command, str(tmp_path)], check=True, timeout=120)
    assert sorted(path.stem for path in tmp_path.iterdir()) == sorted(SPEAKERS)
    config = read_config(tiny)
    for name, voice in named_voices(tiny).items():
        written = Voice.load(tmp_path / f"{name}.safetensors")
        written.check(config)
        assert written.content_hash == voice.content_hash
    first, second = named_voices(tiny).values()
    assert off(first.speaker_embedding, second.speaker_embedding) > 0.01


FIRST = speakers(golden_of("qwen25_omni"))["Chelsie"]
REFUSED_SPEAKERS: list[tuple[dict[str, Any], str]] = [
    ({"../a": FIRST}, "'../a' is no name of a speaker"),
    ({"a": 3}, "'a' has no cond and ref_mel"),
    ({"a": {**FIRST, "cond": [1.0]}}, r"'a'\.cond: expected a tensor"),
    ({"a": {"ref_mel": FIRST["ref_mel"]}}, r"'a'\.cond: expected a tensor"),
    ({"a": {**FIRST, "cond": torch.ones(1, 8)}}, r"'a'\.cond has 8 numbers, expected 7"),
    ({"a": {**FIRST, "ref_mel": torch.ones(1, 23, 9)}}, r"'a'\.ref_mel has the shape \(1, 23, 9\)"),
    (
        {"a": {**FIRST, "ref_mel": torch.ones(1, 4, 10)}},
        r"'a'\.ref_mel has 4 frames; expected 5 to",
    ),
    (
        {"a": {**FIRST, "ref_mel": torch.full((1, 23, 10), torch.nan)}},
        r"'a'\.ref_mel: has numbers that are not between -100 and 100",
    ),
]


@pytest.mark.parametrize(("content", "words"), REFUSED_SPEAKERS)
def test_speakers_that_do_not_fit_are_refused(
    tmp_path: Path, content: dict[str, Any], words: str
) -> None:
    folder = write_folder("qwen25_omni", tmp_path)
    torch.save(content, folder / "spk_dict.pt")
    with pytest.raises(CheckpointError, match=words):
        write_voices(folder, tmp_path / "voices")


def test_a_folder_without_speakers_is_refused(tmp_path: Path) -> None:
    folder = write_folder("qwen25_omni", tmp_path)
    (folder / "spk_dict.pt").unlink()
    with pytest.raises(CheckpointError, match=r"spk_dict\.pt: missing"):
        named_voices(folder)

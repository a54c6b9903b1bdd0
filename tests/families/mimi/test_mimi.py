"""Mimi in the library: layers on a CPU, weights in a pickle, and folders that are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from testkit.models.family_golden import FamilyGolden
from testkit.models.mimi_model import document, published_weights, write_model
from testkit.utterances import off
from token2wav import (
    CheckpointError,
    ConfigError,
    RuntimeConfig,
    Token2Wav,
)
from token2wav.assembly import check_folder
from token2wav.families.registry import read_config
from token2wav.layers.packed_linear import PackedLinear

# Of the spread of the audio. Sums are in another order than in the public code.
PARITY = 1e-5
CPU = RuntimeConfig(device="cpu")


def test_a_cpu_packs_weights_and_changes_states_in_place(tmp_path: Path) -> None:
    folder = write_model(tmp_path, FamilyGolden("mimi", "tiny"))
    model = Token2Wav.load(folder, runtime=CPU)
    [decoder] = model.pipeline.stages.values()
    frames = decoder._frames  # type: ignore[attr-defined]
    assert frames.store._in_place
    kinds = {type(module) for module in frames._net.decoder_transformer.modules()}
    assert PackedLinear in kinds
    assert torch.nn.Linear not in kinds


def test_a_pickle_gives_the_same_audio(tmp_path: Path) -> None:
    golden = FamilyGolden("mimi", "tiny")
    (tmp_path / "config.json").write_text(json.dumps(document(golden)))
    torch.save(published_weights(golden), tmp_path / "pytorch_model.bin")
    audio = Token2Wav.load(tmp_path, runtime=CPU).synthesize(golden["codes"].numpy())
    assert off(audio, golden["audio"].numpy()) <= PARITY * float(golden["audio"].std())


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("use_causal_conv", False, "use_causal_conv: False is not supported"),
        ("attention_bias", True, "attention_bias: True is not supported"),
        ("pad_mode", "reflect", "is not one of constant"),
        ("audio_channels", 2, "is not between 1 and 1"),
        ("num_key_value_heads", 1, "they must be equal"),
        ("num_semantic_quantizers", 4, "is not below num_quantizers, 4"),
        ("upsample_groups", 3, "does not divide hidden_size"),
        ("head_dim", 7, "head_dim: 7 is odd"),
        ("frame_rate", 13.0, "upsampling_ratios give"),
        ("num_hidden_layers", 10**9, "is not between 1 and 256"),
        ("sliding_window", 1, "is not between 2"),
        ("rope_parameters", {"rope_type": "yarn"}, "rope_type: 'yarn' is not default"),
        ("hidden_size", "16", "expected int"),
        ("upsampling_ratios", [], "empty; at least 1"),
    ],
)
def test_values_that_are_refused(key: str, value: object, message: str, tmp_path: Path) -> None:
    content = {**document(FamilyGolden("mimi", "tiny")), key: value}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=f"config.json: .*{message}"):
        read_config(tmp_path)


def test_weights_that_are_refused(tmp_path: Path) -> None:
    golden = FamilyGolden("mimi", "tiny")
    write_model(tmp_path, golden)
    weights = published_weights(golden)
    book = "quantizer.acoustic_residual_vector_quantizer.layers.1.codebook."
    for name, value, message in (
        (f"{book}embed_sum", None, "codebook .acoustic. lacks embed_sum"),
        (f"{book}cluster_usage", torch.ones(3), "codebook .acoustic. has embed_sum"),
        ("decoder.layers.0.conv.bias", None, "1 missing: decoder.layers.0.bias"),
    ):
        changed = dict(weights)
        if value is None:
            del changed[name]
        else:
            changed[name] = value
        save_file(changed, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=message):
            check_folder(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"contains none of model\.safetensors"):
        check_folder(tmp_path)


def test_a_folder_of_another_model_type_is_no_model_folder(tmp_path: Path) -> None:
    for content, message in (
        ('{"model_type": "bert"}', "has the model_type 'bert', expected one of .*mimi"),
        ('{"model_type": "mimi"', ": not JSON: "),
        ("[]", ": expected an object, got list"),
    ):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ConfigError, match=rf"config\.json ?{message}"):
            read_config(tmp_path)

"""Qwen3-TTS's tokenizer and Qwen3-Omni's Code2Wav in the library: checkpoints of several files, and
folders that are refused.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from testkit.models.family_golden import FamilyGolden
from testkit.models.qwen3_model import document, write_model
from testkit.utterances import off
from token2wav import CheckpointError, ConfigError, RuntimeConfig, Token2Wav
from token2wav.assembly import check_folder
from token2wav.families.qwen3.config import DecoderSizes
from token2wav.families.qwen3.network import Qwen3Decoder
from token2wav.families.registry import read_config

# Of the spread of the audio. Sums are in another order than in the public code.
PARITY = 1e-5
CPU = RuntimeConfig(device="cpu")
INDEX = "model.safetensors.index.json"


def test_the_samples_that_qwen3_omni_does_not_make() -> None:
    for sizes, missing in ((DecoderSizes(), 555), (DecoderSizes(codebook_dim=512), 0)):
        with torch.device("meta"):
            network = Qwen3Decoder(sizes)
        assert (network.missing_samples, network.frame_samples) == (missing, 1920)


def test_several_files_of_weights(tmp_path: Path) -> None:
    golden = FamilyGolden("qwen3_omni", "tiny")
    write_model(tmp_path, golden, files=3)
    (tmp_path / "unread.safetensors").write_bytes(b"no weights")
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"]["thinker.layers.0.weight"] = "unread.safetensors"
    (tmp_path / INDEX).write_text(json.dumps(index))
    audio = Token2Wav.load(tmp_path, runtime=CPU).synthesize(golden["codes"].numpy())
    assert off(audio, golden["audio"].numpy()) <= PARITY * float(golden["audio"].std())


@pytest.mark.parametrize("name", ["qwen3_tts", "qwen3_omni"])
@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("attention_bias", True, "attention_bias: True is not supported"),
        ("hidden_act", "relu", "is not one of silu"),
        ("num_key_value_heads", 1, "they must be equal"),
        ("head_dim", 7, "head_dim: 7 is odd"),
        ("num_hidden_layers", 10**9, "is not between 1 and 256"),
        ("sliding_window", 1, "is not between 2"),
        ("hidden_size", "16", "expected int"),
        ("upsample_rates", [], "empty; at least 1"),
        ("decoder_dim", 18, "cannot be halved 2 times"),
        ("rope_parameters", {"rope_type": "yarn"}, "'yarn' is not supported"),
        ("num_quantizers", 65, "is not between 1 and 64"),
    ],
)
def test_values_that_are_refused(
    name: str, key: str, value: object, message: str, tmp_path: Path
) -> None:
    content = document(FamilyGolden(name, "tiny"))
    section = next(part for part in ("decoder_config", "code2wav_config") if part in content)
    content[section][key] = value
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=f"config.json: {section}.*{message}"):
        read_config(tmp_path)


def test_documents_that_are_refused(tmp_path: Path) -> None:
    whole = document(FamilyGolden("qwen3_tts", "tiny"))
    for content, message in (
        ({**whole, "decode_upsample_rate": 1920}, "upsampling_ratios give 24"),
        ({**whole, "output_sample_rate": 0}, "output_sample_rate: 0 is not between"),
        ({**whole, "decoder_config": None}, "this folder has no decoder"),
        ({"model_type": "qwen3_omni_moe"}, "code2wav_config: expected an object"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(content))
        with pytest.raises(ConfigError, match=f"config.json: .*{message}"):
            read_config(tmp_path)


def test_weights_that_are_refused(tmp_path: Path) -> None:
    write_model(tmp_path, FamilyGolden("qwen3_tts", "tiny"))
    weights = load_file(tmp_path / "model.safetensors")
    book = "decoder.quantizer.rvq_rest.vq.layers.1._codebook."
    for name, value, message in (
        (f"{book}embedding_sum", None, "codebook .acoustic. lacks embedding_sum"),
        (f"{book}cluster_usage", torch.ones(3), "codebook .acoustic. has embedding_sum"),
        ("decoder.decoder.1.block.0.beta", None, "1 missing: decoder.1.block.0.beta"),
        ("decoder.surplus.weight", torch.ones(3), "1 unexpected: surplus.weight"),
    ):
        changed = dict(weights)
        if value is None:
            del changed[name]
        else:
            changed[name] = value
        save_file(changed, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=message):
            check_folder(tmp_path)

"""Folders of the Higgs Audio tokenizer that are refused, and weights that stay in the file. Its
audio is compared in `tests/families/dac/test_dac.py`, because it has DAC's decoder.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.support.dac_model import document, published_weights, write_higgs
from tests.support.family_golden import FamilyGolden
from token2wav import CheckpointError, ConfigError
from token2wav.execution.assemble import check_folder
from token2wav.families import read_config

ACOUSTIC, SEMANTIC = "acoustic_model_config", "semantic_model_config"


@pytest.mark.parametrize(
    ("section", "key", "value", "message"),
    [
        ("", "target_bandwidths", [], "target_bandwidths: empty"),
        ("", "target_bandwidths", [0.01], "target_bandwidths: number of codebooks: 0 is not"),
        ("", "target_bandwidths", [1000], "target_bandwidths: number of codebooks: 3125 is not"),
        ("", "target_bandwidths", [10**9], "is not between 0.001 and 1000"),
        ("", "target_bandwidths", 2, "target_bandwidths: expected"),
        ("", "codebook_size", 1, "codebook_size: 1 is below 2"),
        ("", "codebook_dim", 0, "codebook_dim: 0 is not between 1 and"),
        ("", "sample_rate", 768_000, "frames per second: 25600.0 is not between"),
        ("", ACOUSTIC, [1], f"{ACOUSTIC}: expected an object"),
        (ACOUSTIC, "upsampling_ratios", [5, 5], "upsampling_ratios: 25 samples .* give 30"),
        (ACOUSTIC, "decoder_hidden_size", 36, f"{ACOUSTIC}.decoder_hidden_size: 36 cannot"),
        (ACOUSTIC, "hidden_size", 10**9, f"{ACOUSTIC}.hidden_size: 1000000000 is not between"),
        (SEMANTIC, "hidden_size", 10**9, f"{SEMANTIC}.hidden_size: 1000000000 is not between"),
        (SEMANTIC, "hidden_size", None, f"{SEMANTIC}.hidden_size: expected int"),
    ],
)
def test_values_that_are_refused(
    section: str, key: str, value: object, message: str, tmp_path: Path
) -> None:
    content = document(FamilyGolden("higgs", "tiny").sizes, "higgs")
    if section:
        content[section] = {**content[section], key: value}
    else:
        content[key] = value
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=f"config.json: .*{message}"):
        read_config(tmp_path)


def test_weights_that_are_refused_and_weights_that_are_not_read(tmp_path: Path) -> None:
    write_higgs(tmp_path, FamilyGolden("higgs", "tiny"))
    path = tmp_path / "model.safetensors"
    weights = published_weights(tmp_path, "higgs")
    unread = {
        "semantic_model.encoder.weight": torch.full((2,), torch.nan),
        "fc1.weight": torch.full((2,), torch.nan),
        "quantizer.quantizers.0.codebook.inited": torch.tensor([True]),
        "quantizer.quantizers.0.codebook.embed_avg": torch.full((2,), torch.nan),
    }
    save_file(weights | unread, path)
    check_folder(tmp_path)
    for name, message in (
        ("fc2.weight", "1 missing: fc2.weight"),
        ("quantizer.quantizers.0.project_out.bias", "codebook 0 lacks project_out.bias"),
    ):
        save_file({key: value for key, value in weights.items() if key != name}, path)
        with pytest.raises(CheckpointError, match=message):
            check_folder(tmp_path)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"contains no model\.safetensors"):
        check_folder(tmp_path)

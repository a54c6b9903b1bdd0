"""Folders of the Higgs Audio tokenizer that are refused, weights that stay in the file, and folders
of the first release. Early audio is tested in `tests/families/dac/test_dac.py`, because the
tokenizer has DAC's decoder.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from testkit.models.dac_model import (
    document,
    first_release_weights,
    published_weights,
    write_higgs,
    write_higgs_first_release,
)
from testkit.models.family_golden import FamilyGolden
from token2wav import CheckpointError, ConfigError, StreamConfig
from token2wav.assembly import check_folder
from token2wav.families.registry import read_config

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
    with pytest.raises(CheckpointError, match=r"contains none of model\.safetensors"):
        check_folder(tmp_path)


def test_published_sizes_of_the_first_release(tmp_path: Path) -> None:
    rates, widths = [8, 5, 4, 2, 3], {"D": 256, "codebook_dim": 64, "vq_scale": 1}
    first = {**widths, "ratios": rates, "sample_rate": 24000, "bins": 1024, "n_q": 8}
    (tmp_path / "config.json").write_text(json.dumps(first))
    config = read_config(tmp_path)
    ratios = {"downsampling_ratios": rates, "upsampling_ratios": rates}
    (tmp_path / "config.json").write_text(json.dumps(document({ACOUSTIC: ratios}, "higgs")))
    later = read_config(tmp_path)
    assert config.stage_config("decoder") == later.stage_config("decoder")
    assert config.hops(StreamConfig()) == later.hops(StreamConfig())


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("codebook_dim", None, "codebook_dim: missing"),
        ("codebook_dim", 10**9, "codebook_dim: 1000000000 is not between"),
        ("bins", [8, 5, 5], "bins: expected int"),
        ("n_q", 65, "n_q: 65 is not between 1 and 64"),
        ("ratios", [], "downsampling_ratios: empty"),
        ("ratios", [3, 10**9], "ratios.* is not between 1 and 4096"),
        ("D", 0, "D: 0 is not between"),
        ("vq_scale", 1000, "vq_scale: 1000 leaves no channel of 780"),
        ("sample_rate", 768_000, "frames per second: 128000.0 is not between"),
    ],
)
def test_values_of_the_first_release_that_are_refused(
    key: str, value: object, message: str, tmp_path: Path
) -> None:
    content = {**FamilyGolden("higgs_first_release", "tiny").sizes, key: value}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=f"config.json: .*{message}"):
        read_config(tmp_path)


def test_a_pickle_of_the_first_release_that_is_refused(tmp_path: Path) -> None:
    write_higgs_first_release(tmp_path, FamilyGolden("higgs_first_release", "tiny"))
    path = tmp_path / "model.pth"
    weights = first_release_weights(tmp_path)
    torch.save(weights | {"encoder.block.0.bias": torch.full((2,), torch.nan)}, path)
    check_folder(tmp_path)
    last = "decoder_2.model.4.bias"
    for changed, message in (
        ({"fc_post2.bias": None}, "1 missing: fc2.bias"),
        ({"quantizer.vq.layers.1._codebook.embed": None}, "codebook 1 lacks codebook.embed"),
        ({last: torch.tensor([torch.nan])}, r"NaN .* in acoustic_decoder\.conv2\.bias"),
        ({last: 3}, "is a int, not a tensor"),
        ({f"decoder_2.model.{'9' * 5000}.bias": torch.ones(1)}, "unexpected: acoustic_decoder"),
        ({last: Path("/")}, "nothing was executed"),
    ):
        rest = {name: value for name, value in weights.items() if name not in changed}
        replacements = {name: value for name, value in changed.items() if value is not None}
        torch.save(rest | replacements, path)
        with pytest.raises(CheckpointError, match=message):
            check_folder(tmp_path)
    path.write_bytes(b"no pickle")
    with pytest.raises(CheckpointError, match=r"nothing was executed|cannot be read"):
        check_folder(tmp_path)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"contains none of model\.pth"):
        check_folder(tmp_path)

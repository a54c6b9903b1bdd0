"""NanoCodec in the library: archives and unpacked files, and folders that are refused."""

from __future__ import annotations

import tarfile
from io import BytesIO
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file

from testkit.models.family_golden import FamilyGolden
from testkit.models.nanocodec_model import document, published_weights, write_archive, write_model
from testkit.utterances import off
from token2wav import CheckpointError, ConfigError, RuntimeConfig, Token2Wav
from token2wav.assembly import check_folder
from token2wav.families.nanocodec.config import read
from token2wav.families.nanocodec.network import HalfSnake

# Of the spread of the audio. Sums are in another order than in the public code.
PARITY = 1e-5
CPU = RuntimeConfig(device="cpu")


@pytest.mark.parametrize("weights", ["model_weights.safetensors", "model_weights.ckpt"])
def test_unpacked_files_give_the_same_audio(weights: str, tmp_path: Path) -> None:
    golden = FamilyGolden("nanocodec", "tiny")
    (tmp_path / "model_config.yaml").write_text(yaml.safe_dump(document(golden)))
    state = published_weights(golden)
    if weights.endswith("ckpt"):
        torch.save(state, tmp_path / weights)
    else:
        save_file(state, tmp_path / weights)
    audio = Token2Wav.load(tmp_path, runtime=CPU).synthesize(golden["codes"].numpy())
    assert off(audio, golden["audio"].numpy()) <= PARITY * float(golden["audio"].std())


def test_a_compressed_archive(tmp_path: Path) -> None:
    golden = FamilyGolden("nanocodec", "tiny")
    check_folder(write_model(tmp_path, golden, compressed=True))


def test_archives_with_other_members_are_refused(tmp_path: Path) -> None:
    config = yaml.safe_dump(document(FamilyGolden("nanocodec", "tiny"))).encode()
    for name in ("../model_config.yaml", "/etc/passwd", "model.py", "a/model_config.yaml"):
        write_archive(tmp_path / "codec.nemo", {name: config})
        with pytest.raises(CheckpointError, match="unexpected member"):
            read(tmp_path)


def test_links_in_archives_are_refused(tmp_path: Path) -> None:
    for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE):
        with tarfile.open(tmp_path / "codec.nemo", "w") as archive:
            link = tarfile.TarInfo("model_config.yaml")
            link.type, link.linkname = kind, "/etc/passwd"
            archive.addfile(link)
        with pytest.raises(CheckpointError, match="not a regular file"):
            read(tmp_path)


def test_too_large_members_are_refused_unread(tmp_path: Path) -> None:
    info = tarfile.TarInfo("model_config.yaml")
    info.size = 5 << 30
    (tmp_path / "codec.nemo").write_bytes(info.tobuf())
    with pytest.raises(CheckpointError, match="at most 1048576 are allowed"):
        read(tmp_path)


def test_archives_that_cannot_be_read(tmp_path: Path) -> None:
    archive = tmp_path / "codec.nemo"
    archive.write_bytes(b"no archive")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read(tmp_path)
    write_archive(archive, {"model_weights.ckpt": b""})
    with pytest.raises(CheckpointError, match=r"contains no model_config\.yaml"):
        read(tmp_path)
    config = yaml.safe_dump(document(FamilyGolden("nanocodec", "tiny"))).encode()
    write_archive(archive, {"model_config.yaml": config, "./model_config.yaml": config})
    with pytest.raises(CheckpointError, match="appears twice"):
        read(tmp_path)
    (tmp_path / "other.nemo").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"2 archives, expected one: codec\.nemo, other\.nemo"):
        read(tmp_path)


def test_a_pickle_with_code_is_refused(tmp_path: Path) -> None:
    golden, weights = FamilyGolden("nanocodec", "tiny"), BytesIO()
    torch.save({"audio_decoder.pre_conv.conv.bias": Path("/")}, weights)
    config = yaml.safe_dump(document(golden)).encode()
    members = {"model_config.yaml": config, "model_weights.ckpt": weights.getvalue()}
    write_archive(tmp_path / "codec.nemo", members)
    with pytest.raises(CheckpointError, match="nothing was executed"):
        check_folder(tmp_path)


@pytest.mark.parametrize(
    ("section", "key", "value", "message"),
    [
        ("audio_decoder", "_target_", "nemo.HiFiGANDecoder", "expected CausalHiFiGANDecoder"),
        ("vector_quantizer", "_target_", 3, "expected GroupFiniteScalarQuantizer"),
        ("audio_decoder", "input_dim", 7, "vector_quantizer gives 6 values"),
        ("audio_decoder", "base_channels", 36, "36 is not a multiple of 8"),
        ("audio_decoder", "up_sample_rates", [], "empty; at least 1"),
        ("audio_decoder", "activation", "elu", "is not one of half_snake"),
        ("audio_decoder", "up_sample_rates", [4, 10**9], "is not between 1 and 4096"),
        ("vector_quantizer", "num_groups", 10**9, "is not between 1 and 64"),
        ("vector_quantizer", "num_levels_per_group", [4096, 4096, 4096], "codes; at most"),
        ("vector_quantizer", "num_levels_per_group", [1], "is not between 2 and 4096"),
        ("", "sample_rate", 0, "is not between 1 and 768000"),
        ("", "samples_per_frame", 25, "samples_per_frame: 25, but"),
    ],
)
def test_values_that_are_refused(
    section: str, key: str, value: object, message: str, tmp_path: Path
) -> None:
    content = document(FamilyGolden("nanocodec", "tiny"))
    (content[section] if section else content)[key] = value
    (tmp_path / "model_config.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(ConfigError, match=f"model_config.yaml: .*{message}"):
        read(tmp_path)


def test_the_activation_can_be_trained() -> None:
    layer, x = HalfSnake(5), torch.randn(2, 5, 7, requires_grad=True)
    trained = layer(x)
    trained.sum().backward()
    assert layer.alpha.grad is not None
    assert x.grad is not None
    with torch.no_grad():
        layer.freeze()
        torch.testing.assert_close(layer(x), trained)

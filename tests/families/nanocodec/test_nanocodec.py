"""Archives of NanoCodec that are refused, and its activation."""

from __future__ import annotations

import tarfile
from io import BytesIO
from pathlib import Path

import pytest
import torch
import yaml

from testkit.models.family_golden import FamilyGolden
from testkit.models.nanocodec_model import document, write_archive
from token2wav import CheckpointError
from token2wav.assembly import check_folder
from token2wav.families.nanocodec.config import read
from token2wav.families.nanocodec.network import HalfSnake


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
    write_archive(archive, {"model_weights.ckpt": b""})
    with pytest.raises(CheckpointError, match=r"contains no model_config\.yaml"):
        read(tmp_path)
    config = yaml.safe_dump(document(FamilyGolden("nanocodec", "tiny"))).encode()
    write_archive(archive, {"model_config.yaml": config, "./model_config.yaml": config})
    with pytest.raises(CheckpointError, match="appears twice"):
        read(tmp_path)


def test_a_pickle_with_code_is_refused(tmp_path: Path) -> None:
    golden, weights = FamilyGolden("nanocodec", "tiny"), BytesIO()
    torch.save({"audio_decoder.pre_conv.conv.bias": Path("/")}, weights)
    config = yaml.safe_dump(document(golden)).encode()
    members = {"model_config.yaml": config, "model_weights.ckpt": weights.getvalue()}
    write_archive(tmp_path / "codec.nemo", members)
    with pytest.raises(CheckpointError, match="nothing was executed"):
        check_folder(tmp_path)


def test_the_activation_can_be_trained() -> None:
    layer, x = HalfSnake(5), torch.randn(2, 5, 7, requires_grad=True)
    trained = layer(x)
    trained.sum().backward()
    assert layer.alpha.grad is not None
    assert x.grad is not None
    with torch.no_grad():
        layer.freeze()
        torch.testing.assert_close(layer(x), trained)

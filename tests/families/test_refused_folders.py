"""Folders that are no model folders: one sentence names the contents and a remedy."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from testkit.models.codec_models import CODECS
from testkit.models.family_golden import FamilyGolden
from testkit.models.tiny_model import TINY, one_line
from token2wav.assembly import check_folder
from token2wav.errors import Token2WavError

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 34\n"
PAGE = "\n<!DOCTYPE html>\n<html><body>Log in</body></html>"


Edit = Callable[[Path], object]


def write(family: str, folder: Path) -> None:
    if family == "cosyvoice3":
        shutil.copytree(TINY, folder, dirs_exist_ok=True)
    else:
        CODECS[family].write(folder, FamilyGolden(family, "tiny"))


def text(name: str, content: str) -> Edit:
    """Returns an edit that replaces the content of a file."""
    return lambda folder: (folder / name).write_text(content)


def link(name: str, target: str) -> Edit:
    """Returns an edit that replaces a file by a link."""

    def edit(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to(target)

    return edit


def into(inner: str) -> Edit:
    """Returns an edit that moves all files into a folder, as in the cache of the hub's client."""

    def edit(folder: Path) -> None:
        files = list(folder.iterdir())
        (folder / inner).mkdir(parents=True)
        for file in files:
            file.rename(folder / inner / file.name)

    return edit


Refusal = tuple[str, Edit, str]
LFS = ": a pointer of Git LFS, not the file itself; run 'git lfs pull' in the clone, or pull"
HTML = ": a page of HTML, not the file itself; download it again"
GONE = "which does not exist; "
REFUSALS: list[Refusal] = [
    ("cosyvoice3", text("cosyvoice3.yaml", POINTER), f"cosyvoice3.yaml{LFS}"),
    ("cosyvoice3", text("cosyvoice3.yaml", PAGE), f"cosyvoice3.yaml{HTML}"),
    ("cosyvoice3", text("flow.safetensors", POINTER), f"flow.safetensors{LFS}"),
    ("cosyvoice3", text("hift.safetensors", PAGE), f"hift.safetensors{HTML}"),
    (
        "cosyvoice3",
        link("cosyvoice3.yaml", "../b/1"),
        f"cosyvoice3.yaml is a link to ../b/1, {GONE}",
    ),
    (
        "cosyvoice3",
        link("flow.safetensors", "../b/1"),
        f"a link to ../b/1, {GONE}download the file",
    ),
    (
        "cosyvoice3",
        text("cosyvoice2.yaml", "a: 1"),
        "contains cosyvoice2.yaml and cosyvoice3.yaml, which belong to different families; keep",
    ),
    ("cosyvoice3", into("snapshots/12ab"), "its subfolder snapshots/12ab is one; use "),
    ("mimi", into("models--a/snapshots/12ab"), "its subfolder models--a/snapshots/12ab is one"),
    ("mimi", text("config.json", POINTER), f"config.json{LFS}"),
    ("mimi", text("config.json", PAGE), f"config.json{HTML}"),
    ("mimi", text("config.json", '{"model_type"'), "config.json: not JSON: "),
    (
        "mimi",
        link("config.json", "../b/1"),
        f"config.json is a link to ../b/1, {GONE}pull it again",
    ),
    ("mimi", text("model.safetensors", POINTER), f"model.safetensors{LFS}"),
    (
        "mimi",
        text("config.json", '{"model_type": "qwen2"}'),
        "config.json has the model_type 'qwen2', expected one of dual_ar, ",
    ),
]


@pytest.mark.parametrize(("family", "edit", "sentence"), REFUSALS, ids=range(len(REFUSALS)))
def test_a_folder_that_is_refused(family: str, edit: Edit, sentence: str, tmp_path: Path) -> None:
    write(family, tmp_path)
    edit(tmp_path)
    with pytest.raises(Token2WavError) as refused:
        check_folder(tmp_path)
    line = one_line(refused.value)
    assert line.startswith(str(tmp_path))
    assert line.count(str(tmp_path)) == 1 + ("; use " in line)
    assert sentence in line


@pytest.mark.parametrize(
    ("name", "near"),
    [("mimmi", "mimi"), ("CosyVoice3", "fun-cosyvoice3-0.5b"), ("qwen3-tt", "qwen3-tts")],
)
def test_a_name_that_is_nearly_an_alias(name: str, near: str) -> None:
    with pytest.raises(Token2WavError, match=f"^{name}: no such model folder; did you mean {near}"):
        check_folder(Path(name))

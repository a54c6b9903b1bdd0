"""Weights in several files: the files that are read, and folders that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from testkit.models.folder_edits import Edit, content, removed
from testkit.models.shards import divide
from testkit.models.tiny_model import one_line
from token2wav.errors import CheckpointError
from token2wav.networks.weights import read_state
from token2wav.published.checkpoint_files import weights_file

INDEX = "model.safetensors.index.json"
SHARDS = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
WEIGHTS = {
    name: torch.full((2,), float(ord(name[-1]))) for name in ("encoder.a", "encoder.b", "decoder.c")
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Folder with a weight in each of three shards, and an index."""
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    divide(tmp_path / "model.safetensors", index=True)
    return tmp_path


def test_an_index_reads_no_other_shard(folder: Path) -> None:
    for name in SHARDS[:2]:
        (folder / name).write_bytes(b"not read")
    (folder / SHARDS[0]).unlink()
    assert list(read_state(weights_file(folder), ("decoder.",))) == ["decoder.c"]


def mapped(change: dict[str, Any]) -> Edit:
    """Returns an edit of the index."""

    def edit(folder: Path) -> None:
        document = json.loads((folder / INDEX).read_text())
        document["weight_map"] |= change
        (folder / INDEX).write_text(json.dumps(document))

    return edit


def encoder_twice(folder: Path) -> None:
    """Adds a weight to the last shard that another one has too."""
    path = folder / SHARDS[2]
    save_file(load_file(path) | {"encoder.b": WEIGHTS["encoder.b"]}, path)


def pickled_in_place(folder: Path) -> None:
    (folder / "x.bin").write_bytes(b"")
    mapped({"encoder.b": "x.bin"})(folder)


# Edits of a folder, and the message.
REFUSALS: dict[str, tuple[list[Edit], str]] = {
    "no folder of its own": (
        [mapped({"encoder.b": "../b.safetensors"})],
        "'../b.safetensors' is no file of",
    ),
    "absolute": (
        [mapped({"encoder.b": "/etc/b.safetensors"})],
        "'/etc/b.safetensors' is no file of the",
    ),
    "subfolder": (
        [mapped({"encoder.b": "a/b.safetensors"})],
        "'a/b.safetensors' is no file of the folder",
    ),
    "two dots": ([mapped({"encoder.b": ".."})], "'..' does not end in .safetensors"),
    "no text": ([mapped({"encoder.b": 3})], "weight_map: 3 is no file of the folder"),
    "a pickle": ([pickled_in_place], "weight_map: 'x.bin' does not end in .safetensors"),
    "no index": ([content(INDEX, "{}")], "weight_map: expected an object"),
    "nested": ([content(INDEX, "[" * 100_000)], "not JSON"),
    "twice": (
        [content(INDEX, '{"weight_map": {"b": "x", "b": "y"}}')],
        "'b' appears more than once",
    ),
    "missing": ([removed(SHARDS[1])], f"{SHARDS[1]}: missing, but {INDEX} names it"),
    "elsewhere": (
        [mapped({"encoder.b": SHARDS[2]})],
        f"{SHARDS[2]}: 'encoder.b' is missing, but {INDEX} names it",
    ),
    "in two": ([encoder_twice], f"{SHARDS[2]}: 'encoder.b' is in {SHARDS[1]} too"),
    "in two, no index": (
        [removed(INDEX), encoder_twice],
        f"'encoder.b' is in {SHARDS[1]} too",
    ),
    "one is missing": ([removed(INDEX, SHARDS[1])], f"{SHARDS[1]}: missing; it is one of 3 files"),
    "two downloads": (
        [removed(INDEX), content("model-00001-of-00002.safetensors", "")],
        "is one of 2 files, but model-0000",
    ),
    "no file": ([removed(INDEX, *SHARDS)], "contains none of model.safetensors, pytorch_model.bin"),
    "a link": (
        [lambda folder: (folder / "model.safetensors").symlink_to("../../blobs/1")],
        "model.safetensors: a link to ../../blobs/1, which does not exist; download",
    ),
    "a pointer": (
        [content(SHARDS[2], "version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 2\n")],
        f"{SHARDS[2]}: a pointer of Git LFS, not the file itself; run 'git lfs pull'",
    ),
    "a page": ([content(SHARDS[2], "<!DOCTYPE html><html>")], f"{SHARDS[2]}: a page of HTML, not"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_folder_that_is_refused(case: str, folder: Path) -> None:
    edits, message = REFUSALS[case]
    for edit in edits:
        edit(folder)
    with pytest.raises(CheckpointError) as refused:
        read_state(weights_file(folder))
    assert message in one_line(refused.value)


def test_no_weight_has_the_prefix(folder: Path) -> None:
    message = r"no weight is named x\.\* or y\.\*"
    with pytest.raises(CheckpointError, match=message):
        read_state(weights_file(folder), ("x.", "y."))
    (folder / INDEX).unlink()
    with pytest.raises(CheckpointError, match=message):
        read_state(weights_file(folder), ("x.", "y."))

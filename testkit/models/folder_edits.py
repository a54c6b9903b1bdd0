"""Edits that make a model folder wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file, save_file

Edit = Callable[[Path], object]
ABSENT = "-"  # instead of a value: the key or the tensor is removed


def content(name: str, text: str | bytes) -> Edit:
    """Replaces the content of a file."""
    written = text.encode() if isinstance(text, str) else text
    return lambda folder: (folder / name).write_bytes(written)


def replaced(name: str, old: str, new: str) -> Edit:
    """Replaces a text in a file."""

    def edit(folder: Path) -> None:
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new))

    return edit


def link(name: str, target: str) -> Edit:
    """Replaces a file by a link."""

    def edit(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to(target)

    return edit


def removed(*names: str) -> Edit:
    """Removes files."""

    def edit(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return edit


def into(inner: str) -> Edit:
    """Moves all files into a folder, as in the cache of the hub's client."""

    def edit(folder: Path) -> None:
        files = list(folder.iterdir())
        (folder / inner).mkdir(parents=True)
        for file in files:
            file.rename(folder / inner / file.name)

    return edit


def changed_document(name: str, change: Callable[[Any], Any]) -> Edit:
    """Replaces the document in a file of JSON or YAML, or in a pickle."""

    def edit(folder: Path) -> None:
        path = folder / name
        if path.suffix == ".json":
            path.write_text(json.dumps(change(json.loads(path.read_text()))))
        elif path.suffix == ".yaml":
            path.write_text(yaml.safe_dump(change(yaml.safe_load(path.read_text()))))
        else:
            torch.save(change(torch.load(path, weights_only=True)), path)

    return edit


def set_values(name: str, values: dict[str, Any]) -> Edit:
    """Sets values in a document by their paths, such as `decoder_kwargs.0.norm`."""

    def change(document: Any) -> Any:
        for path, value in values.items():
            *outer, last = path.split(".")
            container = document
            for key in outer:
                container = container[int(key) if isinstance(container, list) else key]
            if value == ABSENT:
                del container[last]
            else:
                container[last] = value
        return document

    return changed_document(name, change)


def set_weights(name: str, tensors: dict[str, Any], target: str = "") -> Edit:
    """Sets tensors in a file of weights.

    Args:
        name: the file.
        tensors: new tensors by their names, `ABSENT` for one that is removed.
        target: name of the file that is written in place of the first one.
    """

    def edit(folder: Path) -> None:
        path = folder / name
        pickled = path.suffix != ".safetensors"
        weights = torch.load(path, weights_only=True) if pickled else load_file(path)
        changed = {
            key: value for key, value in {**weights, **tensors}.items() if value is not ABSENT
        }
        path.unlink()
        path = folder / (target or name)
        (save_file if path.suffix == ".safetensors" else torch.save)(changed, path)

    return edit


def tensor(text: str) -> Any:
    """Returns a tensor that a text describes by its kind and its shape, such as `nan 16 6`; or
    another object of a pickle.
    """
    kind, *sizes = text.split()
    if kind in _OBJECTS:
        return _OBJECTS[kind]
    value, dtype = _TENSORS[kind]
    return torch.full(tuple(map(int, sizes)), value, dtype=dtype)


_OBJECTS: dict[str, Any] = {
    ABSENT: ABSENT,
    "text": "text",
    "list": [1, 2],
    "path": Path("/"),  # code, which must not be executed
}
_TENSORS: dict[str, tuple[float, torch.dtype]] = {
    "ones": (1.0, torch.float32),
    "zeros": (0.0, torch.float32),
    "nan": (float("nan"), torch.float32),
    "inf": (float("inf"), torch.float32),
    "huge": (1e300, torch.float64),
    "int8": (1, torch.int8),
    "int64": (1, torch.int64),
    "complex64": (1, torch.complex64),
}

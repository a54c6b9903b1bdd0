"""Reader of folders of Hugging Face's `transformers`: `config.json`, and the list of files of
weights. Both are read as data.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from token2wav.config.strict_yaml import MAX_FILE_BYTES, read_bounded
from token2wav.config.values import prefixed, shown
from token2wav.errors import CheckpointError, ConfigError

CONFIG_JSON = "config.json"
_WEIGHTS = "model.safetensors"
_WEIGHTS_FILES = (_WEIGHTS, "pytorch_model.bin")  # of weights in one file, the preferred one first
INDEX = "model.safetensors.index.json"  # of weights in several files
_LARGESTINDEX = 1 << 26  # bytes; the index of a mixture of experts has megabytes


def read_json(path: Path, *, most_bytes: int = MAX_FILE_BYTES) -> dict[str, Any]:
    """Reads a JSON file that contains an object.

    Raises:
        ConfigError: the file cannot be read, is too large, is no JSON object, or has a key twice.
    """
    content = read_bounded(path, most_bytes)
    with prefixed(f"{path}: "):
        try:
            document = json.loads(content, object_pairs_hook=_object)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"not JSON: {' '.join(str(error).split())[:200]}") from error
        if not isinstance(document, dict):
            raise ConfigError(f"expected an object, got {type(document).__name__}")
        return document


def has_model_type(folder: Path, *types: str) -> bool:
    """Returns whether a folder has a `config.json` with one of some values of `model_type`."""
    return bool(types) and _readable(folder).get("model_type") in types


def has_keys(folder: Path, *keys: str) -> bool:
    """Returns whether a folder has a `config.json` with some keys, and without `model_type`."""
    document = _readable(folder) if keys else {}
    return bool(keys) and "model_type" not in document and document.keys() >= set(keys)


def weights_file(folder: Path, names: Sequence[str] = _WEIGHTS_FILES) -> Path:
    """Finds the weights in a folder: the first file of some names. By default these are
    `model.safetensors`, and `pytorch_model.bin`, a pickle.

    Raises:
        CheckpointError: the folder has no such file.
    """
    for name in names:
        if (path := folder / name).is_file():
            return path
    raise CheckpointError(f"{folder}: contains none of {', '.join(names)}")


def safetensors_files(folder: Path, prefix: str = "") -> list[Path]:
    """Returns all files of weights in a folder: `model.safetensors`, or files that an index names.

    Args:
        folder: folder of a model.
        prefix: beginning of the names of the wanted weights. An index names the files with them.

    Raises:
        CheckpointError: the folder has no such file, or its index cannot be used.
    """
    if (single := folder / _WEIGHTS).is_file():
        return [single]
    index = folder / INDEX
    if not index.is_file():
        raise CheckpointError(f"{folder}: contains neither {_WEIGHTS} nor {INDEX}")
    try:
        weight_map = read_json(index, most_bytes=_LARGESTINDEX).get("weight_map")
    except ConfigError as error:
        raise CheckpointError(str(error)) from error
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{index}: weight_map: expected an object")
    names = [file for name, file in weight_map.items() if name.startswith(prefix)]
    if not names:
        raise CheckpointError(f"{index}: no weight is named {prefix}*")
    for name in names:
        # a plain name, so that no file outside the folder is read
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(f"{index}: weight_map: {name!r:.80} is no file of the folder")
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / name}: missing, but the index names it")
    return [folder / name for name in sorted(set(names))]


def _readable(folder: Path) -> dict[str, Any]:
    """Returns the content of `config.json`; nothing if it is missing or broken."""
    path = folder / CONFIG_JSON
    try:
        return read_json(path) if path.is_file() else {}
    except ConfigError:  # another family may read the file, or the search for a family fails
        return {}


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document: dict[str, Any] = {}
    for key, value in pairs:
        if key in document:
            raise ConfigError(f"key {shown(key)} appears more than once")
        document[key] = value
    return document

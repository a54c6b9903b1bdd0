"""Reader of the `config.json` of folders of Hugging Face's `transformers`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from token2wav.config.strict_yaml import MAX_FILE_BYTES, read_bounded
from token2wav.config.values import prefixed, shown
from token2wav.errors import ConfigError, one_line

CONFIG_JSON = "config.json"


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
            raise ConfigError(f"not JSON: {one_line(error)[:200]}") from error
        if not isinstance(document, dict):
            raise ConfigError(f"expected an object, got {type(document).__name__}")
        return document


def has_model_type(folder: Path, *types: str) -> bool:
    """Returns whether a folder has a `config.json` with one of some values of `model_type`."""
    return readable_json(folder / CONFIG_JSON).get("model_type") in types


def readable_json(path: Path) -> dict[str, Any]:
    """Returns the content of a JSON file; nothing if it is missing or broken."""
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

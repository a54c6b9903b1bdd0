"""The `config.json` of folders of `transformers`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from token2wav.errors import ConfigError
from token2wav.published.transformers_json import has_keys, has_model_type, read_json


def written(folder: Path, content: Any, name: str = "config.json") -> Path:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "expected an object, got list"),
        ('{"a": 1, "a": 2}', "key 'a' appears more than once"),
    ],
)
def test_files_that_are_no_configuration(text: str, message: str, tmp_path: Path) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError, match=f"^{path}: {message}"):
        read_json(path)
    assert not has_model_type(tmp_path, "mimi")  # another family may read the file


def test_a_folder_is_known_by_its_type_or_by_its_keys(tmp_path: Path) -> None:
    written(tmp_path, {"model_type": "mimi", "rates": []})
    assert has_model_type(tmp_path, "other", "mimi")
    assert not has_keys(tmp_path, "rates")  # a folder with a type belongs to the type
    written(tmp_path, {"rates": []})
    assert has_keys(tmp_path, "rates")
    assert not has_keys(tmp_path)

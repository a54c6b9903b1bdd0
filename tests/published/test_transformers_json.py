"""The `config.json` of folders of `transformers`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from token2wav.families import mimi, snac
from token2wav.published.registry import find_remote_family
from token2wav.published.transformers_json import has_model_type


def written(folder: Path, content: Any, name: str = "config.json") -> Path:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_a_folder_is_known_by_its_type_or_by_its_keys(tmp_path: Path) -> None:
    written(tmp_path, {"model_type": "mimi"})
    assert has_model_type(tmp_path, "other", "mimi")
    written(tmp_path, "{")
    assert not has_model_type(tmp_path, "mimi")  # another family may read the file
    keys: dict[str, Any] = {"vq_strides": [], "decoder_rates": []}
    assert find_remote_family(set(), keys) is snac
    assert find_remote_family(set(), {"model_type": "mimi", **keys}) is mimi
    assert find_remote_family(set(), {"vq_strides": []}) is None

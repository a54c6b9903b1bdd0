"""Families of folders on the hub, by the names of their files and by their `config.json`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import token2wav
from token2wav.families import cosyvoice1, cosyvoice2, mimi, snac
from token2wav.published.registry import find_remote_family
from token2wav.published.transformers_json import has_model_type

SNAC: dict[str, Any] = {"vq_strides": [], "decoder_rates": []}


@pytest.mark.parametrize(
    ("names", "config", "family"),
    [
        # Where the content is not known, CosyVoice1 and the first release of CosyVoice2 need the
        # same files.
        ({"cosyvoice.yaml", "flow.pt", "hift.pt"}, {}, cosyvoice2),
        # The only name of GLM-4-Voice, `config.yaml`, is one of many folders.
        ({"config.yaml", "flow.pt", "hift.pt", "README.md"}, {}, cosyvoice1),
        ({"config.yaml", "flow.pt"}, {}, None),
        ({"config.yaml", "flow-chunk-5.pt", "hift.pt"}, {}, cosyvoice2),
        (set(), SNAC, snac),
        (set(), {"model_type": "mimi", **SNAC}, mimi),
        (set(), {"vq_strides": []}, None),
    ],
)
def test_the_family_of_a_folder_on_the_hub(
    names: set[str], config: dict[str, Any], family: Any
) -> None:
    assert find_remote_family(names, config) is family


def test_downloads_of_cosyvoice1_and_2_are_the_same() -> None:
    wanted = [choice.split("|") for choice in cosyvoice2.DOWNLOADS]
    assert all(any(name in names for names in wanted) for name in ("cosyvoice.yaml", "flow.pt"))


def test_a_broken_file_has_no_model_type(tmp_path: Path) -> None:
    """Another family may read it."""
    (tmp_path / "config.json").write_text("{")
    assert not has_model_type(tmp_path, "mimi")


def test_python_3_10_evaluates_the_fields_of_every_family() -> None:
    """`kinds` evaluates annotations, and Python 3.10.4 refuses a `ClassVar` without a type."""
    files = Path(token2wav.__file__).parent.rglob("*.py")
    bare = re.compile(r": ClassVar\b(?!\[)")
    assert [file for file in files if bare.search(file.read_text(encoding="utf-8"))] == []

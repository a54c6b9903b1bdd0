"""Sizes of published codecs, and small sizes at the same rates: `published_codecs.yaml`. Their
weights are random, because speed does not depend on training.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from testkit.models.codec_models import CODECS
from testkit.models.family_golden import FamilyGolden
from token2wav.config.model_config import ModelConfig
from token2wav.published.registry import read_config

Sizes = dict[str, Any]
_TABLE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
# Published sizes by names for tables, and the name of each codec in `CODECS`.
PUBLISHED: dict[str, Sizes] = {name: row["sizes"] for name, row in _TABLE["published"].items()}
# Whole files of further models: the `document`, and an empty `file` that tells what the folder is.
FURTHER: dict[str, Sizes] = _TABLE["documents"]
_CODECS: dict[str, str] = {name: row["codec"] for name, row in _TABLE["published"].items()}
# By the names of `CODECS`: the published sizes, and sizes with a sixteenth of the channels or so.
# The MOSS Audio Tokenizer then has the sizes of the golden data.
SIZES: dict[str, Sizes] = {_CODECS[name]: PUBLISHED[name] for name in reversed(PUBLISHED)}
SIXTEENTH: dict[str, Sizes] = {**_TABLE["sixteenth"], "moss": FamilyGolden("moss", "small").sizes}


def codec_configs() -> dict[str, ModelConfig]:
    """Makes the configuration of every codec at its published size, by names for tables."""
    configs = {}
    for name, sizes in PUBLISHED.items():
        with TemporaryDirectory() as folder:
            configs[name] = read_config(CODECS[_CODECS[name]].write_document(Path(folder), sizes))
    return configs

"""Model folders as `save_pretrained` writes them, with weights in one file or in shards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file


def write_pretrained(folder: Path, document: Any, *shards: dict[str, torch.Tensor]) -> Path:
    """Writes `config.json` and weights, with an index if there are several shards.

    Returns:
        The folder.
    """
    (folder / "config.json").write_text(json.dumps(document))
    if len(shards) == 1:
        save_file(shards[0], folder / "model.safetensors")
        return folder
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(shard, folder / file)
        places |= dict.fromkeys(shard, file)
    _write_index(folder / "model.safetensors", places)
    return folder


def _write_index(path: Path, places: dict[str, str]) -> None:
    """Writes the file that names the shard of every weight, for the path of undivided weights."""
    path.with_name(f"{path.name}.index.json").write_text(json.dumps({"weight_map": places}))


def divide(path: Path, *, index: bool) -> None:
    """Replaces a `.safetensors` file, or a pickle, by three shards. The first one has the encoder,
    which the decoder does not need. The other two have weights of the decoder alone.

    Args:
        index: whether an index names the shard of every weight.
    """
    pickled = path.suffix != ".safetensors"
    weights: dict[str, Any] = torch.load(path) if pickled else load_file(path)
    names = sorted(weights, key=lambda name: ("decoder" in name, name))
    cuts = [0, len(names) - 2, len(names) - 1, len(names)]
    path.unlink()
    places: dict[str, str] = {}
    for number in range(3):
        shard = {name: weights[name] for name in names[cuts[number] : cuts[number + 1]]}
        file = path.with_name(f"{path.stem}-{number + 1:05}-of-00003{path.suffix}")
        torch.save(shard, file) if pickled else save_file(shard, file)
        places |= dict.fromkeys(shard, file.name)
    if index:
        _write_index(path, places)

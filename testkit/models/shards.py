"""Division of a file of weights into shards, in the order of `save_pretrained`: the encoder, whose
weights are not read, comes first.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file


def divide(path: Path, *, index: bool, count: int = 3) -> None:
    """Replaces a `.safetensors` file, or a pickle, by shards.

    Args:
        index: whether an index names the shard of every weight.
        count: shards. All but the first have weights of the decoder alone.
    """
    pickled = path.suffix != ".safetensors"
    weights: dict[str, Any] = torch.load(path) if pickled else load_file(path)
    names = sorted(weights, key=lambda name: ("decoder" in name, name))
    cuts = [0, *(len(names) - count + 1 + number for number in range(count - 1)), len(names)]
    path.unlink()
    places: dict[str, str] = {}
    for number in range(count):
        shard = {name: weights[name] for name in names[cuts[number] : cuts[number + 1]]}
        file = path.with_name(f"{path.stem}-{number + 1:05}-of-{count:05}{path.suffix}")
        torch.save(shard, file) if pickled else save_file(shard, file)
        places |= dict.fromkeys(shard, file.name)
    if index:
        path.with_name(f"{path.name}.index.json").write_text(json.dumps({"weight_map": places}))

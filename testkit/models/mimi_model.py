"""Folders of Mimi models with random weights, as `transformers` writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from testkit.models.family_golden import FamilyGolden
from testkit.models.random_weights import fill_state
from testkit.models.shards import write_pretrained
from token2wav.config.values import from_mapping
from token2wav.families.mimi.config import MimiSizes
from token2wav.families.mimi.family import Mimi


def published_weights(golden: FamilyGolden) -> dict[str, torch.Tensor]:
    """Returns the weights under their published names."""
    sizes = from_mapping(MimiSizes, golden.sizes, "")
    with torch.device("meta"):
        network = Mimi(sizes)
    shapes: dict[str, tuple[int, ...]] = {}
    for name, value in network.state_dict().items():
        part, _, rest = name.partition(".")
        if part == "quantizer":
            kind, _, rest = rest.partition(".")
            start = f"quantizer.{kind}_residual_vector_quantizer"
            if rest == "entries":
                for number in range(len(value)):
                    book = f"{start}.layers.{number}.codebook"
                    shapes[f"{book}.initialized"] = (1,)
                    shapes[f"{book}.cluster_usage"] = (sizes.codebook_size,)
                    shapes[f"{book}.embed_sum"] = tuple(value.shape[1:])
            else:
                shapes[f"{start}.{rest}"] = (*value.shape, 1)
                shapes[f"{start}.input_proj.weight"] = (*value.T.shape, 1)  # not read
        elif part in ("decoder", "upsample"):
            layer, _, kind = name.rpartition(".")
            shapes[f"{layer}.conv.{kind}"] = tuple(value.shape)
        else:
            shapes[name] = tuple(value.shape)
    shapes["encoder.layers.0.conv.bias"] = (3,)  # not read
    return fill_state({name: torch.empty(shape) for name, shape in shapes.items()})


def document(golden: FamilyGolden) -> dict[str, Any]:
    """Returns the content of `config.json`."""
    sizes = {**golden.sizes, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    return {"model_type": "mimi", "architectures": ["MimiModel"], "use_streaming": False, **sizes}


def write_model(folder: Path, golden: FamilyGolden) -> Path:
    """Writes a model folder, and returns it."""
    return write_pretrained(folder, document(golden), published_weights(golden))

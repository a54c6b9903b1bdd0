"""Reading of weights: weight norm, and tensors by a prefix. Damaged folders are tested with
CosyVoice3, `families/cosyvoice3/test_checkpoint.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.nn.utils.parametrizations import weight_norm

from token2wav.errors import CheckpointError
from token2wav.networks.weights import fold_weight_norm, read_state

PATH = Path("weights")


def test_weight_norm_is_folded_as_torch_computes_it() -> None:
    conv = weight_norm(torch.nn.Conv1d(3, 4, 5))
    newer = {f"conv.{name}": value for name, value in conv.state_dict().items()}
    older = {
        name.replace("parametrizations.weight.original0", "weight_g").replace(
            "parametrizations.weight.original1", "weight_v"
        ): value
        for name, value in newer.items()
    }
    for weights in (newer, older):
        folded = fold_weight_norm(weights, PATH)
        assert folded.keys() == {"conv.weight", "conv.bias"}
        assert torch.allclose(folded["conv.weight"], conv.weight, atol=1e-6)
    with pytest.raises(CheckpointError, match=r"'conv\.weight_g' appears twice"):
        fold_weight_norm(newer | older, PATH)
    with pytest.raises(CheckpointError, match=r"has shape \(4,\), which does not match"):
        fold_weight_norm(older | {"conv.weight_g": torch.ones(4)}, PATH)


def test_only_tensors_with_the_prefix_are_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a.x": torch.ones(2).half(), "a.n": torch.ones(1).int(), "b": torch.ones(1)}, path)
    tensors = read_state(path, ("a.",))
    assert {name: value.dtype for name, value in tensors.items()} == {
        "a.x": torch.float32,
        "a.n": torch.int32,
    }

"""Mimi on a CPU."""

from __future__ import annotations

from pathlib import Path

import torch

from testkit.models.family_golden import FamilyGolden
from testkit.models.mimi_model import write_model
from token2wav import RuntimeConfig, Token2Wav
from token2wav.layers.packed_linear import PackedLinear

CPU = RuntimeConfig(device="cpu")


def test_a_cpu_packs_weights_and_changes_states_in_place(tmp_path: Path) -> None:
    folder = write_model(tmp_path, FamilyGolden("mimi", "tiny"))
    model = Token2Wav.load(folder, runtime=CPU)
    [decoder] = model.pipeline.stages.values()
    frames = decoder._frames  # type: ignore[attr-defined]
    assert frames.store._in_place
    kinds = {type(module) for module in frames._net.decoder_transformer.modules()}
    assert PackedLinear in kinds
    assert torch.nn.Linear not in kinds

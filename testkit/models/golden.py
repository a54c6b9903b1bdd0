"""Golden sets: tensors that the public implementation computed, and the model they came from as a
folder.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from testkit.models.sized import SIZES, resized_yaml
from token2wav import Voice

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data"
TINY = DATA / "tiny"


@dataclass(frozen=True)
class GoldenSet:
    """One folder with golden.safetensors and the weights that made it."""

    folder: Path

    @cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        return load_file(self.folder / "golden.safetensors")

    @cached_property
    def report(self) -> dict[str, Any]:
        return json.loads((self.folder / "report.json").read_text())

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    @property
    def tokens(self) -> NDArray[np.int32]:
        """New tokens; the public code reads a negative one as 0, ours rejects it."""
        return self["in.token"][0].clamp(min=0).numpy()

    @property
    def voice(self) -> Voice:
        return Voice(self["in.prompt_token"][0], self["in.prompt_feat"][0], self["in.embedding"][0])

    def chunk(self, index: int, what: str) -> torch.Tensor:
        """`mel` (bands, frames) or `audio` (samples,) of a chunk of the public streaming loop."""
        return self[f"stream.chunk{index}.{what}"][0]

    @property
    def chunks(self) -> list[dict[str, Any]]:
        return list(self.report["chunks"])

    def model_folder(self, parent: Path) -> Path:
        """This set's model as a folder that can be loaded; made below `parent` if the set has no
        YAML.
        """
        if (self.folder / "cosyvoice3.yaml").is_file():
            return self.folder
        folder = parent / self.folder.name
        folder.mkdir()
        for name in ("flow", "hift"):
            shutil.copy(self.folder / f"{name}.safetensors", folder)
        sizes = self.report["config"]
        renamed = {
            "channels": "pre_channels",
            "base_channels": "hift_base",
            "cond_channels": "f0_channels",
        }
        keys = SIZES["tiny"]
        (folder / "cosyvoice3.yaml").write_text(
            resized_yaml({key: sizes[renamed.get(key, key)] for key in keys})
        )
        return folder


def golden_sets() -> list[GoldenSet]:
    """The tracked set, and larger ones where they lie beside the checkout."""
    folders = [TINY, ROOT.parent / "shared" / "golden" / "small"]
    return [GoldenSet(folder) for folder in folders if (folder / "golden.safetensors").is_file()]


def snr_db(audio: NDArray[np.float32], reference: NDArray[np.float32]) -> float:
    """Signal-to-noise ratio of `audio` against `reference`."""
    error = np.square(audio.astype(np.float64) - reference).sum()
    return float(10 * np.log10(np.square(reference.astype(np.float64)).sum() / max(error, 1e-30)))

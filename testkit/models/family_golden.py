"""Golden sets of other families, computed by their public code.

`lab/golden/golden_families.py` makes the sets of flows. The other scripts there make the sets
of codecs, with `write_families`. A codec has the files `tiny` and `small`, each with these tensors:

- `codes` (frames, codebooks) int64, or `latents` (frames, size) float32
- `audio` (samples,) float32 of these tokens
- `audio_of_fewer`, of the same codes without the last codebook, if a stream may have fewer

The metadata `sizes` has the sizes of the network in JSON. Its sample rate is `out_sample_rate`,
`sampling_rate` or `sample_rate`, or else 24 kHz. Weights are not stored: `random_weights.py` draws
them by the published names of the weights, for the public code and for the tests.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from token2wav import Voice

FAMILIES = Path(__file__).resolve().parents[2] / "tests" / "data" / "families"


@dataclass(frozen=True)
class FamilyGolden:
    """Golden set of a family at one size, `tiny` or `small`; `testkit/models/random_weights.py`
    gives its weights.
    """

    family: str
    size: str

    @property
    def path(self) -> Path:
        return FAMILIES / self.family / f"{self.size}.safetensors"

    @cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        return load_file(self.path)

    @cached_property
    def sizes(self) -> dict[str, Any]:
        """Sizes of the networks, under the names that `lab/golden/public_families.py` explains."""
        with safe_open(self.path, "pt") as file:
            return json.loads(file.metadata()["sizes"])

    @property
    def voice(self) -> Voice:
        """Voice of a golden set of a flow with prompts."""
        names = ("prompt_token", "prompt_feat", "embedding")
        return Voice(*(self[name].numpy() for name in names))

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.tensors[name]

"""Family of Qwen3-TTS's tokenizer and Qwen3-Omni's Code2Wav: their decoder, and its weights."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from token2wav.config.model_config import StageName
from token2wav.families.family import Family
from token2wav.families.qwen3.network import Qwen3Decoder
from token2wav.layers.codebooks import stacked_entries
from token2wav.networks.weights import fitting_weights, floating_tensors, read_state

_KINDS = {"first": "semantic", "rest": "acoustic"}
_CODEBOOK = re.compile(r"quantizer\.rvq_(first|rest)\.vq\.layers\.(\d+)\._codebook\.(\w+)")
_PROJECTION = re.compile(r"quantizer\.rvq_(first|rest)\.output_proj\.weight")
_ENCODING = re.compile(r"quantizer\.\w+\.input_proj\.weight")  # only makes codes
_FRONT = ("quantizer.", "pre_conv.", "code_embedding.")
_LAYERS = "pre_transformer.layers."


class Qwen3Family(Family):
    """Family of Qwen3-TTS's tokenizer and Qwen3-Omni's Code2Wav."""

    def network(self, config: Any, stage: StageName) -> nn.Module:
        return Qwen3Decoder(config.sizes)

    def weights(self, network: Any, path: Path, stage: StageName) -> dict[str, torch.Tensor]:
        prefix = network.sizes.prefix
        state = {
            name: value
            for full_name, value in read_state(path, (prefix,)).items()
            if not _ENCODING.fullmatch(name := full_name.removeprefix(prefix))
        }
        return fitting_weights(network, _converted(floating_tensors(state, path, str), path), path)


def _converted(published: dict[str, torch.Tensor], path: Path) -> dict[str, torch.Tensor]:
    """Converts published weights to weights of the network.

    The entries of a codebook are published as sums and numbers of uses.
    """
    weights: dict[str, torch.Tensor] = {}
    codebooks: dict[str, dict[int, dict[str, torch.Tensor]]] = {}
    for name, value in published.items():
        if match := _CODEBOOK.fullmatch(name):
            kind, number, part = match.groups()
            codebooks.setdefault(_KINDS[kind], {}).setdefault(int(number), {})[part] = value
        elif match := _PROJECTION.fullmatch(name):
            weights[f"front.quantizer.{_KINDS[match[1]]}.output_proj.weight"] = value.flatten(1)
        else:
            name = name.replace(".conv.", ".")
            if name.startswith(_LAYERS):
                name = name.replace(_LAYERS, "pre_transformer.window.layers.")
            weights[f"front.{name}" if name.startswith(_FRONT) else name] = value
    for kind, books in codebooks.items():
        weights[f"front.quantizer.{kind}.entries"] = stacked_entries(
            books, "embedding_sum", "cluster_usage", kind, path
        )
    return weights


FAMILY = Qwen3Family()

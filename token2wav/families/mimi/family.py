"""Family of Mimi: its decoder, and its weights."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from token2wav.config.model_config import StageName
from token2wav.families.family import Family
from token2wav.families.mimi.config import MimiSizes
from token2wav.families.mimi.moshi_weights import is_moshi, transformers_names
from token2wav.layers.codebooks import Quantizer, stacked_entries
from token2wav.layers.streaming import OFFLINE, StreamStep
from token2wav.networks.seanet_decoder import SeanetDecoder
from token2wav.networks.weights import fitting_weights, floating_tensors, read_state

_PARTS = ("quantizer.", "upsample.", "decoder_transformer.", "decoder.")  # the rest makes codes
_CODEBOOK = re.compile(
    r"quantizer\.(semantic|acoustic)_residual_vector_quantizer\.layers\.(\d+)\.codebook\.(\w+)"
)
_PROJECTION = re.compile(
    r"quantizer\.(semantic|acoustic)_residual_vector_quantizer\.output_proj\.weight"
)
_ENCODING = re.compile(r"quantizer\.\w+\.input_proj\.weight")  # only makes codes


class Mimi(SeanetDecoder):
    """Decoder of Mimi, from codes to audio."""

    input_dtype = torch.int32

    def __init__(self, sizes: MimiSizes) -> None:
        super().__init__(sizes)
        self.input_channels = sizes.num_quantizers
        self.quantizer = Quantizer(
            sizes.num_quantizers,
            sizes.num_semantic_quantizers,
            sizes.codebook_size,
            sizes.codebook_dim,
            sizes.hidden_size,
        )

    def forward(self, codes: torch.Tensor, step: StreamStep = OFFLINE) -> torch.Tensor:
        """Computes the audio (B, 1, frame_samples * T) of codes (B, codebooks, T), which are -1 in
        codebooks that a stream does not send.
        """
        return self.decode(self.quantizer(codes), step)


class MimiFamily(Family):
    """Family of Mimi."""

    def network(self, config: Any, stage: StageName) -> nn.Module:
        return Mimi(config.sizes)

    def weights(self, network: Any, path: Path, stage: StageName) -> dict[str, torch.Tensor]:
        state = read_state(path, _PARTS)
        if is_moshi(state):
            state = transformers_names(state, network.heads)
        state = {name: value for name, value in state.items() if not _ENCODING.fullmatch(name)}
        return fitting_weights(network, _converted(floating_tensors(state, path, str), path), path)


def _converted(published: dict[str, torch.Tensor], path: Path) -> dict[str, torch.Tensor]:
    """Converts published weights to weights of the network.

    The entries of a codebook are published as sums and numbers of uses.
    """
    weights: dict[str, torch.Tensor] = {}
    codebooks: dict[str, dict[int, dict[str, torch.Tensor]]] = {"semantic": {}, "acoustic": {}}
    for name, value in published.items():
        if match := _CODEBOOK.fullmatch(name):
            kind, number, part = match.groups()
            codebooks[kind].setdefault(int(number), {})[part] = value
        elif match := _PROJECTION.fullmatch(name):
            weights[f"quantizer.{match[1]}.output_proj.weight"] = value.flatten(1)
        else:
            weights[name.replace(".conv.", ".")] = value
    for kind, books in codebooks.items():
        if books:
            weights[f"quantizer.{kind}.entries"] = stacked_entries(
                books, "embed_sum", "cluster_usage", kind, path
            )
    return weights


FAMILY = MimiFamily()

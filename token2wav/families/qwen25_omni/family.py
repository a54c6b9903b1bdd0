"""Family of Qwen2.5-Omni: its flow and its vocoder, and their weights."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import nn

from token2wav.config.model_config import StageName
from token2wav.families.cosyvoice3.flow import Flow
from token2wav.families.qwen25_omni import PREFIXES, OmniFlowConfig
from token2wav.families.streamflow.family import StreamFlow
from token2wav.layers.streaming import OFFLINE, StreamStep
from token2wav.networks.bigvgan import BigVGAN
from token2wav.networks.ecapa import Ecapa
from token2wav.networks.noise import FlowNoise
from token2wav.networks.weights import fitting_weights, floating_tensors, read_state

_COMPUTED = (".inv_freq", ".filter")  # endings of tensors that the network computes itself
_DECIBEL = 20 / math.log(10)  # decibels of a log-mel of 1
_FLOOR, _REFERENCE = -115.0, 20.0  # dB: least level, and level that the vocoder takes as 0


class OmniFlow(Flow):
    """Flow with an embedding of codes, ECAPA-TDNN and an estimator without position convolutions.

    The speaker vector of a stream is the speaker embedding of its voice, as it is.
    """

    config: OmniFlowConfig

    def __init__(self, config: OmniFlowConfig) -> None:
        super().__init__(config)
        self.input_embedding = nn.Embedding(config.vocab_size + 1, config.input_size)
        self.spk_encoder = Ecapa(config.encoder)
        del self.spk_embed_affine_layer

    @property
    def device(self) -> torch.device:
        return self.input_embedding.weight.device

    def speaker(self, embedding: torch.Tensor) -> torch.Tensor:
        return embedding

    def unconditional(self) -> torch.Tensor:
        """Returns the projected conditions (dim,) of a frame of an unconditional row. It has the
        embedding of code 0, no vector of a speaker, and the ECAPA-TDNN of a mel of zeros, which
        does not depend on the length of the mel.
        """
        encoder, weight = self.config.encoder, self.input_embedding.weight
        ecapa = self.spk_encoder(weight.new_zeros(1, encoder.mel_dim, encoder.least_frames))
        nobody = weight.new_zeros(1, self.config.spk_embed_dim - encoder.dim)
        speaker = torch.cat((nobody, ecapa), dim=1)
        return self.estimator.project_conditions(weight[:1, :, None], speaker, None)[0, 0]


class OmniVocoder(BigVGAN):
    """BigVGAN of a mel that is rescaled first."""

    def forward(self, mel: torch.Tensor, step: StreamStep = OFFLINE) -> torch.Tensor:
        return super().forward(_rescaled(mel), step)


def _rescaled(mel: torch.Tensor) -> torch.Tensor:
    """Converts a log-mel to decibels, and these to numbers from -1 to 1."""
    decibels = (_DECIBEL * mel).clamp(min=_FLOOR) - _REFERENCE
    return (2 * (decibels - _FLOOR) / -_FLOOR - 1).clamp(-1, 1)


class Qwen25Omni(StreamFlow):
    """Family of Qwen2.5-Omni. Its flow stage is that of StreamFlow, which computes windows."""

    def network(self, config: Any, stage: StageName) -> nn.Module:
        return OmniFlow(config.flow) if stage == "flow" else OmniVocoder(config.vocoder)

    def noise(self, config: Any, folder: Path, stage: StageName) -> FlowNoise | None:
        """Returns noise of fixed numbers. The public code draws new noise for each utterance."""
        return FlowNoise(config.mel_bands) if stage == "flow" else None

    def weights(self, network: Any, path: Path, stage: StageName) -> dict[str, torch.Tensor]:
        prefix = PREFIXES[stage]
        published = {
            name.removeprefix(prefix): value
            for name, value in read_state(path, (prefix,)).items()
            if not name.endswith(_COMPUTED)
        }
        weights = floating_tensors(published, path, _flow_name if stage == "flow" else str)
        weights |= {
            name: value for name, value in network.state_dict().items() if name.endswith(_COMPUTED)
        }
        name = "decoder.estimator.input_embed.proj.weight"
        if stage == "flow" and name in weights:
            weights[name] = _in_order(weights[name], network.config)
        return fitting_weights(network, weights, path)


def _in_order(weight: torch.Tensor, config: OmniFlowConfig) -> torch.Tensor:
    """Moves the columns of the input projection from the published order (state, ECAPA-TDNN, code,
    vector of the speaker) to the order of `InputEmbedding`, where the speaker comes last.
    """
    sizes = (
        config.mel_bands,
        config.encoder.dim,
        config.input_size,
        config.spk_embed_dim - config.encoder.dim,
    )
    if weight.dim() != 2 or weight.shape[1] != sum(sizes):
        return weight  # the check of the shapes refuses it
    state, ecapa, code, speaker = weight.split(sizes, dim=1)
    return torch.cat((state, code, speaker, ecapa), dim=1)


def _flow_name(name: str) -> str:
    """Returns the name that a weight has in `OmniFlow`."""
    if name == "text_embed.codec_embed.weight":
        return "input_embedding.weight"
    if name.startswith("input_embed.spk_encoder."):
        return name.removeprefix("input_embed.")
    name = name.replace(".ff.ff.0.", ".ff.ff.0.0.").replace(".ff.ff.3.", ".ff.ff.2.")
    return f"decoder.estimator.{name}"


FAMILY = Qwen25Omni()

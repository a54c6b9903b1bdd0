"""Vocoders on exported graphs: pieces inside of streams, with what layers keep as inputs and outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from token2wav.networks.bigvgan import BigVGAN
from token2wav.networks.hift import HiFT
from token2wav.networks.streaming import Piece, StateSpec, Streaming, state_specs

SIGNALS, AUDIO = ("mel", "source"), "audio"  # names in a graph
PAST, NEW = "past_", "new_"  # before the name of a layer: its state as it comes in, and as it goes out
_OUTSIDE = ("f0_predictor.", "m_source")  # double precision, and a phase: they are not exported


class VocoderGraph(Protocol):
    """Executes an exported graph."""

    def run(self, inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]) -> None:
        """One evaluation; tensors by name, contiguous, on the device of the stage."""


def exported_states(vocoder: HiFT | BigVGAN) -> dict[Streaming, StateSpec]:
    """State specs of the exported part of a vocoder."""
    return {layer: spec for layer, spec in state_specs(vocoder).items() if not spec.name.startswith(_OUTSIDE)}


class ExportedVocoder:
    """`HiFT.decode` or `BigVGAN.forward` on an exported graph.

    Args:
        graph: of the vocoder.
        vocoder: whose layers have the states.
    """

    def __init__(self, graph: VocoderGraph, vocoder: HiFT | BigVGAN) -> None:
        self._graph = graph
        self._shape = (vocoder.frame_samples,) if isinstance(vocoder, HiFT) else (1, vocoder.frame_samples)
        self._specs = exported_states(vocoder)

    def __call__(self, *arguments: Any) -> torch.Tensor:
        """Audio of signals and a piece, as the methods have them; the states of the piece are replaced."""
        *signals, piece = arguments
        assert isinstance(piece, Piece)
        assert piece.state is not None
        inputs = {name: signal.contiguous() for name, signal in zip(SIGNALS, signals, strict=False)}
        kept = {spec.name: piece.state[layer] for layer, spec in self._specs.items()}
        inputs |= {f"{PAST}{name}": state.contiguous() for name, state in kept.items()}
        *channels, samples = self._shape
        audio = signals[0].new_empty(len(signals[0]), *channels, signals[0].shape[2] * samples)
        new = {name: torch.empty(state.shape, dtype=state.dtype, device=state.device) for name, state in kept.items()}
        self._graph.run(inputs, {AUDIO: audio, **{f"{NEW}{name}": state for name, state in new.items()}})
        for name, state in new.items():
            kept[name].copy_(state)
        return audio

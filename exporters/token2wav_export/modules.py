"""Modules behind the graphs: torch builds them in both precisions, with inputs to try them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import nn

from token2wav.execution.artifacts import Graph, Precision
from token2wav.execution.backends import Exportable
from token2wav.execution.exported_graphs import SIGNALS, exported_states
from token2wav.networks.dit import DiT
from token2wav.networks.dit_step import STEP_INPUTS, CachedStep
from token2wav.networks.hift import HiFT
from token2wav.networks.masks import attention_bias
from token2wav.networks.streaming import Piece, Streaming, VocoderNetwork
from token2wav_export.signatures import Signature, Sizes, TensorSpec

_T = TypeVar("_T")
_STARTED_FRAMES = 50  # or more, after which streams are tried: more than any vocoder holds back
_EXCITATION = 0.1  # about as loud as the harmonic source makes it; far louder only hits the limiter


class Estimator(nn.Module):
    """Estimator in its public stateless form, which recomputes everything at each call.

    Args:
        estimator: network that is called.
        streaming: whether a frame sees no further than the end of its own block.
    """

    def __init__(self, estimator: DiT, streaming: bool) -> None:
        super().__init__()
        self.estimator = estimator
        self.streaming = streaming
        # A table for exporters: what they compute themselves is off in the last place, which shows at 1e-5 (Q5).
        frequencies = estimator.time_embed.frequencies(torch.device("cpu"))
        estimator.time_embed.frequencies = lambda device: frequencies  # type: ignore[method-assign]

    def forward(
        self,
        x: torch.Tensor,
        mask: torch.Tensor,
        mu: torch.Tensor,
        t: torch.Tensor,
        spks: torch.Tensor,
        cond: torch.Tensor,
    ) -> torch.Tensor:
        return self.estimator(x, mask, mu, t, spks, cond, streaming=self.streaming)


class _Traced(Piece):
    """Piece whose states stay what they are."""

    @cached_property
    def new(self) -> dict[Streaming, torch.Tensor]:
        return {}

    def keep(self, layer: Streaming, value: torch.Tensor) -> None:
        self.new[layer] = value


class Vocoder(nn.Module):
    """Vocoder whose forward pass is `HiFT.decode` or `BigVGAN.forward`, of pieces inside of streams or of all.

    Args:
        vocoder: that is exported.
        whole: which of both.
    """

    def __init__(self, vocoder: VocoderNetwork, *, whole: bool) -> None:
        super().__init__()
        self.vocoder = vocoder
        self._network: Callable[..., torch.Tensor] = vocoder.decode if isinstance(vocoder, HiFT) else vocoder.forward
        self.specs = {} if whole else exported_states(vocoder)

    def forward(
        self, signals: tuple[torch.Tensor, ...], past: tuple[torch.Tensor, ...] = ()
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Audio of mel, and for HiFT its excitation; of pieces, with the states before them, also those after them."""
        if not self.specs:
            return self._network(*signals)
        piece = _Traced(dict(zip(self.specs, past, strict=True)))
        return self._network(*signals, piece), *(piece.new[layer] for layer in self.specs)

    @torch.inference_mode()
    def started(self, *signals: torch.Tensor) -> list[torch.Tensor]:
        """States after streams have begun with these signals."""
        rows, frames = len(signals[0]), signals[0].shape[2]
        state = {layer: torch.zeros(rows, *spec.shape) for layer, spec in self.specs.items()}
        self._network(*signals, Piece(state, first=True, frames=frames))
        return list(state.values())


def load_module(graph: Graph, precision: Precision, networks: Exportable) -> nn.Module:
    """Loads the module of a graph, on the CPU. Its inputs and outputs are those of the graph's signature.

    Raises:
        CheckpointError: the weights cannot be used.
    """
    if graph.startswith("vocoder"):
        vocoder = networks.load_vocoder()
        if precision == "float16":
            halve_convolutions(vocoder)
        return Vocoder(vocoder, whole=graph == "vocoder-whole").eval()
    estimator = networks.load_estimator()
    if precision == "float16":
        estimator.halve()
    if graph == "step":
        return CachedStep(estimator).eval()
    return Estimator(estimator, streaming=graph == "estimator-streaming").eval()


def halve_convolutions(vocoder: VocoderNetwork) -> None:
    """Puts the convolutions of the network into float16; what lies between them, phases above all, stays float32."""
    for name, module in vocoder.named_modules():
        if isinstance(module, (nn.Conv1d, nn.ConvTranspose1d)) and not name.startswith("f0_predictor."):
            module.half()  # they convert their inputs and outputs themselves


def arranged(module: nn.Module, values: Sequence[_T]) -> tuple[Any, ...]:
    """Arranges the inputs of a graph as arguments of its module: what takes a past has it as one tuple."""
    if isinstance(module, CachedStep):
        return *values[: len(STEP_INPUTS)], tuple(values[len(STEP_INPUTS) :])
    if isinstance(module, Vocoder):
        signals = len(values) - len(module.specs)
        return (tuple(values[:signals]), tuple(values[signals:])) if module.specs else (tuple(values),)
    return tuple(values)


def run_module(module: nn.Module, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Runs a module, and returns its outputs in the order of its signature."""
    with torch.inference_mode():
        outputs = module(*arranged(module, inputs))
    return [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)


def sample_inputs(module: nn.Module, signature: Signature, sizes: Sizes, seed: int = 0) -> list[torch.Tensor]:
    """Draws random inputs as they occur: rows of different lengths and pasts, real angles and modulation."""
    generator = torch.Generator().manual_seed(seed)

    def normal(spec: TensorSpec) -> torch.Tensor:
        return torch.randn(spec.of(sizes), generator=generator).to(getattr(torch, spec.dtype))

    inputs = {spec.name: normal(spec) for spec in signature.inputs}
    rows, frames = sizes["rows"], sizes["frames"]
    valid = torch.randint(1, frames + 1, (rows,), generator=generator)  # (rows,)
    valid[0] = frames
    if isinstance(module, CachedStep):
        past, estimator = sizes["past"], module.estimator
        begin = torch.randint(0, past + 1, (rows,), generator=generator)  # frames of past that are valid
        begin[0] = past
        key, query = torch.arange(past + frames), torch.arange(frames)
        known = torch.where(key < past, key < begin[:, None], key - past < valid[:, None])  # (rows, keys)
        inputs["bias"] = attention_bias(known[:, None, None, :].expand(-1, 1, frames, -1))
        inputs["cos"], inputs["sin"] = estimator.rotary_embed(begin[:, None] + query)
        modulation = estimator.modulation(torch.rand(1, generator=generator))
        inputs["modulation"], inputs["modulation_out"] = modulation.blocks[:, 0], modulation.out[0]
        inputs["frames"] = valid
    elif isinstance(module, Estimator):
        inputs["mask"] = (torch.arange(frames) < valid[:, None])[:, None].float()
        inputs["t"] = torch.rand(rows, generator=generator)
    elif isinstance(module, Vocoder):
        if "source" in inputs:
            inputs["source"] *= _EXCITATION
        if module.specs:
            signals = [inputs[name].repeat(1, 1, _STARTED_FRAMES) for name in SIGNALS if name in inputs]
            inputs.update(zip(list(inputs)[len(signals) :], module.started(*signals), strict=True))
    return list(inputs.values())

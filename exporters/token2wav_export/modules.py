"""Modules behind the graphs: torch builds them in both precisions, with inputs to try them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from token2wav.artifacts import Graph, Precision
from token2wav.checkpoint import load_flow, load_vocoder
from token2wav.flow.dit import DiT
from token2wav.flow.masks import attention_bias
from token2wav.flow.step import STEP_INPUTS, CachedStep
from token2wav.model_config import ModelConfig
from token2wav.vocoder.bigvgan import BigVGAN
from token2wav.vocoder.hift import HiFT
from token2wav_export.signatures import Signature, Sizes, TensorSpec

_T = TypeVar("_T")
_EXCITATION = 0.1  # of the spectrum's values, as the harmonic source makes them; far louder ones only hit the limiter


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


class Vocoder(nn.Module):
    """Vocoder whose forward pass is `HiFT.network`; a BigVGAN needs none, it is a module by itself."""

    def __init__(self, hift: HiFT) -> None:
        super().__init__()
        self.hift = hift

    def forward(self, mel: torch.Tensor, spectrum: torch.Tensor) -> torch.Tensor:
        return self.hift.network(mel, spectrum)


def load_module(graph: Graph, precision: Precision, folder: Path, config: ModelConfig) -> nn.Module:
    """Loads the module of a graph, on the CPU. Its inputs and outputs are those of the graph's signature.

    Raises:
        CheckpointError: the weights cannot be used.
    """
    if graph == "vocoder":
        vocoder = load_vocoder(folder, config)
        if precision == "float16":
            halve_convolutions(vocoder)
        return vocoder.eval() if isinstance(vocoder, BigVGAN) else Vocoder(vocoder).eval()
    estimator = load_flow(folder, config).estimator
    if precision == "float16":
        estimator.halve()
    if graph == "step":
        return CachedStep(estimator).eval()
    return Estimator(estimator, streaming=graph == "estimator-streaming").eval()


def halve_convolutions(vocoder: HiFT | BigVGAN) -> None:
    """Puts the convolutions of the network into float16; what lies between them, phases above all, stays float32."""
    for name, module in vocoder.named_modules():
        if isinstance(module, (nn.Conv1d, nn.ConvTranspose1d)) and not name.startswith("f0_predictor."):
            module.half()
            module.register_forward_pre_hook(lambda _, inputs: tuple(x.half() for x in inputs))
            module.register_forward_hook(lambda _module, _inputs, output: output.float())


def arranged(module: nn.Module, values: Sequence[_T]) -> tuple[Any, ...]:
    """Arranges the inputs of a graph as arguments of its module: the step takes its past as one tuple."""
    if isinstance(module, CachedStep):
        return *values[: len(STEP_INPUTS)], tuple(values[len(STEP_INPUTS) :])
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
        inputs["spectrum"] *= _EXCITATION
    return list(inputs.values())

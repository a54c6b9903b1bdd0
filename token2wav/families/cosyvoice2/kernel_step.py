"""Step function of a U-Net on Triton-language kernels, for CUDA graphs.

The arithmetic equals `UNet.velocity`. A causal convolution reads the frames before a block through
the block table. A second launch computes its norm, Mish and the sum after it, and stores its state.
A transformer layer has seven launches. Guidance, Euler step and the copy of the new state are one
launch. The conditions are laid out once for all ODE steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import zip_longest

import torch
import torch.nn.functional as F
from torch import nn

from token2wav.cache.paged_kv_cache import PagedKVCache
from token2wav.execution.batch import Batch
from token2wav.execution.step import StepFunction
from token2wav.kernels.causal_convolution import CausalConvolution, NormedConvolution
from token2wav.kernels.euler import integrate
from token2wav.kernels.norms import NormVectors, added_norm
from token2wav.kernels.past import Past
from token2wav.kernels.products import gelu_product
from token2wav.kernels.rounding import Precision, precision_of
from token2wav.layers.projections import join_projections
from token2wav.networks.ode import OdeTables
from token2wav.networks.unet import (
    CausalConv,
    ConvolutionBlock,
    ResidualBlock,
    TransformerLayer,
    UNet,
    UNetBlock,
)


class CosyVoice2KernelStep(StepFunction):
    """Step function of a U-Net on Triton-language kernels.

    It copies the weights of the convolutions.
    """

    estimator: UNet

    def __init__(self, estimator: UNet, tables: OdeTables, cache: PagedKVCache) -> None:
        super().__init__(estimator, tables, cache)
        down, *middle, up = estimator.blocks()
        precision = precision_of(estimator)
        self._down, self._up = _Block(down, precision), _Block(up, precision)
        self._middle = [_Block(block, precision) for block in middle]
        self._after_down, self._after_up = (
            CausalConvolution(block[2], precision)  # type: ignore[arg-type]
            for block in (down, up)
        )
        self._final = _normed(estimator.final_block, precision)

    @torch.inference_mode()
    def integrate(self, batch: Batch) -> None:
        blocks, bands, frames = batch.x.shape
        # State and conditions of every frame. Only the state differs between ODE steps.
        # Unconditional rows have zero conditions.
        inputs = batch.x.new_zeros(self.cache.layout.branches, blocks, frames, 4 * bands)
        inputs[0, ..., bands:] = self.estimator.project_conditions(
            batch.mu, batch.speakers, batch.cond
        )
        velocity = partial(self._velocity, Past(batch, self.cache, self.estimator))
        integrate(batch.x, self.tables, inputs, None, velocity)

    def _velocity(self, past: Past, step: int, inputs: torch.Tensor) -> torch.Tensor:
        """Computes the velocity (branches * blocks, block_frames, bands), see `integrate`."""
        past.move_to(self.tables.stored_steps[step])
        x, [shifts] = inputs.flatten(0, 1), self.tables.modulation[step]
        # (UNet blocks, channels) shifts of the ODE time
        first, *between, last = shifts[:, 0].unbind()
        skip = self._down(x, first, past)
        x = self._after_down(skip, past)
        for block, shift in zip(self._middle, between, strict=True):
            x = block(x, shift, past)
        x = self._up(torch.cat((x, skip), dim=-1), last, past)
        x = self._after_up(x, past)
        x = self._final(x, past)
        final = self.estimator.final_proj
        return F.linear(x, final.weight[:, :, 0], final.bias)


class _Block:
    """Block of a U-Net on kernels, without the convolution at its end."""

    def __init__(self, block: UNetBlock, precision: Precision) -> None:
        residual: ResidualBlock = block[0]  # type: ignore[assignment]
        layers: Iterable[TransformerLayer] = block[1]  # type: ignore[assignment]
        self._skip = residual.res_conv
        self._first = _normed(residual.block1, precision)
        self._second = _normed(residual.block2, precision)
        self._layers = [_Layer(layer) for layer in layers]

    def __call__(self, x: torch.Tensor, shift: torch.Tensor, past: Past) -> torch.Tensor:
        """Computes the block.

        Args:
            x: (branches * blocks, block_frames, inputs) float32, contiguous.
            shift: (channels,) shift of the ODE time.

        Returns:
            (branches * blocks, block_frames, channels) float32.
        """
        skip = F.linear(x, self._skip.weight[:, :, 0], self._skip.bias)
        h = self._first(x, past, shift)
        layer = self._layers[0]
        x, normed = self._second.with_residual(h, past, skip, layer.norm, layer.dtype)
        for layer, next_layer in zip_longest(self._layers, self._layers[1:]):
            normed = layer(x, normed, next_layer, past)
        return x


class _Layer:
    """Transformer layer of a U-Net on kernels.

    Attributes:
        norm: norm of its input.
        dtype: dtype of its weights.
    """

    def __init__(self, layer: TransformerLayer) -> None:
        attention = layer.attn1
        self._index = attention.index
        self._projections = join_projections((attention.to_q, attention.to_k, attention.to_v))
        self._out = attention.to_out[0]
        self._up: nn.Linear = layer.ff.get_submodule("net.0.proj")  # type: ignore[assignment]
        self._down = layer.ff.net["2"]
        self.norm, self._second_norm = NormVectors.of(layer.norm1), NormVectors.of(layer.norm3)
        self.dtype = self._up.weight.dtype

    def __call__(
        self, x: torch.Tensor, normed: torch.Tensor, next_layer: _Layer | None, past: Past
    ) -> torch.Tensor:
        """Adds attention and the feed-forward layer to x, in place.

        Args:
            x: (branches * blocks, block_frames, channels) float32, contiguous: the residual stream.
            normed: norm of x, in the dtype of the weights.
            next_layer: layer that follows; None after the last layer.

        Returns:
            The norm of x for the layer that follows; x after the last layer.
        """
        attention = past.project_and_attend(normed, self._projections, self._index)
        normed = added_norm(x, self._out(attention), self._second_norm)
        h = self._down(gelu_product(normed, self._up, tanh=False))
        return x.add_(h) if next_layer is None else added_norm(x, h, next_layer.norm)


def _normed(block: ConvolutionBlock, precision: Precision) -> NormedConvolution:
    conv: CausalConv = block.block["0"]  # type: ignore[assignment]
    norm: nn.LayerNorm = block.block["2"]  # type: ignore[assignment]
    return NormedConvolution(conv, norm, precision)

"""Step function of Step-Audio2's DiT on Triton-language kernels, for CUDA graphs.

The arithmetic equals `StepAudioDiT.velocity`. A layer has eleven launches. The projection of
queries, keys and values also normalizes the heads, and stores keys and values. A causal convolution
reads the frames before a block through the block table. Gate, sum, norm and modulation are one
launch, which also stores the state of the convolution before it. Guidance, Euler step and the
product of the new state are one launch. The part of the first layer's input that depends on
conditions is computed once for all ODE steps.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from token2wav.cache.paged_kv_cache import PagedKVCache
from token2wav.execution.batch import Batch
from token2wav.execution.step import StepFunction
from token2wav.kernels.causal_convolution import CausalConvolution, NormedConvolution
from token2wav.kernels.euler import integrate
from token2wav.kernels.norms import NormVectors, gated_norm, modulated_norm
from token2wav.kernels.past import Past
from token2wav.kernels.products import gelu_product
from token2wav.kernels.rounding import Precision, precision_of
from token2wav.layers.projections import join_projections
from token2wav.networks.ode import OdeTables
from token2wav.networks.step_audio_dit import StepAudioDiT, StepAudioLayer
from token2wav.networks.unet import CausalConv

Vectors = tuple[torch.Tensor, ...]
_GATE_FF = 5  # place of the gate of the feed-forward layer among the vectors of a layer


class StepAudio2KernelStep(StepFunction):
    """Step function of Step-Audio2's DiT on Triton-language kernels.

    It copies the weights of the convolutions.
    """

    estimator: StepAudioDiT

    def __init__(self, estimator: StepAudioDiT, tables: OdeTables, cache: PagedKVCache) -> None:
        super().__init__(estimator, tables, cache)
        blocks: list[StepAudioLayer] = list(estimator.blocks)  # type: ignore[arg-type]
        precision = precision_of(estimator)
        self._layers = [_Layer(block, precision) for block in blocks]
        self._out: nn.Linear = estimator.final_layer["linear"]  # type: ignore[assignment]

    @torch.inference_mode()
    def integrate(self, batch: Batch) -> None:
        conditional = self.estimator.project_conditions(batch.mu, batch.speakers, batch.cond)
        conditions = conditional.new_empty(self.cache.layout.branches, *conditional.shape)
        conditions[0] = conditional
        # an unconditional row has zero conditions, so only the bias is left
        conditions[1:] = self.estimator.in_proj.bias
        velocity = partial(self._velocity, Past(batch, self.cache, self.estimator))
        integrate(batch.x, self.tables, conditions, self.estimator.state_weight, velocity)

    def _velocity(self, past: Past, step: int, inputs: torch.Tensor) -> torch.Tensor:
        """Computes the velocity (branches * blocks, block_frames, bands), see `integrate`."""
        past.move_to(self.tables.stored_steps[step])
        x = inputs.flatten(0, 1)
        rows, out = self.tables.modulation[step]
        # Of every layer: shift, scale and gate of attention, then of the feed-forward layer, then
        # of the convolutions. Of the final norm: shift and scale.
        layer_vectors = [row[0].unbind() for row in rows]
        next_norms = [*((vectors[0], vectors[1]) for vectors in layer_vectors[1:]), out[0].unbind()]
        dtypes = [*(layer.dtype for layer in self._layers[1:]), self._out.weight.dtype]
        h = modulated_norm(x, layer_vectors[0][0], layer_vectors[0][1], self._layers[0].dtype)
        for layer, vectors, (shift, scale), dtype in zip(
            self._layers, layer_vectors, next_norms, dtypes, strict=True
        ):
            h = gated_norm(x, layer(x, h, vectors, past), vectors[_GATE_FF], shift, scale, dtype)
        return self._out(h)


class _Layer:
    """Layer of Step-Audio2's DiT on kernels.

    Attributes:
        dtype: dtype of the weights of attention and of the feed-forward layer.
    """

    def __init__(self, layer: StepAudioLayer, precision: Precision) -> None:
        attention, convolutions = layer.attn, layer.conv.block
        self._index = attention.index
        self._projections = join_projections((attention.to_q, attention.to_k, attention.to_v))
        self._norms = NormVectors.of(attention.q_norm), NormVectors.of(attention.k_norm)
        self._out = attention.proj
        first: CausalConv = convolutions["1"]  # type: ignore[assignment]
        norm: nn.LayerNorm = convolutions["3"]  # type: ignore[assignment]
        second: CausalConv = convolutions["6"]  # type: ignore[assignment]
        self._up, self._down = layer.mlp.fc1, layer.mlp.fc2
        self.dtype = self._up.weight.dtype
        self._first = NormedConvolution(first, norm, precision)
        self._second = CausalConvolution(second, precision)

    def __call__(
        self, x: torch.Tensor, normed: torch.Tensor, vectors: Vectors, past: Past
    ) -> torch.Tensor:
        """Adds attention and convolutions to x, in place.

        Args:
            x: (branches * blocks, block_frames, channels) float32, contiguous: the residual stream.
            normed: modulated norm of x, in the dtype of the weights.
            vectors: shift, scale and gate of attention, of the feed-forward layer, and of the
                convolutions.

        Returns:
            Output of the feed-forward layer, which is not added yet.
        """
        _, _, gate_att, shift_ff, scale_ff, _, shift_conv, scale_conv, gate_conv = vectors
        attention = past.project_and_attend(normed, self._projections, self._index, self._norms)
        h = self._out(attention)
        h = gated_norm(x, h, gate_att, shift_conv, scale_conv, torch.float32)
        norm_ff = NormVectors(shift_ff, scale_ff)
        h = self._first(h, past)
        h = self._second.add_gated(h, past, x, gate_conv, norm_ff, self.dtype)
        return self._down(gelu_product(h, self._up, tanh=True))

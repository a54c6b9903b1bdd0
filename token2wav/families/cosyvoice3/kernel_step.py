"""Step function of a DiT on Triton-language kernels, for CUDA graphs.

The arithmetic equals `DiT.velocity`. Operations are fused where torch would write a result and read
it again:

- gate, sum, norm and modulation
- rotation, rounding and storing of keys and values, and their projection unless cuBLAS computes it
- a product and its GELU
- guidance, Euler step, and the product of the new state

Attention reads the past in its pages, without a copy. The part of the first layer's input that
depends on conditions is computed once for all ODE steps.

With the published sizes in float16, a layer has eight launches: four products of cuBLAS, of which
one includes GELU, the kernel that stores keys and values, attention, and twice gate, sum and norm.
Where a kernel computes the projection (`kernels/products.py`), a layer has seven.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from token2wav.cache.paged_kv_cache import PagedKVCache
from token2wav.execution.batch import Batch
from token2wav.execution.block_table import frame_positions
from token2wav.execution.step import StepFunction
from token2wav.kernels.attention import paged_attention
from token2wav.kernels.euler import integrate
from token2wav.kernels.norms import gated_norm, modulated_norm
from token2wav.kernels.position_convolution import PositionConvolution
from token2wav.kernels.products import gelu_product, project_heads
from token2wav.kernels.rounding import precision_of
from token2wav.networks.dit import DiT, DiTBlock, DiTFeedForward
from token2wav.networks.estimator import Modulation, Rope
from token2wav.networks.ode import OdeTables


class CosyVoice3KernelStep(StepFunction):
    """Step function of a DiT on Triton-language kernels.

    It copies the weights of the position convolutions.
    """

    estimator: DiT

    def __init__(self, estimator: DiT, tables: OdeTables, cache: PagedKVCache) -> None:
        super().__init__(estimator, tables, cache)
        self._blocks: list[DiTBlock] = list(estimator.transformer_blocks)  # type: ignore[arg-type]
        self._projections = [block.attn.projections() for block in self._blocks]
        positions = estimator.input_embed.conv_pos_embed
        assert positions is not None
        precision = precision_of(estimator)
        self._convolutions = [
            PositionConvolution(conv[0], precision)  # type: ignore[arg-type]
            for conv in (positions.conv1, positions.conv2)
        ]

    @torch.inference_mode()
    def integrate(self, batch: Batch) -> None:
        estimator, embedding = self.estimator, self.estimator.input_embed
        conditional = estimator.project_conditions(batch.mu, batch.speakers, batch.cond)
        conditions = conditional.new_empty(self.cache.layout.branches, *conditional.shape)
        conditions[0] = conditional
        # The conditions of the unconditional branch are zero, so only the bias is left.
        conditions[1:] = embedding.proj.bias
        rope = estimator.rope(frame_positions(batch.table, batch.block_frames))
        velocity = partial(self._velocity, batch, rope)
        integrate(batch.x, self.tables, conditions, embedding.state_weight, velocity)

    def _velocity(self, batch: Batch, rope: Rope, step: int, inputs: torch.Tensor) -> torch.Tensor:
        """Computes the velocity (branches * blocks, block_frames, bands), see `integrate`."""
        stored, x = self.tables.stored_steps[step], inputs.flatten(0, 1)
        h = x
        tails = self.estimator.tails(batch.conv_state[:, stored])
        for convolution, tail in zip(self._convolutions, tails, strict=True):
            h = convolution(h, tail, batch.table)
        attend = partial(self._attended, batch, stored, rope)
        return velocity_of_layers(self.estimator, x, h, self.tables.modulation[step], attend)

    def _attended(
        self, batch: Batch, stored: int, rope: Rope, layer: int, h: torch.Tensor
    ) -> torch.Tensor:
        """Computes the output (branches * blocks, block_frames, dim) of attention."""
        view, (cos, sin) = self.cache.layer(stored, layer), rope
        queries = project_heads(h, self._projections[layer], view, cos, sin, batch.table)
        attention = paged_attention(queries, view, cos, sin, batch.table)
        return self._blocks[layer].attn.to_out[0](attention)


def velocity_of_layers(
    estimator: DiT,
    x: torch.Tensor,
    added: torch.Tensor | None,
    modulation: Modulation,
    attend: Callable[[int, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Computes the velocity (rows, frames, bands) from the input of the first layer.

    Args:
        x: (rows, frames, dim) float32, contiguous: first part of the input. It is overwritten.
        added: (rows, frames, dim) second part of the input, which is added to x; None for zeros.
        modulation: modulation of one ODE time, see `DiT.modulation`.
        attend: computes the output of attention (rows, frames, dim) from the index of a layer and
            its normalized input.
    """
    blocks, out = modulation
    # Every layer has shift, scale and gate of attention, and then of the feed-forward layer. The
    # final norm has scale and shift.
    vectors = [row[0].unbind() for row in blocks]
    out_scale, out_shift = out[0].unbind()
    next_norms = [(shift, scale) for shift, scale, *_ in vectors[1:]] + [(out_shift, out_scale)]
    shift, scale, *_ = vectors[0]
    dtype = estimator.proj_out.weight.dtype
    if added is None:
        h = modulated_norm(x, shift, scale, dtype)
    else:
        h = gated_norm(x, added, None, shift, scale, dtype)
    skips = estimator.long_skip_connection is not None
    first = x.clone() if skips else x  # `gated_norm` adds to x in place
    layers: list[DiTBlock] = list(estimator.transformer_blocks)  # type: ignore[arg-type]
    for layer, block in enumerate(layers):
        _, _, gate_att, shift_ff, scale_ff, gate_ff = vectors[layer]
        h = gated_norm(x, attend(layer, h), gate_att, shift_ff, scale_ff)
        h = gated_norm(x, _fed_forward(block.ff, h), gate_ff, *next_norms[layer])
    # A long skip connection comes before the final norm, so h of the last layer is not used.
    if skips:
        return estimator.output(estimator.joined(x, first), out)
    return estimator.proj_out(h)


def _fed_forward(layers: DiTFeedForward, h: torch.Tensor) -> torch.Tensor:
    """Computes the feed-forward layer of h in the dtype of its weights."""
    up: nn.Linear = layers.ff[0][0]  # type: ignore[index]
    return layers.ff[2](gelu_product(h, up, tanh=True))

"""Velocity of a DiT under guided attention on Triton-language kernels, for CUDA graphs.

The arithmetic equals `DiT.velocity`. Torch computes attention itself, because windows have no pages
and each layer has its own mask.

In float16 a layer has eight launches: four products of cuBLAS, of which one includes GELU, the
kernel of the rotation, attention, and twice gate, sum and norm. Torch may also copy the mask or the
result of attention. On the device `meta` it copies the result, so lab/launches counts nine.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from token2wav.families.cosyvoice3.kernel_step import velocity_of_layers
from token2wav.kernels.rotation import rotate_first_heads
from token2wav.networks.dit import DiT, DiTBlock, LayerBiases
from token2wav.networks.estimator import Modulation, Rope, attended


class KernelVelocity:
    """Velocity of the windows of a batch, on kernels."""

    def __init__(self, estimator: DiT) -> None:
        self._estimator = estimator
        self._heads = estimator.attention[1]
        blocks: list[DiTBlock] = list(estimator.transformer_blocks)  # type: ignore[arg-type]
        self._layers = [(block.attn.projections(), block.attn.to_out[0]) for block in blocks]

    def __call__(
        self,
        x: torch.Tensor,
        conditions: torch.Tensor,
        modulation: Modulation,
        biases: LayerBiases,
        *,
        rope: Rope,
    ) -> torch.Tensor:
        """Computes the velocity (B, bands, T), see `DiT.velocity`, at one ODE time for all rows."""
        inputs = self._estimator.input_embed(x.transpose(1, 2), conditions).contiguous()
        attend = partial(self._attended, biases, rope)
        velocity = velocity_of_layers(self._estimator, inputs, None, modulation, attend)
        return velocity.float().transpose(1, 2)

    def _attended(
        self, biases: LayerBiases, rope: Rope, layer: int, h: torch.Tensor
    ) -> torch.Tensor:
        """Computes the output (B, T, dim) of attention."""
        (weight, bias), to_out = self._layers[layer]
        projected = F.linear(h, weight, bias)
        rotate_first_heads(projected, *rope)
        q, k, v = projected.chunk(3, dim=-1)
        return to_out(attended(self._heads, q, k, v, biases[layer]))

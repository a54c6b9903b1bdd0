"""Step-Audio2's flow-matching estimator, a DiT with convolutions in every layer: flow velocity from
frames.

Attention has no positions, its queries and keys are normalised, and convolutions are causal.
Parameters have the names of public `flow.pt` files below `decoder.estimator.`.
"""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from token2wav.networks.dit import modulated_norm
from token2wav.networks.estimator import AttentionContext, Estimator, Modulation, Rope, attended
from token2wav.networks.unet import CausalConv

_TIME_DIM = 256
_TIME_SCALE = 1000.0
_TIME_BASE = 10000.0
_FF_MULT = 4


class StepAudioDiT(Estimator):
    """DiT estimator with convolutions: flow velocity at one ODE time.

    Args:
        bands: mel bands; state, conditions, speaker vector and prompt have the same width.

    Attributes:
        convolutions: convolutions in the order of their `index`, two for each layer.
    """

    masks_padding = True

    def __init__(self, bands: int, channels: int, heads: int, dim_head: int, layers: int) -> None:
        super().__init__()
        self.attention = layers, heads, dim_head
        self.t_embedder = nn.ModuleDict({"mlp": _mlp(_TIME_DIM, channels)})
        self.in_proj = nn.Linear(4 * bands, channels)
        self.blocks = nn.ModuleList(
            StepAudioLayer(channels, heads, dim_head, index) for index in range(layers)
        )
        self.final_layer = nn.ModuleDict({"adaLN_modulation": _modulation(channels, 2)})
        self.final_layer["linear"] = nn.Linear(channels, bands)
        self.convolutions = [module for module in self.modules() if isinstance(module, CausalConv)]
        self.conv_state_shapes = [conv.state_shape for conv in self.convolutions]
        for index, conv in enumerate(self.convolutions):
            conv.index = index

    def modulation(self, t: torch.Tensor, end: torch.Tensor | None = None) -> Modulation:
        """Computes the modulation vectors of times t (B,): nine of each layer, then two of the
        final norm.
        """
        half = _TIME_DIM // 2
        exponents = torch.arange(half, device=t.device).float() * -(math.log(_TIME_BASE) / half)
        angle = _TIME_SCALE * t[:, None] * exponents.exp()
        time = F.silu(self.t_embedder["mlp"](torch.cat((angle.cos(), angle.sin()), dim=-1)))
        parts = [
            block.get_submodule("adaLN_modulation")(time).unflatten(-1, (9, -1))
            for block in self.blocks
        ]
        final = self.final_layer["adaLN_modulation"](time).unflatten(-1, (2, -1))
        return torch.stack(parts), final

    def project_conditions(
        self, mu: torch.Tensor, spks: torch.Tensor, cond: torch.Tensor
    ) -> torch.Tensor:
        parts = torch.cat((mu, spks[:, :, None].expand(-1, -1, mu.shape[2]), cond), dim=1)
        return F.linear(
            parts.transpose(1, 2), self.in_proj.weight[:, len(mu[0]) :], self.in_proj.bias
        )

    def project_state(self, x: torch.Tensor) -> torch.Tensor:
        """Projects the state, (B, T, bands) to (B, T, channels).

        Only this part of the input of the first layer differs between ODE steps.
        """
        return F.linear(x, self.state_weight)

    @property
    def state_weight(self) -> torch.Tensor:
        """Weight (channels, bands) of the state."""
        return self.in_proj.weight.chunk(4, dim=1)[0]

    def velocity(
        self,
        x: torch.Tensor,
        conditions: torch.Tensor,
        modulation: Modulation,
        bias: torch.Tensor | None,
        context: AttentionContext | None = None,
        *,
        rope: Rope = (),
    ) -> torch.Tensor:
        # (B, T, channels)
        h = self.project_state(x.transpose(1, 2)) + conditions
        blocks, out = modulation
        for block, vectors in zip(self.blocks, blocks, strict=True):
            h = block(h, vectors, bias, context)
        shift, scale = out.unbind(1)
        return self.final_layer["linear"](modulated_norm(h, shift, scale)).transpose(1, 2)

    def halve(self) -> None:
        for block in self.blocks:
            block.get_submodule("attn").half()
            block.get_submodule("mlp").half()

    def drop_time_weights(self) -> None:
        """Frees 34 % of the public model's weights."""
        del self.t_embedder, self.final_layer["adaLN_modulation"]
        for block in self.blocks:
            del block.adaLN_modulation


class StepAudioLayer(nn.Module):
    def __init__(self, channels: int, heads: int, dim_head: int, index: int) -> None:
        super().__init__()
        self.attn = _Attention(channels, heads, dim_head, index)
        self.mlp = _StepAudioFeedForward(channels)
        self.conv = _Convolutions(channels)
        self.adaLN_modulation = _modulation(channels, 9)

    def forward(
        self,
        x: torch.Tensor,
        vectors: torch.Tensor,
        bias: torch.Tensor | None,
        context: AttentionContext | None,
    ) -> torch.Tensor:
        """Computes the layer.

        Args:
            x: (B, T, channels).
            vectors: (B or 1, 9, channels) shift, scale and gate of attention, then of feed-forward,
                then of the convolutions.
        """
        attend, feed, convolve = vectors.unflatten(1, (3, 3)).unbind(1)
        x = x + attend[:, 2:] * self.attn(
            modulated_norm(x, attend[:, 0], attend[:, 1]), bias, context
        )
        x = x + convolve[:, 2:] * self.conv(
            modulated_norm(x, convolve[:, 0], convolve[:, 1]), context
        )
        return x + feed[:, 2:] * self.mlp(modulated_norm(x, feed[:, 0], feed[:, 1]))


class _Attention(nn.Module):
    """Multi-head self-attention. Queries and keys are normalised head by head."""

    def __init__(self, channels: int, heads: int, dim_head: int, index: int) -> None:
        super().__init__()
        self.heads, self.index = heads, index
        self.to_q, self.to_k, self.to_v = (nn.Linear(channels, heads * dim_head) for _ in range(3))
        self.q_norm, self.k_norm = nn.LayerNorm(dim_head), nn.LayerNorm(dim_head)
        self.proj = nn.Linear(heads * dim_head, channels)
        self._attend = partial(attended, heads)

    def forward(
        self, x: torch.Tensor, bias: torch.Tensor | None, context: AttentionContext | None
    ) -> torch.Tensor:
        """Computes attention of x (B, T, channels) to the same shape, float32."""
        half = x.to(self.to_q.weight.dtype)
        q, k = (
            self._normal(self.q_norm, self.to_q(half)),
            self._normal(self.k_norm, self.to_k(half)),
        )
        v = self.to_v(half)
        bias = None if bias is None else bias.to(q.dtype)
        h = (
            self._attend(q, k, v, bias)
            if context is None
            else context.attend(self.index, self._attend, q, k, v, bias)
        )
        return self.proj(h).to(x.dtype)

    def _normal(self, norm: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return norm(x.unflatten(-1, (self.heads, -1))).flatten(-2)


class _Convolutions(nn.Module):
    """Two causal convolutions, with a norm over channels and Mish between them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        # The numbers are names in checkpoints. Missing numbers are layers without weights.
        first, second = CausalConv(channels, channels), CausalConv(channels, channels)
        self.block = nn.ModuleDict({"1": first, "3": nn.LayerNorm(channels), "6": second})

    def forward(self, x: torch.Tensor, context: AttentionContext | None) -> torch.Tensor:
        return self.block["6"](F.mish(self.block["3"](self.block["1"](x, context))), context)


class _StepAudioFeedForward(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(channels, _FF_MULT * channels)
        self.fc2 = nn.Linear(_FF_MULT * channels, channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(F.gelu(self.fc1(x.to(self.fc1.weight.dtype)), approximate="tanh")).to(
            x.dtype
        )


def _mlp(inputs: int, channels: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, channels), nn.SiLU(), nn.Linear(channels, channels))


def _modulation(channels: int, vectors: int) -> nn.Sequential:
    """Makes the projection from the embedded time to modulation vectors. SiLU runs before it, once
    for all layers, so its place in the checkpoint is empty.
    """
    return nn.Sequential(nn.Identity(), nn.Linear(channels, vectors * channels))

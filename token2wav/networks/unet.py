"""CosyVoice2's flow-matching estimator, a causal U-Net of one resolution: flow velocity from
frames.

Its convolutions are causal, and its attention covers whole blocks. Parameters have the names of
public `flow.pt` files below `decoder.estimator.`. `centred_unet.py` has the U-Net of CosyVoice1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from token2wav.config.block_grid import BlockGrid
from token2wav.networks.estimator import AttentionContext, Estimator, Modulation, Rope, attended
from token2wav.networks.masks import attention_bias, block_mask
from token2wav.published.sizes import UNetConfig

_KERNEL = 3
_TIME_SCALE = 1000.0
_FF_MULT = 4


class UNetEstimator(Estimator):
    """Base of U-Nets. Each level has half of the frames of the level before. The way up joins the
    frames of a level to those of the way down. Blocks take the shifts of the ODE time and one row
    of conditions.

    Args:
        bands: mel bands; state, conditions, speaker vector and prompt have the same width.
        block: makes a convolution with its norm and activation.
        conv: makes the convolution at the end of a block that keeps the number of frames.
        levels: resolutions, the first of which has all frames.
        mean_flow: whether the network was distilled to the mean velocity of a step, which also
            depends on the end of the step.
    """

    def __init__(
        self,
        bands: int,
        sizes: UNetConfig,
        *,
        block: Callable[[int, int], Any],
        conv: Callable[[int, int], nn.Module],
        levels: int = 1,
        mean_flow: bool = False,
    ) -> None:
        super().__init__()
        channels = sizes.channels
        inputs, time_channels = 4 * bands, 4 * channels
        self.time_mlp = TimeMLP(inputs, time_channels)
        self.time_embed_mixer = (
            nn.Linear(2 * time_channels, time_channels, bias=False) if mean_flow else None
        )

        def part(inputs: int, *last: nn.Module) -> UNetBlock:
            transformer = (TransformerLayer(sizes) for _ in range(sizes.layers))
            residual = ResidualBlock(inputs, channels, time_channels, block)
            return UNetBlock([residual, nn.ModuleList(transformer), *last])

        halving = partial(nn.Conv1d, channels, channels, 3, stride=2, padding=1)
        doubling = partial(nn.ConvTranspose1d, channels, channels, 4, stride=2, padding=1)
        # `blocks` returns them in this order.
        self.down_blocks, self.mid_blocks, self.up_blocks = (nn.ModuleList() for _ in range(3))
        for level in range(levels):
            lowest = level == levels - 1
            down = conv(channels, channels) if lowest else _Resampling(halving())
            self.down_blocks.append(part(channels if level else inputs, down))
        self.mid_blocks.extend(part(channels) for _ in range(sizes.mid_blocks))
        for level in reversed(range(levels)):
            up = _Resampling(doubling()) if level else conv(channels, channels)
            self.up_blocks.append(part(2 * channels, up))
        self.final_block = block(channels, channels)
        self.final_proj = nn.Conv1d(channels, bands, 1)
        self.attention = len(self._layers()), sizes.heads, sizes.dim_head
        for index, layer in enumerate(self._layers()):
            layer.attn1.index = index

    def modulation(self, t: torch.Tensor, end: torch.Tensor | None = None) -> Modulation:
        """Computes the shifts (blocks, B, channels) that residual blocks add at ODE times t (B,).

        Args:
            end: (B,) times at which the steps end. Only a mean flow uses them.
        """
        time = self._embedded(t)
        if self.time_embed_mixer is not None and end is not None:
            time = self.time_embed_mixer(torch.cat((time, self._embedded(end)), dim=-1))
        return (torch.stack([block.of_time(time) for block in self.blocks()]),)

    def _embedded(self, t: torch.Tensor) -> torch.Tensor:
        half = self.time_mlp.linear_1.in_features // 2
        exponents = torch.arange(half, device=t.device).float() * -(math.log(10000) / (half - 1))
        angle = _TIME_SCALE * t[:, None] * exponents.exp()
        return self.time_mlp(torch.cat((angle.sin(), angle.cos()), dim=-1))

    def project_conditions(
        self, mu: torch.Tensor, spks: torch.Tensor, cond: torch.Tensor
    ) -> torch.Tensor:
        """Concatenates the conditions to (B, T, 3 * bands), see `Estimator`."""
        return torch.cat((mu, spks[:, :, None].expand(-1, -1, mu.shape[2]), cond), dim=1).transpose(
            1, 2
        )

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
        h = torch.cat((x.transpose(1, 2), conditions), dim=2)  # (B, T, 4 * bands)
        [shifts] = modulation
        blocks = zip(self.blocks(), shifts, strict=True)
        skips: list[torch.Tensor] = []
        for block, shift in islice(blocks, len(self.down_blocks)):
            skips.append(block(h, shift, bias, context))
            h = block[2](skips[-1], context)
        for block, shift in islice(blocks, len(self.mid_blocks)):
            h = block(h, shift, bias, context)
        for block, shift in blocks:
            skip = skips.pop()
            if len(self.up_blocks) > 1:  # an odd number of frames was rounded up on the way down
                h = h[:, : skip.shape[1]]
            h = block(torch.cat((h, skip), dim=-1), shift, bias, context)
            h = block[2](h, context)
        return self.final_proj(self.final_block(h, context).transpose(1, 2))

    def halve(self) -> None:
        for layer in self._layers():
            layer.attn1.half()
            layer.ff.half()

    def drop_time_weights(self) -> None:
        del self.time_mlp, self.time_embed_mixer
        for block in self.blocks():
            del block[0].mlp

    def blocks(self) -> list[UNetBlock]:
        """Returns all blocks, in the order in which they run."""
        return [module for module in self.modules() if isinstance(module, UNetBlock)]

    def _layers(self) -> list[TransformerLayer]:
        return [module for module in self.modules() if isinstance(module, TransformerLayer)]


class UNet(UNetEstimator):
    """U-Net of one resolution with causal convolutions: one block down, several blocks in the
    middle, and one block up, which also takes the output of the first block.
    """

    def __init__(
        self, bands: int, sizes: UNetConfig, block_frames: int, *, mean_flow: bool = False
    ) -> None:
        super().__init__(bands, sizes, block=ConvolutionBlock, conv=CausalConv, mean_flow=mean_flow)
        self.block_frames = block_frames
        self.convolutions = [module for module in self.modules() if isinstance(module, CausalConv)]
        for index, conv in enumerate(self.convolutions):
            conv.index = index
        self.conv_state_shapes = [conv.state_shape for conv in self.convolutions]

    def forward(
        self,
        x: torch.Tensor,
        mask: torch.Tensor,
        mu: torch.Tensor,
        t: torch.Tensor,
        spks: torch.Tensor,
        cond: torch.Tensor,
        streaming: bool = False,
    ) -> torch.Tensor:
        """Evaluates the estimator with the arguments of the public code: t (B,), and a mask (B, 1,
        T) of ones, because rows are not padded.
        """
        allowed = block_mask(BlockGrid(self.block_frames), x.shape[2], x.device)
        bias = attention_bias(allowed) if streaming else None
        return (
            self.velocity(x, self.project_conditions(mu, spks, cond), self.modulation(t), bias)
            * mask
        )


class UNetBlock(nn.ModuleList):
    """Block: residual block and transformer layers. Outside of the middle it has a third part, the
    convolution after them.
    """

    def of_time(self, time: torch.Tensor) -> torch.Tensor:
        """Computes the shift (B, channels) for an embedded time (B, time_channels)."""
        return self.get_submodule("0.mlp.1")(F.mish(time))

    def forward(
        self,
        x: torch.Tensor,
        time: torch.Tensor,
        bias: torch.Tensor | None,
        context: AttentionContext | None,
    ) -> torch.Tensor:
        """Computes the block (B, T, channels) without its convolution.

        Args:
            x: (B, T, inputs).
            time: (B, channels) or (1, channels) shift.
        """
        h = self[0](x, time, context)
        for layer in self.get_submodule("1").children():
            h = layer(h, bias, context)
        return h


class _Resampling(nn.Module):
    """Convolution that halves the frames of (B, T, channels), rounded up, or doubles them."""

    def __init__(self, conv: nn.Conv1d | nn.ConvTranspose1d) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: torch.Tensor, context: AttentionContext | None = None) -> torch.Tensor:
        return self.conv(x.transpose(1, 2)).transpose(1, 2)


class CausalConv(nn.Conv1d):
    """Causal convolution of frames.

    Attributes:
        state_shape: channels and positions of its state, the end of its input.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, _KERNEL)
        self.index = 0
        self.state_shape = inputs, _KERNEL - 1

    def forward(self, x: torch.Tensor, context: AttentionContext | None = None) -> torch.Tensor:
        """Convolves x (B, T, inputs) to (B, T, outputs)."""
        x, conv = x.transpose(1, 2), super().forward
        y = (
            conv(F.pad(x, (_KERNEL - 1, 0)))
            if context is None
            else context.convolve(self.index, conv, x)
        )
        return y.transpose(1, 2)


class ConvolutionBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        # The numbers are names in checkpoints. Missing numbers are layers without weights.
        self.block = nn.ModuleDict({"0": CausalConv(inputs, outputs), "2": nn.LayerNorm(outputs)})

    def forward(self, x: torch.Tensor, context: AttentionContext | None = None) -> torch.Tensor:
        return F.mish(self.block["2"](self.block["0"](x, context)))


class ResidualBlock(nn.Module):
    """Residual block: two convolution blocks, between which the ODE time is added, and a linear
    skip connection.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        time_channels: int,
        block: Callable[[int, int], Any],
    ) -> None:
        super().__init__()
        self.mlp = nn.ModuleDict({"1": nn.Linear(time_channels, outputs)})
        self.block1, self.block2 = block(inputs, outputs), block(outputs, outputs)
        self.res_conv = nn.Conv1d(inputs, outputs, 1)

    def forward(
        self, x: torch.Tensor, time: torch.Tensor, context: AttentionContext | None = None
    ) -> torch.Tensor:
        """Computes x (B, T, inputs) and time (B or 1, outputs) to (B, T, outputs)."""
        h = self.block2(self.block1(x, context) + time[:, None], context)
        return h + F.linear(x, self.res_conv.weight[:, :, 0], self.res_conv.bias)


class TransformerLayer(nn.Module):
    """Attention without positions and a feed-forward layer, each after a norm."""

    def __init__(self, sizes: UNetConfig) -> None:
        super().__init__()
        channels = sizes.channels
        self.norm1 = nn.LayerNorm(channels)
        self.attn1 = UNetAttention(sizes)
        self.norm3 = nn.LayerNorm(channels)
        self.ff = _UNetFeedForward(channels)

    def forward(
        self, x: torch.Tensor, bias: torch.Tensor | None, context: AttentionContext | None = None
    ) -> torch.Tensor:
        x = x + self.attn1(self.norm1(x), bias, context)
        return x + self.ff(self.norm3(x))


class UNetAttention(nn.Module):
    def __init__(self, sizes: UNetConfig) -> None:
        super().__init__()
        self.index = 0
        channels, inner = sizes.channels, sizes.heads * sizes.dim_head
        self.to_q = nn.Linear(channels, inner, bias=False)
        self.to_k = nn.Linear(channels, inner, bias=False)
        self.to_v = nn.Linear(channels, inner, bias=False)
        self.to_out = nn.ModuleList([nn.Linear(inner, channels)])
        self._attend = partial(attended, sizes.heads)

    def forward(
        self, x: torch.Tensor, bias: torch.Tensor | None, context: AttentionContext | None = None
    ) -> torch.Tensor:
        """Computes attention of x (B, T, channels) to the same shape, float32."""
        half = x.to(self.to_q.weight.dtype)
        q, k, v = self.to_q(half), self.to_k(half), self.to_v(half)
        if bias is not None:
            bias = bias.to(q.dtype)
        h = (
            self._attend(q, k, v, bias)
            if context is None
            else context.attend(self.index, self._attend, q, k, v, bias)
        )
        return self.to_out[0](h).to(x.dtype)


class _UNetFeedForward(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        up, down = (
            nn.Linear(channels, _FF_MULT * channels),
            nn.Linear(_FF_MULT * channels, channels),
        )
        self.net = nn.ModuleDict({"0": nn.ModuleDict({"proj": up}), "2": down})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up, down = self.get_submodule("net.0.proj"), self.net["2"]
        return down(F.gelu(up(x.to(next(self.parameters()).dtype)))).to(x.dtype)


class TimeMLP(nn.Module):
    def __init__(self, inputs: int, channels: int) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(inputs, channels)
        self.linear_2 = nn.Linear(channels, channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear_2(F.silu(self.linear_1(x)))

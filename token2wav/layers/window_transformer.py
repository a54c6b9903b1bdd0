"""Causal transformer of codec decoders. It has a sliding window, and its layers stream.

Modules have the names of the published weights in Hugging Face's format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from token2wav.layers.combine import placed
from token2wav.layers.projections import join_projections
from token2wav.layers.streaming import OFFLINE, ON_TIME, StreamModule, StreamStep, Timing
from token2wav.layers.window_attention import (
    PositionCounter,
    Positions,
    WindowAttention,
    rotary_angles,
)


@dataclass(frozen=True)
class TransformerSizes:
    """Sizes of a transformer."""

    layers: int
    width: int  # channels of the residual stream
    heads: int
    dim_head: int
    window: int  # positions that a position attends to, itself included
    rope_base: float  # base of the frequencies of rotary positions
    key_heads: int | None = None  # heads of keys and values, a divisor of `heads`; None for `heads`
    rope_precision: torch.dtype = torch.float32  # of the cosines and sines of rotary positions
    scaled: bool = True  # whether the outputs of attention and feed-forward part are scaled

    @classmethod
    def of(cls, sizes: Any) -> TransformerSizes:
        """Returns the sizes of a codec that has the names of `transformers`, and `dim_head`."""
        return cls(
            sizes.num_hidden_layers,
            sizes.hidden_size,
            sizes.num_attention_heads,
            sizes.dim_head,
            sizes.sliding_window,
            sizes.rope_theta,
            key_heads=sizes.num_key_value_heads,
        )


class LayersInWindow(StreamModule):
    """Layers with a sliding window and rotary positions. If their input is late, position 0 is the
    position of the first frame of the stream, and earlier input has no effect.
    """

    def __init__(self, sizes: TransformerSizes, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.positions = PositionCounter(sizes.window)
        self._rope = sizes.dim_head, sizes.rope_base, sizes.rope_precision
        self._windows = [module for module in self.modules() if isinstance(module, WindowAttention)]

    def place(self, timing: Timing = ON_TIME) -> Timing:
        return placed((module for module in self.modules() if module is not self), timing)

    def forward(self, x: torch.Tensor, step: StreamStep = OFFLINE) -> torch.Tensor:
        """Computes x (B, T, width) to the same shape."""
        before = self.positions.input.delay if step.first else 0
        x = x[:, before:]
        positions = self.positions(x, self._windows[0], step)
        angles = rotary_angles(positions.values, *self._rope)
        for layer in self.layers:
            x = layer(x, positions, angles, step)
        return F.pad(x, (0, 0, before, 0)) if before else x


class WindowTransformer(LayersInWindow):
    """Transformer with a sliding window and rotary positions."""

    def __init__(
        self,
        sizes: TransformerSizes,
        norm: Callable[[int], nn.Module],  # over a number of channels
        mlp: Callable[[], nn.Module],
    ) -> None:
        super().__init__(sizes, (TransformerLayer(sizes, norm, mlp()) for _ in range(sizes.layers)))


class ProjectedTransformer(StreamModule):
    """Transformer with a sliding window between two projections, with a norm after it if the codec
    has one.
    """

    def __init__(
        self,
        transformer: WindowTransformer,
        input_proj: nn.Module,
        output_proj: nn.Module,
        norm: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.input_proj, self.output_proj = input_proj, output_proj
        self.transformer, self.norm = transformer, norm or nn.Identity()

    def forward(self, x: torch.Tensor, step: StreamStep = OFFLINE) -> torch.Tensor:
        """Converts x (B, T, inputs) to (B, T, outputs)."""
        return self.output_proj(self.norm(self.transformer(self.input_proj(x), step)))


def projection(inputs: int, outputs: int, *, bias: bool = False, always: bool = False) -> nn.Module:
    """Makes a projection; none where the number of channels is the same, unless `always` is set."""
    if inputs == outputs and not always:
        return nn.Identity()
    return nn.Linear(inputs, outputs, bias=bias)


class TransformerLayer(nn.Module):
    """Attention and a feed-forward part, each after a norm, with a scale for every channel if the
    sizes ask for it.
    """

    def __init__(
        self, sizes: TransformerSizes, norm: Callable[[int], nn.Module], mlp: nn.Module
    ) -> None:
        super().__init__()
        self.self_attn = WindowTransformerAttention(sizes)
        self.mlp = mlp
        self.input_layernorm, self.post_attention_layernorm = norm(sizes.width), norm(sizes.width)
        self.self_attn_layer_scale, self.mlp_layer_scale = (
            LayerScale(sizes.width) if sizes.scaled else _Sum() for _ in range(2)
        )

    def forward(
        self,
        x: torch.Tensor,
        positions: Positions,
        angles: tuple[torch.Tensor, torch.Tensor],
        step: StreamStep,
    ) -> torch.Tensor:
        h = self.self_attn(self.input_layernorm(x), positions, angles, step)
        x = self.self_attn_layer_scale(x, h)
        return self.mlp_layer_scale(x, self.mlp(self.post_attention_layernorm(x)))


class WindowTransformerAttention(nn.Module):
    """Projections around `WindowAttention`.

    Attributes:
        joined: weights of queries, keys and values as one, for a single product; None for three.
    """

    joined: torch.Tensor | None = None

    def __init__(self, sizes: TransformerSizes) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.key_heads = key_heads = sizes.key_heads or sizes.heads
        dim_head = sizes.dim_head
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(sizes.width, heads * dim_head, bias=False)
            for heads in (sizes.heads, key_heads, key_heads)
        )
        self.o_proj = nn.Linear(sizes.heads * dim_head, sizes.width, bias=False)
        self.window = WindowAttention(key_heads, dim_head, sizes.window)
        self._dim_head = dim_head

    def forward(
        self,
        x: torch.Tensor,
        positions: Positions,
        angles: tuple[torch.Tensor, torch.Tensor],
        step: StreamStep,
    ) -> torch.Tensor:
        q, k, v = self.projected(x)
        h = self.window(q, k, v, positions, angles, step)
        return self.o_proj(h.flatten(2))

    def projected(self, x: torch.Tensor) -> Iterable[torch.Tensor]:
        """Computes queries, keys and values (B, T, heads, dim_head) of x (B, T, width)."""
        projections = self.q_proj, self.k_proj, self.v_proj
        if self.joined is not None:
            heads = F.linear(x, self.joined).unflatten(-1, (-1, self._dim_head))
            return heads.split((self.heads, self.key_heads, self.key_heads), dim=2)
        return (project(x).unflatten(-1, (-1, self._dim_head)) for project in projections)

    def join(self) -> None:
        """Joins the weights of queries, keys and values, once they are loaded."""
        self.joined, _ = join_projections((self.q_proj, self.k_proj, self.v_proj))


class LayerScale(nn.Module):
    """Sum of a signal and the output of a part, with a scale of every channel of the output."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        return torch.addcmul(x, self.scale, output)


class _Sum(nn.Module):
    def forward(self, x: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        return x + output

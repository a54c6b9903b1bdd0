"""The DiT estimator of CosyVoice3: flow velocity from frames.

Comments mark details that only follow the public code, because checkpoints depend on them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from token2wav.config.block_grid import BlockGrid
from token2wav.layers.projections import join_projections
from token2wav.networks.estimator import AttentionContext, Estimator, Modulation, Rope, attended
from token2wav.networks.masks import attention_bias, block_mask
from token2wav.published.sizes import EstimatorConfig

_CONV_KERNEL = 31
CONTEXT_FRAMES = _CONV_KERNEL - 1  # inputs that each position convolution reaches back
_CONV_GROUPS = 16
_TIME_DIM = 256
_TIME_SCALE = 1000.0
_ROPE_BASE = 10000.0


# Bias of attention scores, broadcastable to (B, heads, T, keys): one for all layers, or one for
# each layer; None for full attention.
Bias = torch.Tensor | None
LayerBiases = tuple[torch.Tensor, ...]


class TimeEmbedding(nn.Module):
    """Embedding of the ODE time: 256 sinusoids, then a two-layer perceptron."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.time_mlp = nn.Sequential(nn.Linear(_TIME_DIM, dim), nn.SiLU(), nn.Linear(dim, dim))

    def forward(self, t: torch.Tensor) -> torch.Tensor:
        """Embeds times (B,) in [0, 1] to (B, dim)."""
        angle = _TIME_SCALE * t[:, None] * self.frequencies(t.device)[None]
        return self.time_mlp(torch.cat((angle.sin(), angle.cos()), dim=-1))

    @staticmethod
    def frequencies(device: torch.device) -> torch.Tensor:
        """Returns the frequencies (128,) of the sinusoids."""
        half = _TIME_DIM // 2
        exponent = torch.arange(half, device=device).float() * -(math.log(10000.0) / (half - 1))
        return exponent.exp()


class ConvPositionEmbedding(nn.Module):
    """Two causal grouped convolutions that add the relative position of frames.

    With `block_frames` every block is convolved alone, so that only attention connects blocks.
    """

    def __init__(self, dim: int, block_frames: int | None = None) -> None:
        super().__init__()
        self._block_frames = block_frames
        self.conv1 = nn.Sequential(
            nn.Conv1d(dim, dim, _CONV_KERNEL, groups=_CONV_GROUPS), nn.Mish()
        )
        self.conv2 = nn.Sequential(
            nn.Conv1d(dim, dim, _CONV_KERNEL, groups=_CONV_GROUPS), nn.Mish()
        )

    def forward(self, x: torch.Tensor, context: AttentionContext | None = None) -> torch.Tensor:
        """Convolves x (B, T, dim) to (B, T, dim).

        Without a context, zeros come before x, or before each of its blocks.
        """
        if self._block_frames is not None:
            blocks = F.pad(x, (0, 0, 0, -x.shape[1] % self._block_frames)).unflatten(
                1, (-1, self._block_frames)
            )
            h = self._convolved(blocks.flatten(0, 1), None)
            return h.unflatten(0, blocks.shape[:2]).flatten(1, 2)[:, : x.shape[1]]
        return self._convolved(x, context)

    def _convolved(self, x: torch.Tensor, context: AttentionContext | None) -> torch.Tensor:
        h = x.transpose(1, 2)
        for index, conv in enumerate((self.conv1, self.conv2)):
            h = (
                conv(F.pad(h, (CONTEXT_FRAMES, 0)))
                if context is None
                else context.convolve(index, conv, h)
            )
        return h.transpose(1, 2)


class InputEmbedding(nn.Module):
    """Projection of the state, the conditions and the speaker of a frame to one vector."""

    def __init__(self, config: EstimatorConfig) -> None:
        super().__init__()
        self._bands = config.mel_dim
        mels = 2 if config.guided is None else 1
        self.proj = nn.Linear(mels * config.mel_dim + config.mu_dim + config.spk_dim, config.dim)
        block_frames = None if config.guided is None else config.static_chunk_size
        self.conv_pos_embed = (
            ConvPositionEmbedding(config.dim, block_frames)
            if config.position_convolutions is None
            else None
        )

    def forward(
        self, x: torch.Tensor, conditions: torch.Tensor, context: AttentionContext | None = None
    ) -> torch.Tensor:
        """Embeds the state x (B, T, bands) and projected conditions (B, T, dim) to (B, T, dim)."""
        h = self.project_state(x) + conditions
        return h if self.conv_pos_embed is None else self.conv_pos_embed(h, context) + h

    def project_state(self, x: torch.Tensor) -> torch.Tensor:
        """Projects the state, (B, T, bands) to (B, T, dim).

        Only this part of the embedding differs between ODE steps.
        """
        return F.linear(x, self.state_weight)

    @property
    def state_weight(self) -> torch.Tensor:
        """Weight (dim, bands) of the state."""
        return self.proj.weight[:, : self._bands]

    def project_conditions(
        self, cond: torch.Tensor | None, mu: torch.Tensor, spks: torch.Tensor
    ) -> torch.Tensor:
        """Projects the conditions to (B, T, dim). Here mel and mu are (B, T, bands).

        Args:
            cond: prompt mel; None with guided attention.
            spks: (B, bands) or (B, T, bands) speaker vectors.
        """
        if spks.dim() == 2:
            spks = spks[:, None].expand(-1, mu.shape[1], -1)
        # The public order of columns: state, cond, mu, speaker.
        parts = (mu, spks) if cond is None else (cond, mu, spks)
        return F.linear(
            torch.cat(parts, dim=-1), self.proj.weight[:, self._bands :], self.proj.bias
        )


class RotaryEmbedding(nn.Module):
    """Rotary position embedding on interleaved pairs (2i, 2i + 1)."""

    inv_freq: torch.Tensor

    def __init__(self, dim_head: int) -> None:
        super().__init__()
        exponent = torch.arange(0, dim_head, 2).float() / dim_head
        self.register_buffer("inv_freq", 1.0 / _ROPE_BASE**exponent)

    def forward(self, positions: torch.Tensor) -> Rope:
        """Computes cos and sin (..., dim_head) of absolute frame positions (T,) or (B, T)."""
        angle = positions.float()[..., None] * self.inv_freq  # (..., dim_head / 2)
        angle = angle.repeat_interleave(2, dim=-1)
        return angle.cos(), angle.sin()


def rotate_first_head(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates head 0 of x (B, T, heads * dim_head), in float32.

    The public code rotates before it splits heads, so only head 0 has positions.
    """
    head, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    pairs = head.unflatten(-1, (-1, 2))
    turned = torch.stack((-pairs[..., 1], pairs[..., 0]), dim=-1).flatten(-2)
    return torch.cat(((head * cos + turned * sin).to(x.dtype), rest), dim=-1)


class DiTAttention(nn.Module):
    """Multi-head self-attention with rotary positions on the first head."""

    def __init__(self, config: EstimatorConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self._attend = partial(attended, config.heads)
        inner = config.heads * config.dim_head
        self.to_q = nn.Linear(config.dim, inner)
        self.to_k = nn.Linear(config.dim, inner)
        self.to_v = nn.Linear(config.dim, inner)
        self.to_out = nn.ModuleList([nn.Linear(inner, config.dim)])

    def forward(
        self,
        x: torch.Tensor,
        rope: Rope,
        bias: torch.Tensor | None,
        context: AttentionContext | None = None,
    ) -> torch.Tensor:
        """Computes attention of x (B, T, dim) to (B, T, dim).

        `bias` is broadcastable to (B, heads, T, keys); None for full attention.
        """
        x = x.to(self.to_q.weight.dtype)
        q = rotate_first_head(self.to_q(x), *rope)
        k = rotate_first_head(self.to_k(x), *rope)
        v = self.to_v(x)
        h = (
            self._attend(q, k, v, bias)
            if context is None
            else context.attend(self.layer, self._attend, q, k, v, bias)
        )
        return self.to_out[0](h)

    def projections(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns weight (3 * inner, dim) and bias (3 * inner,) of queries, keys and values. The
        parameters of the three layers become views of them.
        """
        weight, bias = join_projections((self.to_q, self.to_k, self.to_v))
        assert bias is not None
        return weight, bias


class DiTFeedForward(nn.Module):
    def __init__(self, config: EstimatorConfig) -> None:
        super().__init__()
        inner = config.dim * config.ff_mult
        # The position of each module is its name in checkpoints; index 1 is a dropout there.
        up = nn.Sequential(nn.Linear(config.dim, inner), nn.GELU(approximate="tanh"))
        self.ff = nn.Sequential(up, nn.Identity(), nn.Linear(inner, config.dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ff(x.to(self.dtype))

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype


class AdaNorm(nn.Module):
    """Projection of the time embedding to modulation vectors. The norm itself has no parameters."""

    def __init__(self, dim: int, vectors: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim * vectors)
        self.vectors = vectors

    def modulation(self, time: torch.Tensor) -> torch.Tensor:
        """Computes modulation vectors (B, vectors, dim) of a time embedding (B, dim)."""
        return self.linear(F.silu(time)).unflatten(-1, (self.vectors, -1))


def modulated_norm(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Normalises x (B, T, dim) without weights, then scales and shifts it by vectors (B, dim)."""
    return torch.addcmul(
        shift[:, None], F.layer_norm(x, x.shape[-1:], eps=1e-6), 1 + scale[:, None]
    )


class DiTBlock(nn.Module):
    def __init__(self, config: EstimatorConfig, layer: int) -> None:
        super().__init__()
        self.attn_norm = AdaNorm(config.dim, 6)
        self.attn = DiTAttention(config, layer)
        self.ff = DiTFeedForward(config)

    def forward(
        self,
        x: torch.Tensor,
        modulation: torch.Tensor,
        rope: Rope,
        bias: torch.Tensor | None,
        context: AttentionContext | None = None,
    ) -> torch.Tensor:
        """Computes the block: x (B, T, dim) and modulation (B, 6, dim) to (B, T, dim)."""
        shift_att, scale_att, gate_att, shift_ff, scale_ff, gate_ff = modulation.unbind(1)
        h = self.attn(modulated_norm(x, shift_att, scale_att), rope, bias, context)
        x = torch.addcmul(x, gate_att[:, None], h.to(x.dtype))
        h = self.ff(modulated_norm(x, shift_ff, scale_ff))
        return torch.addcmul(x, gate_ff[:, None], h.to(x.dtype))


class DiT(Estimator):
    """DiT estimator: flow velocity at one ODE time."""

    def __init__(self, config: EstimatorConfig) -> None:
        super().__init__()
        self.attention = config.depth, config.heads, config.dim_head
        # state of the two position convolutions
        self.conv_state_shapes = [(config.dim, CONTEXT_FRAMES)] * 2
        self.block_frames = config.static_chunk_size
        self.guided = config.guided
        self.time_embed = TimeEmbedding(config.dim)
        self.input_embed = InputEmbedding(config)
        self.rotary_embed = RotaryEmbedding(config.dim_head)
        self.transformer_blocks = nn.ModuleList(
            [DiTBlock(config, layer) for layer in range(config.depth)]
        )
        self.long_skip_connection = (
            nn.Linear(2 * config.dim, config.dim, bias=False)
            if config.long_skip_connection
            else None
        )
        self.norm_out = AdaNorm(config.dim, 2)
        self.proj_out = nn.Linear(config.dim, config.out_channels)

    def modulation(self, t: torch.Tensor, end: torch.Tensor | None = None) -> Modulation:
        """Computes the modulation vectors of times t (B,), in the order of the public code.

        Returns:
            (depth, B, 6, dim) shift, scale and gate of attention, then of the feed-forward layer;
            and (B, 2, dim) scale, then shift of the final norm. Here scale comes first.
        """
        time = self.time_embed(t)
        blocks = [block.attn_norm.modulation(time) for block in self._blocks()]
        return torch.stack(blocks), self.norm_out.modulation(time)

    def rope(self, positions: torch.Tensor) -> Rope:
        return self.rotary_embed(positions)

    def project_conditions(
        self, mu: torch.Tensor, spks: torch.Tensor, cond: torch.Tensor | None
    ) -> torch.Tensor:
        """Projects the conditions to (B, T, dim), see `Estimator`.

        With guided attention there is no cond, and spks may be (B, T, bands), a speaker vector for
        every frame.
        """
        cond = None if cond is None else cond.transpose(1, 2)
        return self.input_embed.project_conditions(cond, mu.transpose(1, 2), spks)

    def velocity(
        self,
        x: torch.Tensor,
        conditions: torch.Tensor,
        modulation: Modulation,
        bias: Bias | LayerBiases,
        context: AttentionContext | None = None,
        *,
        rope: Rope = (),
    ) -> torch.Tensor:
        """With guided attention `bias` is a tuple with one bias for each layer."""
        first = h = self.input_embed(x.transpose(1, 2), conditions, context)
        blocks, out = modulation
        for block, row, layer_bias in zip(
            self._blocks(), blocks, self._layer_biases(bias), strict=True
        ):
            h = block(h, row, rope, layer_bias, context)
        return self.output(self.joined(h, first), out).float().transpose(1, 2)

    def joined(self, last: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        """Joins the output of the last layer and the input of the first one, each (B, T, dim), if
        the estimator has a long skip connection. Without one returns the output.
        """
        if self.long_skip_connection is None:
            return last
        return self.long_skip_connection(torch.cat((last, first), dim=-1))

    def output(self, x: torch.Tensor, modulation: torch.Tensor) -> torch.Tensor:
        """Normalises x (B, T, dim), and projects it to a velocity (B, T, bands)."""
        scale, shift = modulation.unbind(1)
        return self.proj_out(modulated_norm(x, shift, scale).to(self.proj_out.weight.dtype))

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
        """Evaluates the estimator with the arguments of the public code: t (B,), and a padding mask
        (B, 1, T) of 0 and 1.
        """
        attend = mask.bool()[:, :, None, :]  # (B, 1, 1, T): no key in the padding
        if streaming:
            attend = attend & block_mask(BlockGrid(self.block_frames), x.shape[2], x.device)
        rope = self.rope(torch.arange(x.shape[2], device=x.device))
        conditions, bias = self.project_conditions(mu, spks, cond), attention_bias(attend)
        return self.velocity(x, conditions, self.modulation(t), bias, rope=rope) * mask

    def halve(self) -> None:
        for block in self._blocks():
            block.attn.half()
            block.ff.half()
        self.proj_out.half()

    def drop_time_weights(self) -> None:
        """Frees 43 % of the public model's weights."""
        del self.time_embed, self.norm_out
        for block in self._blocks():
            del block.attn_norm

    @property
    def score_dtype(self) -> torch.dtype:
        """dtype of the attention scores and of their biases."""
        return self.proj_out.weight.dtype

    def _layer_biases(self, bias: Bias | LayerBiases) -> Sequence[Bias]:
        if isinstance(bias, tuple):
            return [layer_bias.to(self.score_dtype) for layer_bias in bias]
        return [None if bias is None else bias.to(self.score_dtype)] * len(self.transformer_blocks)

    def _blocks(self) -> list[DiTBlock]:
        return list(self.transformer_blocks)  # type: ignore[arg-type]

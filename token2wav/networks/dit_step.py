"""One ODE step of a batch of chunks as a pure function of tensors: what exporters turn into graphs.

A graph can neither read pages nor change its inputs, so the past comes in as dense tensors and what is new goes out.
All that is the same in every step (rotary angles, attention bias) or depends on time alone (modulation) is an input.
"""

from __future__ import annotations

import torch
from torch import nn

from token2wav.networks.dit import CONTEXT_FRAMES, Attend, Convolution, DiT, Modulation


def with_context(context: torch.Tensor, x: torch.Tensor, frames: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Input of a position convolution behind its context, and the context of the frames that follow.

    Args:
        context: (R, dim, CONTEXT_FRAMES) inputs before x.
        x: (R, dim, N) inputs.
        frames: (R,) valid frames of each row; what follows them is padding.

    Returns:
        (R, dim, CONTEXT_FRAMES + N), x behind its context, and (R, dim, CONTEXT_FRAMES), the last of the valid inputs.
    """
    x = torch.cat((context, x), dim=2)
    # There are CONTEXT_FRAMES inputs in front, so the last ones of n valid frames start at n.
    last = frames[:, None, None] + torch.arange(CONTEXT_FRAMES, device=x.device)  # (R, 1, CONTEXT_FRAMES)
    return x, x.gather(2, last.expand(-1, x.shape[1], -1))


class DenseMemory:
    """The estimator's `Memory` for rows whose pasts have different lengths, padded.

    Args:
        contexts: (2, R, dim, CONTEXT_FRAMES) last inputs of the position convolutions.
        frames: (R,) valid frames of each row; what follows them is padding.
        past: keys and values of every layer, k0, v0, k1, v1 ..., each (R, S, inner).

    Attributes:
        contexts: as given, then after the chunk.
        new: keys and values of the chunk in the same order, each (R, N, inner).
    """

    def __init__(self, contexts: torch.Tensor, frames: torch.Tensor, past: tuple[torch.Tensor, ...]) -> None:
        self._before = contexts
        self._past = past
        self._frames = frames
        self._after: list[torch.Tensor] = []
        self.new: list[torch.Tensor] = []

    @property
    def contexts(self) -> torch.Tensor:
        return torch.stack(self._after)

    def convolve(self, index: int, conv: Convolution, x: torch.Tensor) -> torch.Tensor:
        x, after = with_context(self._before[index], x, self._frames)
        self._after.append(after)
        return conv(x)

    def attend(
        self,
        layer: int,
        attend: Attend,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        self.new += [k, v]
        past_k, past_v = self._past[2 * layer], self._past[2 * layer + 1]
        return attend(q, torch.cat((past_k, k), dim=1), torch.cat((past_v, v), dim=1), bias)


class CachedStep(nn.Module):
    """The estimator with its past as inputs and outputs. Rows are streams and guidance branches; all are at one time.

    Args:
        estimator: whose weights are used; those behind `modulation` are not.
    """

    def __init__(self, estimator: DiT) -> None:
        super().__init__()
        self.estimator = estimator
        self.layers = len(estimator.transformer_blocks)

    @property
    def input_names(self) -> list[str]:
        return [*STEP_INPUTS, *(f"past_{name}" for name in self._cache_names)]

    @property
    def output_names(self) -> list[str]:
        return ["velocity", "new_contexts", *(f"new_{name}" for name in self._cache_names)]

    @property
    def _cache_names(self) -> list[str]:
        return [f"{which}_{layer}" for layer in range(self.layers) for which in ("key", "value")]

    def forward(
        self,
        x: torch.Tensor,
        mu: torch.Tensor,
        spks: torch.Tensor,
        cond: torch.Tensor,
        modulation: torch.Tensor,
        modulation_out: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        bias: torch.Tensor,
        frames: torch.Tensor,
        contexts: torch.Tensor,
        past: tuple[torch.Tensor, ...],
    ) -> tuple[torch.Tensor, ...]:
        """R rows of N frames each, with S frames of past.

        Args:
            x, mu, cond: (R, bands, N) float32, like all but `frames` and `past`.
            spks: (R, bands).
            modulation: (layers, 6, dim) of the step's time; modulation_out: (2, dim).
            cos, sin: (R, N, dim_head) of the frames' positions.
            bias: (R, 1, N, S + N) to add to attention scores: 0, or -30000 where a frame must not look.
            frames: (R,) int64, how many of the N frames are valid.
            contexts: (2, R, dim, CONTEXT_FRAMES) inputs of the two position convolutions before the first frame.
            past: k0, v0, k1, v1 ..., each (R, S, inner), in the type of the attention's weights.

        Returns:
            Velocity (R, bands, N), contexts after the valid frames, and the chunk's k0, v0, k1, v1 ..., (R, N, inner).
        """
        memory = DenseMemory(contexts, frames, past)
        velocity = self.estimator.velocity(
            x,
            mu,
            spks,
            cond,
            Modulation(modulation[:, None], modulation_out[None]),
            (cos, sin),
            bias,
            memory,
        )
        return velocity, memory.contexts, *memory.new


STEP_INPUTS = ("x", "mu", "spks", "cond", "modulation", "modulation_out", "cos", "sin", "bias", "frames", "contexts")

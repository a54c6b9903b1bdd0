"""Estimators of the flow's velocity, in what all of them have in common, and one ODE step of them
as a pure function.

A graph can neither read pages nor change its inputs, so in the step that is exported the past comes
in as dense tensors and what is new goes out. All that is the same in every step (rotary angles,
attention bias) or depends on time alone (modulation) is an input.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Protocol

import torch
from torch import nn

Convolution = Callable[[torch.Tensor], torch.Tensor]
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
# all that depends on the ODE time alone, each (layers, B, ...) or (B, ...)
Modulation = tuple[torch.Tensor, ...]
# cos and sin of rotary angles, (T, dim_head) or (B, T, dim_head), if there are any
Rope = tuple[torch.Tensor, ...]

# Names in a graph of what only some estimators have.
MODULATION, ROPE, PRESENT = ("modulation", "modulation_out"), ("cos", "sin"), "present"


class AttentionContext(Protocol):
    """State of the frames before those that the estimator is given (`execution/step.py`)."""

    def convolve(self, index: int, conv: Convolution, x: torch.Tensor) -> torch.Tensor:
        """Runs a convolution over x (B, channels, T) with its state in front, and saves its new
        state.
        """

    def attend(
        self,
        layer: int,
        attend: Attend,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """Lets q (B, T, inner) attend to all that it can see; notes the chunk's keys and values (B,
        T, inner).
        """


class Estimator(nn.Module, ABC):
    """Estimator of the flow's velocity, of any family.

    With a memory it continues an utterance whose past is cached; without one it takes whole
    sequences.
    """

    attention: tuple[int, int, int]  # layers with keys and values, heads, and channels of a head
    # channels and positions of the state of each convolution
    conv_state_shapes: list[tuple[int, int]]
    # prompts may begin with frames that there are not (`ModelConfig.absent_tokens`)
    full_prompt_attention = False

    @abstractmethod
    def modulation(self, t: torch.Tensor, end: torch.Tensor | None = None) -> Modulation:
        """Computes all that depends on ODE times (B,) alone and on where their steps end, so that
        it can be a table.
        """

    def rope(self, positions: torch.Tensor) -> Rope:
        """Encodes positions (T,) or (B, T) of frames, counted from the start of the prompt, as
        layers need them.
        """
        return ()

    @abstractmethod
    def prepare_conditions(
        self, mu: torch.Tensor, spks: torch.Tensor, cond: torch.Tensor
    ) -> torch.Tensor:
        """Prepares the conditions of frames. They are the same at every ODE step, so this runs once
        for all steps.

        Args:
            mu: (B, bands, T) encoded tokens.
            spks: (B, bands) speaker vectors.
            cond: (B, bands, T) mel of the prompt; zeros behind it.

        Returns:
            (B, T, width) conditions, as `velocity` takes them. The width depends on the estimator.
        """

    @abstractmethod
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
        """Evaluates the estimator.

        Args:
            x: (B, bands, T) state.
            conditions: (B, T, width) of `prepare_conditions`.
            modulation: of the time of each row (or of one row for all).
            bias: to add to attention scores, broadcastable to (B, heads, T, keys); None for full
                attention.
            memory: of the frames before x; None if x is a whole sequence that starts with the
                prompt.
            rope: of the positions of x.

        Returns:
            (B, bands, T) velocity, float32.
        """

    @abstractmethod
    def halve(self) -> None:
        """Puts into float16 what may be (docs/parity.md)."""

    @abstractmethod
    def drop_time_weights(self) -> None:
        """Frees what `modulation` needs, once its results are in tables."""

    @property
    def state_width(self) -> int:
        """Numbers that all convolutions keep of a stream at one ODE step and guidance branch."""
        return sum(map(math.prod, self.conv_state_shapes))

    def tails(self, state: torch.Tensor) -> list[torch.Tensor]:
        """Views (..., channels, positions) of what each convolution keeps, in a state (...,
        state_width).
        """
        starts = pairwise(accumulate(map(math.prod, self.conv_state_shapes), initial=0))
        return [
            state[..., a:b].unflatten(-1, shape)
            for (a, b), shape in zip(starts, self.conv_state_shapes, strict=True)
        ]

    @property
    def cache_type(self) -> torch.dtype:
        """Type of keys and values."""
        return next(
            weight.dtype for name, weight in self.named_parameters() if name.endswith("to_k.weight")
        )


class DenseContext:
    """The estimator's `Memory` for rows whose pasts have different lengths, padded.

    Args:
        tails: last inputs of every convolution, (R, channels, positions); `after` is the same after
            the chunk.
        frames: (R,) valid frames of each row; what follows them is padding.
        past: keys and values of every layer, k0, v0, k1, v1 ..., each (R, S, inner); `new` are
            those of the chunk.
        present: (R, 1, N) 1 for frames that there are, 0 for others before them; None if there are
            all.
    """

    def __init__(
        self,
        tails: Sequence[torch.Tensor],
        frames: torch.Tensor,
        past: Sequence[torch.Tensor],
        present: torch.Tensor | None = None,
    ) -> None:
        self._tails, self._frames, self._past, self._present = tails, frames, past, present
        self.after = list(tails)
        self.new: list[torch.Tensor] = []

    def convolve(self, index: int, conv: Convolution, x: torch.Tensor) -> torch.Tensor:
        tail = self._tails[index]
        if self._present is not None:
            x = x * self._present
        x = torch.cat((tail, x), dim=2)
        # There are as many inputs in front as are kept, so the last ones of n valid frames start at
        # n. (R, 1, positions)
        last = self._frames[:, None, None] + torch.arange(tail.shape[2], device=x.device)
        self.after[index] = x.gather(2, last.expand(-1, x.shape[1], -1))
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
    """One ODE step with its past as inputs and outputs. Rows are streams and guidance branches; all
    are at one time.

    R rows of N frames each, with S frames of past. Inputs, float32 but for `frames` and `past_*`:

    - `x`, `mu`, `cond` (R, bands, N), and `spks` (R, bands)
    - `modulation`, and `modulation_out` if there is one: of the step's time, for one row
    - `cos`, `sin` (R, N, dim_head) of the frames' positions, if the estimator has positions
    - `bias` (R, 1, N, S + N) to add to attention scores: 0, or -30000 where a frame must not look
    - `frames` (R,) int64, how many of the N frames are valid
    - `present` (R, 1, N) 0 for frames before the start of their prompt, else 1; only with
    `joined_prompts`
    - `conv_state` (R, width) inputs of all convolutions before the first frame, see
    `Estimator.tails`
    - `past_key_0`, `past_value_0`, `past_key_1` ... (R, S, inner), in the type of the attention's
    weights

    Outputs: `velocity` (R, bands, N), `new_conv_state` after the valid frames, and the chunk's
    `new_key_0` ... (R, N, inner). The estimator's weights are used but for those behind
    `modulation`.
    """

    def __init__(self, estimator: Estimator) -> None:
        super().__init__()
        self.estimator = estimator
        self.cache_names = cache_names(estimator.attention[0])

    def forward(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        past = [inputs[f"past_{name}"] for name in self.cache_names]
        tails = self.estimator.tails(inputs["conv_state"])
        context = DenseContext(tails, inputs["frames"], past, inputs.get(PRESENT))
        modulation, rope = (
            tuple(inputs[name] for name in names if name in inputs) for names in (MODULATION, ROPE)
        )
        x, mu, spks, cond, bias = (inputs[name] for name in ("x", "mu", "spks", "cond", "bias"))
        conditions = self.estimator.prepare_conditions(mu, spks, cond)
        velocity = self.estimator.velocity(x, conditions, modulation, bias, context, rope=rope)
        after = torch.cat([tail.flatten(1) for tail in context.after], dim=1)
        new = {
            f"new_{name}": value for name, value in zip(self.cache_names, context.new, strict=True)
        }
        return {"velocity": velocity, "new_conv_state": after, **new}


def cache_names(layers: int) -> list[str]:
    """Names in a graph of the keys and values of all layers, behind `past_` or `new_`."""
    return [f"{which}_{layer}" for layer in range(layers) for which in ("key", "value")]

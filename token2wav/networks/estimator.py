"""Estimator of the flow velocity: the interface that all families implement, and one ODE step as a
pure function for export.

An exported graph can neither read pages nor change its inputs. The exported step therefore takes
the past as dense tensors, and returns the new keys, values and states. Values that are the same in
every step (rotary angles, attention bias) or that depend on the ODE time alone (modulation) are
inputs.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

Convolution = Callable[[torch.Tensor], torch.Tensor]
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
# All values that the layers use and that depend on the ODE time alone, such as the scales and
# shifts of norms. Each is (layers, B, ...) or (B, ...).
Modulation = tuple[torch.Tensor, ...]
# cos and sin of rotary angles, (T, dim_head) or (B, T, dim_head); empty without rotary positions.
Rope = tuple[torch.Tensor, ...]

# Names of inputs of an exported graph that only some estimators have.
MODULATION, ROPE, PRESENT = ("modulation", "modulation_out"), ("cos", "sin"), "present"


class AttentionContext(Protocol):
    """Keys, values and convolution states of the frames before the input of the estimator."""

    def convolve(self, index: int, conv: Convolution, x: torch.Tensor) -> torch.Tensor:
        """Runs a convolution over its state and x (B, channels, T), and stores its new state."""

    def attend(
        self,
        layer: int,
        attend: Attend,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """Computes attention of q (B, T, inner) over all visible keys, and stores the new keys k
        and values v (B, T, inner).
        """


class Estimator(nn.Module, ABC):
    """Estimator of the flow velocity. Base of the estimators of all families.

    With an `AttentionContext` it continues streams whose past is cached. Without one it computes
    whole sequences.

    Attributes:
        attention: attention layers, heads, and channels of a head.
        conv_state_shapes: channels and positions of the state of each convolution.
        masks_padding: whether streams may begin with padding (`BlockGrid.prompt_padding`).
            Convolutions then read zeros there.
        half_convolution_inputs: whether convolutions on kernels have float16 inputs.
    """

    attention: tuple[int, int, int]
    conv_state_shapes: list[tuple[int, int]]
    masks_padding = False
    half_convolution_inputs = False

    @abstractmethod
    def modulation(self, t: torch.Tensor, end: torch.Tensor | None = None) -> Modulation:
        """Computes all values that depend on the ODE time alone, so that they can be read from a
        table.

        Args:
            t: (B,) ODE times.
            end: (B,) times at which the steps end; only some estimators use them.
        """

    def rope(self, positions: torch.Tensor) -> Rope:
        """Computes the rotary angles of frames at positions (T,) or (B, T), which count from the
        start of the prompt.
        """
        return ()

    @abstractmethod
    def project_conditions(
        self, mu: torch.Tensor, spks: torch.Tensor, cond: torch.Tensor
    ) -> torch.Tensor:
        """Prepares the conditions of frames, once for all ODE steps.

        Args:
            mu: (B, bands, T) encoded tokens.
            spks: (B, bands) speaker vectors.
            cond: (B, bands, T) prompt mel; zeros after the prompt.

        Returns:
            (B, T, width). The width depends on the estimator.
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
            modulation: result of `modulation` for the ODE times of the rows, or for one time for
                all rows.
            bias: attention score bias, broadcastable to (B, heads, T, keys); None for full
                attention.

        Returns:
            (B, bands, T) velocity, float32.
        """

    @abstractmethod
    def halve(self) -> None:
        """Converts to float16 all weights for which this is accurate enough (docs/parity.md)."""

    @abstractmethod
    def drop_time_weights(self) -> None:
        """Frees the weights of `modulation`, once its results are in tables."""

    @property
    def state_width(self) -> int:
        """Numbers in all convolution states, per ODE step and guidance branch."""
        return sum(map(math.prod, self.conv_state_shapes))

    def tails(self, state: torch.Tensor) -> list[torch.Tensor]:
        """Returns the state of each convolution as a view (..., channels, positions) of a state
        (..., state_width).

        The channels of a position are neighbours in memory, as in the inputs of the convolutions,
        so that a kernel reads both in the same way.
        """
        starts = pairwise(accumulate(map(math.prod, self.conv_state_shapes), initial=0))
        return [
            state[..., start:stop].unflatten(-1, (positions, channels)).transpose(-1, -2)
            for (start, stop), (channels, positions) in zip(
                starts, self.conv_state_shapes, strict=True
            )
        ]

    @property
    def cache_type(self) -> torch.dtype:
        """dtype of the keys and values that the estimator computes."""
        return next(
            weight.dtype for name, weight in self.named_parameters() if name.endswith("to_k.weight")
        )


def attended(
    heads: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Computes attention of q (B, T, inner) over k and v (B, keys, inner) to (B, T, inner)."""
    q, k, v = (y.unflatten(-1, (heads, -1)).transpose(1, 2) for y in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(-2)


class DenseContext:
    """`AttentionContext` in dense tensors. The pasts of the rows are padded to one length. `frames`
    and `present` are inputs of `CachedStep`.

    Args:
        tails: (R, channels, positions) state of every convolution before the chunk.
        past: (R, S, inner) keys and values of every layer: k0, v0, k1, v1 ...

    Attributes:
        after: state of every convolution after the chunk.
        new: keys and values of the chunk, in the order of `past`.
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
        # The state holds as many inputs as the convolution reaches back. In the state followed by
        # x, the new state of a row with n valid frames therefore starts at position n.
        # `last` is (R, 1, positions).
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
    """One ODE step as a pure function, which is exported as the graph `step`.

    A row is one guidance branch of the chunk of one stream. There are R rows of N frames, with S
    frames of past, all at the same ODE time. All inputs are float32 except `frames` and `past_*`:

    - `x`, `mu`, `cond` (R, bands, N), and `spks` (R, bands)
    - `modulation`, and `modulation_out` if the estimator has it: modulation of the ODE time, for
      one row
    - `cos`, `sin` (R, N, dim_head) for the positions of the frames, if the estimator has positions
    - `bias` (R, 1, N, S + N) attention score bias: 0, or -30000 where attention is not allowed
    - `frames` (R,) int64, number of valid frames
    - `present` (R, 1, N) 0 for prompt padding, else 1; only with `masks_padding`
    - `conv_state` (R, width) convolution states before the chunk, see `Estimator.tails`
    - `past_key_0`, `past_value_0`, `past_key_1` ... (R, S, inner), in the dtype of the attention
      weights

    Outputs are `velocity` (R, bands, N), `new_conv_state` after the valid frames, and the keys and
    values of the chunk, `new_key_0` ... (R, N, inner). The step uses all weights of the estimator
    except the weights of `modulation`.
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
        conditions = self.estimator.project_conditions(mu, spks, cond)
        velocity = self.estimator.velocity(x, conditions, modulation, bias, context, rope=rope)
        after = torch.cat([tail.transpose(1, 2).flatten(1) for tail in context.after], dim=1)
        new = {
            f"new_{name}": value for name, value in zip(self.cache_names, context.new, strict=True)
        }
        return {"velocity": velocity, "new_conv_state": after, **new}


def cache_names(layers: int) -> list[str]:
    """Lists a graph's key and value names, without `past_` or `new_`."""
    return [f"{kind}_{layer}" for layer in range(layers) for kind in ("key", "value")]

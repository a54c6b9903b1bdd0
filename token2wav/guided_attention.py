"""Block-wise guided attention (StreamFlow): it gives every layer a mask, from which the reach of a block follows.

Paper: "StreamFlow: Streaming Flow Matching with Block-wise Guided Attention Mask for Speech Token Decoding".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from token2wav.errors import ConfigError

Mask = Literal["block", "backward", "forward"]

SEES: dict[Mask, tuple[int, int]] = {"block": (0, 0), "backward": (1, 0), "forward": (0, 1)}
"""Blocks before and after its own that a frame sees in a layer with each mask."""


@dataclass(frozen=True)
class GuidedAttention:
    """Masks of an estimator.

    Attributes:
        layers: mask of each layer, first to last.
    """

    layers: tuple[Mask, ...]

    @classmethod
    def assigned(cls, depth: int, backward: tuple[int, ...], forward: tuple[int, ...]) -> GuidedAttention:
        """Gives all layers the block mask but for some, counted from 1.

        Raises:
            ConfigError: a layer that is not there, or is named twice.
        """
        masks: list[Mask] = ["block"] * depth
        for name, numbers in (("backward", backward), ("forward", forward)):
            for number in numbers:
                if not 1 <= number <= depth:
                    raise ConfigError(f"{name}_layers: {number} is not one of the layers 1 to {depth}")
                if masks[number - 1] != "block":
                    raise ConfigError(f"{name}_layers: layer {number} has a mask already: {masks[number - 1]}")
                masks[number - 1] = "backward" if name == "backward" else "forward"
        return cls(tuple(masks))

    @property
    def past_blocks(self) -> int:
        """Number of blocks before its own that the estimator's output in a block depends on."""
        return sum(SEES[mask][0] for mask in self.layers)

    @property
    def future_blocks(self) -> int:
        """Number of blocks after its own that the estimator's output in a block depends on: the look-ahead."""
        return sum(SEES[mask][1] for mask in self.layers)

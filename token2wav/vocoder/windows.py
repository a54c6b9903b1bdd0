"""Windows of several streams through one network."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from token2wav.groups import in_groups


def run_together(
    network: Callable[..., torch.Tensor], windows: Sequence[tuple[torch.Tensor, ...]]
) -> list[torch.Tensor]:
    """Runs a network on every window; those of one shape, which streams at the same hop have, go through it together.

    Args:
        network: takes tensors (B, ...) and returns one.
        windows: arguments of the network for one stream each, (1, ...).

    Returns:
        The rows (...) of the network's output, one for each window.
    """
    return in_groups(
        windows,
        lambda window: tuple(tensor.shape for tensor in window),
        lambda alike: list(network(*map(torch.cat, zip(*alike, strict=True)))),
    )

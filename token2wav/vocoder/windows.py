"""Windows of several streams through one network."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


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
    groups: dict[tuple[torch.Size, ...], list[int]] = {}
    for index, window in enumerate(windows):
        groups.setdefault(tuple(tensor.shape for tensor in window), []).append(index)
    rows: dict[int, torch.Tensor] = {}
    for members in groups.values():
        batch = (torch.cat(tensors) for tensors in zip(*(windows[index] for index in members), strict=True))
        rows.update(zip(members, network(*batch), strict=True))
    return [rows[index] for index in range(len(windows))]

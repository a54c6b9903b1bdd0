"""Signals that run through a streaming network in pieces, with states in a store."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from token2wav.cache.states import StateStore
from token2wav.layers.streaming import StreamStep, state_specs

Compute = Callable[[torch.Tensor, StreamStep], torch.Tensor]


@torch.inference_mode()
def in_pieces(
    network: nn.Module,
    x: torch.Tensor,
    lengths: Sequence[int],
    *,
    delay: int,
    ratio: float,
    compute: Compute | None = None,
) -> torch.Tensor:
    """Computes a whole (B, C, T) in pieces: one network for all rows, with states in a store.

    Args:
        delay: outputs by which the network is late.
        ratio: outputs for each input.
        compute: method of the network; None for `forward`.

    Returns:
        Outputs from the first one that belongs to the signal. Outputs after its end may follow.
    """
    store = StateStore({"network": state_specs(network)}, x.device, slots=len(x) + 1)
    slots = torch.tensor([store.take() for _ in x])
    rows, outputs, parts = store.rows("network", len(x)), [], list(x.split(list(lengths), dim=2))
    for index, part in enumerate(parts):
        frames_past_end = -int(-delay // ratio) if index == len(parts) - 1 else 0
        # the values of these frames do not matter
        part = torch.cat((part, torch.randn(*part.shape[:2], frames_past_end)), dim=2)
        if index:
            store.read(slots, rows)
        step = StreamStep(
            rows.views,
            first=index == 0,
            frames=part.shape[2],
            frames_past_end=frames_past_end,
        )
        outputs.append((compute or network)(part, step))
        store.write(slots, rows)
    return torch.cat(outputs, dim=2)[:, :, delay:]

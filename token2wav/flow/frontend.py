"""Tokens to the conditioning `mu`: embedding, 3-token look-ahead, two frames per token."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class PreLookahead(nn.Module):
    """Lets every token see the next `lookahead` ones: the only part of the flow that looks ahead of an attention block.

    Two convolutions: the first reaches to the right, the second to the left.

    Args:
        channels: width of the embedding.
        hidden: width between the two convolutions.
        lookahead: tokens of right context.
        lookbehind: tokens of left context.
    """

    def __init__(self, channels: int, hidden: int, lookahead: int, lookbehind: int) -> None:
        super().__init__()
        self.lookahead = lookahead
        self.lookbehind = lookbehind
        self.conv1 = nn.Conv1d(channels, hidden, lookahead + 1)
        self.conv2 = nn.Conv1d(hidden, channels, lookbehind + 1)

    def forward(self, x: torch.Tensor, *, left: int, last: bool) -> torch.Tensor:
        """Convolves a window of the utterance; the result is that of the whole utterance.

        Args:
            x: (B, left + n + right, C) embeddings. `right` is `lookahead`, or 0 where the utterance ends.
            left: leading embeddings that are context only: `lookbehind`, or fewer where fewer tokens come before.
            last: whether the window ends with the utterance; zeros then stand for what follows.

        Returns:
            (B, n, C) of the embeddings between the contexts.
        """
        h = x.transpose(1, 2)  # (B, C, T)
        if last:
            h = F.pad(h, (0, self.lookahead))
        count = h.shape[2] - self.lookahead - left
        h = F.leaky_relu(self.conv1(h))  # slope 0.01, as published
        h = F.pad(h, (self.lookbehind - left, 0))  # zeros before the utterance: of conv1's output, not its input
        h = self.conv2(h)
        return h.transpose(1, 2) + x[:, left : left + count]

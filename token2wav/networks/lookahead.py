"""Look-ahead of the flow, by which a token sees the next three."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class PreLookahead(nn.Module):
    """Lets every token see the next `lookahead` ones: the only part of the flow that looks ahead of
    an attention block.

    Two convolutions: the first reaches to the right, the second to the left.

    Args:
        channels, hidden: width of the embedding, and between the two convolutions.
        lookahead, lookbehind: tokens of right and of left context.
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
            x: (B, left + n + right, C) embeddings. `right` is `lookahead`, or 0 where the utterance
                ends.
            left: leading embeddings that are context only: `lookbehind`, or fewer where fewer
                tokens come before.
            last: whether the window ends with the utterance; zeros then stand for what follows.

        Returns:
            (B, n, C) of the embeddings between the contexts.
        """
        h = x.transpose(1, 2)  # (B, C, T)
        if last:
            h = F.pad(h, (0, self.lookahead))
        count = h.shape[2] - self.lookahead - left
        h = F.leaky_relu(convolved(self.conv1, h))  # slope 0.01, as published
        # zeros before the utterance: of conv1's output, not its input
        h = F.pad(h, (self.lookbehind - left, 0))
        h = convolved(self.conv2, h)
        return h.transpose(1, 2) + x[:, left : left + count]


def convolved(conv: nn.Conv1d, x: torch.Tensor) -> torch.Tensor:
    """Convolution (B, C, T) to (B, C', T - taps + 1), computed as a matrix product on a GPU.

    Chunks come in many lengths and batches in many sizes, and for every shape that is new cuDNN
    takes milliseconds to choose how to convolve; a product of matrices takes none.
    """
    return as_product(conv, x) if x.is_cuda else conv(x)


def as_product(conv: nn.Conv1d, x: torch.Tensor) -> torch.Tensor:
    """Convolution without groups, strides or dilation as one matrix product over the windows of its
    input.
    """
    # (B, T - taps + 1, C * taps)
    windows = x.unfold(2, conv.kernel_size[0], 1).transpose(1, 2).flatten(2)
    return F.linear(windows, conv.weight.flatten(1), conv.bias).transpose(1, 2)

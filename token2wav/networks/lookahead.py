"""Look-ahead layer of the flow, through which a token depends on the next three tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class PreLookahead(nn.Module):
    """Look-ahead layer, the only part of a flow that looks past the end of an attention block.

    It has two convolutions: the first reaches to the right, the second to the left.

    Args:
        channels: width of the embedding.
        hidden: width between the two convolutions.
        lookahead: number of tokens of right context.
        lookbehind: number of tokens of left context.
    """

    def __init__(self, channels: int, hidden: int, lookahead: int, lookbehind: int) -> None:
        super().__init__()
        self.lookahead = lookahead
        self.lookbehind = lookbehind
        self.conv1 = nn.Conv1d(channels, hidden, lookahead + 1)
        self.conv2 = nn.Conv1d(hidden, channels, lookbehind + 1)

    def forward(self, x: torch.Tensor, *, left: int, last: bool) -> torch.Tensor:
        """Convolves a window of the utterance, with the same result as for the whole utterance.

        Args:
            x: (B, left + n + right, C) embeddings. `right` is `lookahead`, or 0 at the end of the
                utterance.
            left: number of leading embeddings that are context only: `lookbehind`, or fewer if
                fewer tokens come before.
            last: whether the window ends with the utterance; zeros then replace the look-ahead.

        Returns:
            (B, n, C) results for the embeddings between the contexts.
        """
        h = x.transpose(1, 2)  # (B, C, T)
        if last:
            h = F.pad(h, (0, self.lookahead))
        count = h.shape[2] - self.lookahead - left
        h = F.leaky_relu(convolved(self.conv1, h))  # slope 0.01, as in the public code
        # Before the utterance the output of conv1 is zero, not its input.
        h = F.pad(h, (self.lookbehind - left, 0))
        h = convolved(self.conv2, h)
        return h.transpose(1, 2) + x[:, left : left + count]


def convolved(conv: nn.Conv1d, x: torch.Tensor) -> torch.Tensor:
    """Convolves (B, C, T) to (B, C', T - taps + 1), as a matrix product on a GPU.

    Chunks have many lengths and batches many sizes. For every new shape cuDNN takes milliseconds to
    choose an algorithm; a matrix product takes none.
    """
    return as_product(conv, x) if x.is_cuda else conv(x)


def as_product(conv: nn.Conv1d, x: torch.Tensor) -> torch.Tensor:
    """Computes a convolution without groups, stride or dilation as one matrix product over the
    windows of its input.
    """
    # (B, T - taps + 1, C * taps)
    windows = x.unfold(2, conv.kernel_size[0], 1).transpose(1, 2).flatten(2)
    return F.linear(windows, conv.weight.flatten(1), conv.bias).transpose(1, 2)

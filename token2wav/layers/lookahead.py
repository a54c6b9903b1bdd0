"""Look-ahead layer of the flow. Its output for a token also depends on the next tokens (three in
CosyVoice3).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from token2wav.layers.convolutions import causal_conv
from token2wav.layers.streaming import OFFLINE, StreamStep


def embed_tokens(
    embed: Callable[[torch.Tensor], torch.Tensor], tokens: torch.Tensor, codebooks: int = 0
) -> torch.Tensor:
    """Embeds tokens to (..., C) for the look-ahead layer.

    Args:
        tokens: (...) integers, or (..., codebooks). The embedding of `NO_TOKEN` is zero, as after
            the end of an utterance.
        codebooks: codes of a token; 0 if a token is one integer.
    """
    absent = (tokens.select(-1, 0) if codebooks else tokens) < 0
    return embed(tokens.clamp(min=0)).masked_fill_(absent[..., None], 0.0)


class PreLookahead(nn.Module):
    """Look-ahead layer. No other layer of a flow depends on tokens after its attention block.

    Its first convolution reads `lookahead` later tokens, and its second reads `lookbehind` earlier
    ones. The second has a state, so that a stream continues where its last chunk ended.
    """

    def __init__(self, channels: int, hidden: int, lookahead: int, lookbehind: int) -> None:
        super().__init__()
        self.lookahead = lookahead
        self.conv1 = nn.Conv1d(channels, hidden, lookahead + 1)
        self.conv2 = causal_conv(hidden, channels, lookbehind + 1)
        self.conv2.place()  # on time, because the layer gets the later tokens with a chunk

    def forward(
        self, x: torch.Tensor, step: StreamStep = OFFLINE, *, last: bool = True
    ) -> torch.Tensor:
        """Convolves the next tokens of streams to (B, n, C), with the same result as for whole
        utterances.

        Args:
            x: (B, n + right, C) embeddings. `right` is `lookahead`, or 0 if `last`.
            last: whether the utterances end with x. Zeros then replace the look-ahead.
        """
        h = F.pad(x.transpose(1, 2), (0, self.lookahead if last else 0))  # (B, C, T)
        h = F.leaky_relu(convolved(self.conv1, h))  # slope 0.01, as in the public code
        # At the start of an utterance the padding is put between the convolutions: the output of
        # conv1 is zero there, not its input.
        y = convolved(self.conv2, step.with_context(self.conv2, h, self.conv2.left))
        return y.transpose(1, 2) + x[:, : y.shape[2]]


def convolved(conv: nn.Conv1d, x: torch.Tensor) -> torch.Tensor:
    """Convolves (B, C, T) to (B, C', T - taps + 1), as a matrix product on a GPU.

    Chunks have many lengths, and batches many sizes. cuDNN takes milliseconds to choose an
    algorithm for every new shape.
    """
    if x.device.type == "cpu":
        return F.conv1d(x, conv.weight, conv.bias)
    return as_product(conv, x)


def as_product(conv: nn.Conv1d, x: torch.Tensor) -> torch.Tensor:
    """Computes a convolution without groups, stride or dilation as one matrix product over the
    windows of its input.
    """
    # (B, T - taps + 1, C * taps)
    windows = x.unfold(2, conv.kernel_size[0], 1).transpose(1, 2).flatten(2)
    return F.linear(windows, conv.weight.flatten(1), conv.bias).transpose(1, 2)

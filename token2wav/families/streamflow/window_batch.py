"""Batches of windows in tensors of one size, which CUDA graphs can use.

A window that is shorter than its tensors is padded at its end. No frame attends to the padding, and
the convolutions reach back only. So the mel of a window does not depend on its padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from token2wav.execution.buckets import PaddedSize
from token2wav.execution.staging import IntegerTensors
from token2wav.families.cosyvoice3.flow import Flow
from token2wav.families.streamflow.solver import GuidedSolver
from token2wav.networks.noise import FlowNoise


@dataclass(frozen=True, eq=False)
class Window:
    """Chunk of a stream with the tokens around it.

    Attributes:
        tokens: (n, *token_shape) int32 tokens of the past, of the chunk and of its look-ahead.
    """

    steps: int  # ODE steps
    speaker: torch.Tensor  # (speaker channels,) speaker vector
    tokens: NDArray[np.int32]
    start: int  # position of the first token in the stream
    left: int  # tokens before the chunk
    count: int  # tokens of the chunk

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Key of a batch without padding: windows with equal values run together."""
        return self.steps, len(self.tokens), self.left, self.count


def size_of(windows: Sequence[Window]) -> PaddedSize:
    """Returns the smallest size, in tokens, that holds windows."""
    return PaddedSize(max(len(window.tokens) for window in windows), len(windows))


class WindowBatch:
    """Tensors for windows of one size: B windows, N tokens and T frames.

    Args:
        encoder: encoder of the flow, without state.
        noise: noise of the flow, on the device of the encoder.
    """

    def __init__(
        self, size: PaddedSize, encoder: Flow, noise: FlowNoise, solver: GuidedSolver
    ) -> None:
        self._encoder, self._source, self._solver = encoder, noise, solver
        device, bands = encoder.device, encoder.mel_bands
        self._frames = encoder.token_mel_ratio * size.length
        shapes = (size.rows, size.length, *encoder.token_shape), (2, size.rows)
        self._integers = IntegerTensors(shapes, device)
        self._tokens, (self._starts, self._lengths) = self._integers.tensors
        self._noise = torch.zeros(size.rows, bands, self._frames, device=device)
        self._speakers = torch.zeros(size.rows, encoder.config.estimator.spk_dim, device=device)
        self._mel = torch.zeros_like(self._noise)

    def fill(self, windows: Sequence[Window]) -> None:
        """Copies tokens, noise and speakers of windows, at most B of them, into the tensors."""
        count, ratio = len(windows), self._encoder.token_mel_ratio
        tokens = np.zeros(tuple(self._tokens.shape), np.int32)
        numbers = np.zeros((2, len(tokens)), np.int32)
        for row, window in enumerate(windows):
            tokens[row, : len(window.tokens)] = window.tokens
            numbers[:, row] = ratio * window.start, ratio * len(window.tokens)
        self._integers.fill(tokens, numbers)
        pieces = [
            piece
            for start in numbers[0, :count].tolist()
            for piece in self._source.pieces(start, start + self._frames)
        ]
        noise = torch.cat(pieces, dim=1).unflatten(1, (count, self._frames))
        self._noise[:count] = noise.transpose(0, 1)
        torch.stack([window.speaker for window in windows], out=self._speakers[:count])

    def compute(self) -> None:
        """Computes the mels of all frames of the windows."""
        mel = self._solver.solve(
            self._noise,
            self._encoder.mu(self._tokens),
            self._speakers,
            self._starts,
            0,
            self._frames,
            lengths=self._lengths,
        )
        # A tensor of its own, because the result is in the memory that all graphs share.
        self._mel.copy_(mel)

    def take(self, windows: Sequence[Window]) -> list[torch.Tensor]:
        """Returns the mel (bands, frames) of the chunk of every window."""
        ratio = self._encoder.token_mel_ratio
        spans = [(ratio * window.left, ratio * (window.left + window.count)) for window in windows]
        mels = self._mel[: len(windows)].clone()
        return [mel[:, first:last] for mel, (first, last) in zip(mels, spans, strict=True)]

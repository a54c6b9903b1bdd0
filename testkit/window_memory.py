"""Memory that streams of a codec with windows keep between their chunks."""

from __future__ import annotations

from typing import Any

import torch

from testkit.models.codec_models import drawn_tokens
from token2wav import Token2Wav
from token2wav.stages.stage import FrameChunk


def kept_bytes(model: Token2Wav, count: int) -> int:
    """Returns the most bytes that a stream of a batch of eight keeps after its first chunk, with
    all of the memory behind its tensors.

    Args:
        count: tokens of the chunk, which ends the stream if it has no whole windows.
    """
    [decoder] = model.pipeline.stages.values()
    stage: Any = decoder
    windows = model.config.windows  # type: ignore[attr-defined]
    last = count % windows.block > 0
    tokens = drawn_tokens(model.config, count if last else count + windows.right)
    frames = torch.from_numpy(tokens.T.copy())
    chunk = FrameChunk(frames[:, :count], last, None if last else frames[:, count:])
    handles = [stage.open() for _ in range(8)]
    stage.advance([(handle, chunk) for handle in handles])
    states = [stage.state(handle) for handle in handles]
    for handle in handles:
        stage.close(handle)
    return max(
        sum(tensor.untyped_storage().nbytes() for tensor in (state.past, state.tail))
        for state in states
    )

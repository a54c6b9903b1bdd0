"""Expected audio of utterances, computed alone on a model without faults."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from token2wav import Token2Wav, Voice
from token2wav.stages.stage import FrameChunk, TokenChunk

Audio = NDArray[np.float32]
Tokens = NDArray[np.int32]


class Oracle:
    """Oracle that computes one utterance at a time, for any thread."""

    def __init__(self, model: Token2Wav) -> None:
        self._model = model
        self._lock = threading.Lock()

    def whole(self, voice: Voice, tokens: Tokens) -> Audio:
        with self._lock:
            return self._model.vocode(self._model.mel(tokens, voice))

    def spoken(self, voice: Voice, chunks: Sequence[TokenChunk]) -> Audio:
        """Computes the chunks of an utterance again."""
        pipeline, ratio = self._model.pipeline, self._model.config.token_mel_ratio
        with self._lock, pipeline.running():
            flow, vocoder, audio = pipeline.flow.open(voice), pipeline.vocoder.open(), list[Audio]()
            for chunk in chunks:
                [mel] = pipeline.flow.advance([(flow, chunk)])
                [samples] = pipeline.vocoder.advance(
                    [(vocoder, FrameChunk(mel[:, ratio * chunk.skip :], chunk.last))]
                )
                audio.append(samples.numpy())
            pipeline.flow.close(flow)
            pipeline.vocoder.close(vocoder)
        return np.concatenate(audio)

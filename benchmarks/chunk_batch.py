"""Batch of streams that go through their utterances in step, chunk after chunk, while a clock runs."""

from __future__ import annotations

import time
from types import TracebackType

import numpy as np
import torch

from token2wav import Token2Wav, Voice
from token2wav.execution.stages import FlowChunk, MelChunk


def synchronize(device: torch.device) -> None:
    """Waits for everything that was launched."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class ChunkBatch:
    """Batch of streams of random tokens in one voice; use it as a context manager, which closes them.

    Args:
        model: loaded model.
        streams: number of streams.
        voice: voice of all streams; from the first batch on it is cached.

    Attributes:
        spoken_tokens: tokens of every stream that are spoken so far.
        new_tokens: length of the latest chunk in the flow: a first one has the rest of the prompt in it.
    """

    def __init__(self, model: Token2Wav, streams: int, voice: Voice) -> None:
        self.spoken_tokens = self.new_tokens = 0
        self._flow, self._vocoder, self._config = model.pipeline.flow, model.pipeline.vocoder, model.config
        self._random = np.random.default_rng(0)
        self._prompt = len(voice.prompt_tokens)
        self._position = self._config.prefix_tokens(self._prompt)
        self._handles: list[tuple[int, int]] = []
        try:
            for _ in range(streams):
                self._handles.append((self._flow.open(voice), self._vocoder.open()))
        except BaseException:
            self.close()
            raise

    def advance(self, hop_tokens: int) -> tuple[float, float]:
        """Computes a chunk of every stream; returns the seconds of flow and of vocoder, the device's work included."""
        config, given = self._config, self._prompt - self._position if not self.spoken_tokens else 0
        start, stop = self._position, self._position + given + hop_tokens
        left = min(config.lookbehind_tokens, start)
        count = left + stop - start + config.lookahead_tokens
        tokens = self._random.integers(0, config.vocab_size, count).astype(np.int32)
        chunk = FlowChunk(tokens, left, start, stop, last=False)
        began = time.perf_counter()
        mels = self._flow.advance([(handle, chunk) for handle, _ in self._handles])
        synchronize(mels[0].device)
        between = time.perf_counter()
        new = [mel[:, given * config.token_mel_ratio :] for mel in mels]
        audio = self._vocoder.advance(
            [(handle, MelChunk(mel, False)) for (_, handle), mel in zip(self._handles, new, strict=True)]
        )
        synchronize(audio[0].device)
        ended = time.perf_counter()
        self._position, self.new_tokens = stop, stop - start
        self.spoken_tokens += hop_tokens
        return between - began, ended - between

    def close(self) -> None:
        for flow_handle, vocoder_handle in self._handles:
            self._flow.close(flow_handle)
            self._vocoder.close(vocoder_handle)
        self._handles.clear()

    def __enter__(self) -> ChunkBatch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

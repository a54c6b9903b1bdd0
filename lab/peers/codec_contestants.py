"""Contestants of `codec_peers`: the public decoders of codecs, and the streams of this library.

Each call receives one new frame of codes of every stream, or a block of frames, and returns their
audio. Decoders with symmetric convolutions (DAC, Higgs Audio, SNAC) hold back the audio that later
frames change.

Public decoders without a state recompute: `qwen-tts` and `vllm-omni` (Audio8) decode the last 25
frames again, as their streams do; `snac` and `codec.cpp` decode as few earlier frames as give the
same audio, but of Qwen3-TTS 25, and of Mimi all; `transformers` and NeMo decode the whole prefix
again. `moshi`, `moss-tts-lite`, `voxcpm`, VibeVoice
of `transformers` and EAR-TTS of NeMo keep a state. All contestants compute their streams as one
batch, except that `moss-tts-lite` computes them in turns.
"""

from __future__ import annotations

import contextlib
import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from token2wav import RuntimeConfig, StreamConfig, Token2Wav
from token2wav.voice import voice_for

_MOSS_FRAME = 1920  # samples of a frame

Audio = NDArray[np.float32]


class Contestant(ABC):
    """Decoder with some streams, which all have the same codes."""

    every_frame = True  # whether frames before a measured one have to be computed

    @abstractmethod
    def start(self, streams: int) -> None:
        """Opens new streams, and closes older ones."""

    @abstractmethod
    def frame(self, index: int) -> Audio:
        """Decodes frame `index` of every stream, or a block of frames, and returns the new audio of
        the first stream.
        """


class Recomputing(Contestant):
    """Public decoder that keeps no state.

    Args:
        decode: function from codes (streams, codebooks, frames) to audio (streams, samples).
        codes: (frames, codebooks).
        context: earlier frames that each call decodes again; None for all frames.
        block: frames of a call.
        held: samples that later frames still change, which are not returned yet.
    """

    every_frame = False

    def __init__(
        self,
        decode: Callable[[torch.Tensor], torch.Tensor],
        codes: torch.Tensor,
        frame_samples: int,
        context: int | None = None,
        block: int = 1,
        held: int = 0,
    ) -> None:
        self._decode, self._codes, self._context = decode, codes, context
        self._frame_samples, self._streams = frame_samples, 1
        self._block, self._held = block, held

    def start(self, streams: int) -> None:
        self._streams = streams

    def whole(self) -> None:
        """Decodes all frames of one stream at once."""
        self._decode(self._codes.T[None])

    def frame(self, index: int) -> Audio:
        begin, end = index * self._block, (index + 1) * self._block
        first = 0 if self._context is None else max(0, begin - self._context)
        codes = self._codes[first:end].T.expand(self._streams, -1, -1)
        start, stop = (
            max(0, (frames - first) * self._frame_samples - self._held) for frames in (begin, end)
        )
        return self._decode(codes)[0, start:stop].numpy()


class Moshi(Contestant):
    """Mimi of `moshi`, which keeps a state."""

    def __init__(self, model: Any, codes: torch.Tensor) -> None:
        self._model, self._codes, self._streams = model, codes, 1
        self._open = contextlib.ExitStack()

    def start(self, streams: int) -> None:
        self._open.close()
        self._open.enter_context(self._model.streaming(streams))
        self._streams = streams

    def frame(self, index: int) -> Audio:
        codes = self._codes[index, :, None].expand(self._streams, -1, -1)
        audio: Audio = self._model.decode(codes)[0, 0].numpy()
        return audio


class Stateful(Contestant):
    """Public decoder that keeps a state.

    Args:
        begin: opens streams, and returns a function from tokens (streams, frames, channels) to
            audio (streams, samples).
        tokens: (frames, codebooks), or (frames, size) latents.
        late: samples by which the audio is late.
    """

    def __init__(
        self,
        begin: Callable[[contextlib.ExitStack], Callable[[torch.Tensor], torch.Tensor]],
        tokens: torch.Tensor,
        late: int = 0,
    ) -> None:
        self._begin, self._tokens, self._late = begin, tokens, late
        self._open = contextlib.ExitStack()

    def start(self, streams: int) -> None:
        self._open.close()
        self._decode, self._streams = self._begin(self._open), streams

    def frame(self, index: int) -> Audio:
        tokens = self._tokens[index : index + 1].expand(self._streams, -1, -1)
        audio: Audio = self._decode(tokens)[0].numpy()
        return audio if index else audio[self._late :]


class MossLite(Contestant):
    """Streamers of `moss-tts-lite`, with a state. A streamer computes one stream.

    Args:
        decoder: decoder of the package. Its copies share the weights.
        codes: (frames, codebooks).
    """

    def __init__(self, decoder: Any, codes: torch.Tensor) -> None:
        self._decoder, self._codes, self._streamers = decoder, codes, list[Any]()

    def start(self, streams: int) -> None:
        from moss_tts_lite.codec import MossCodecStreamer  # type: ignore[import-not-found]

        self._streamers = []
        for _ in range(streams):
            decoder = copy.copy(self._decoder)
            decoder.stages = [copy.copy(stage) for stage in decoder.stages]
            self._streamers.append(MossCodecStreamer(decoder, chunk_duration=_MOSS_FRAME / 24000))

    def frame(self, index: int) -> Audio:
        codes = self._codes[index : index + 1]
        audio: list[Audio] = [streamer.push(codes) for streamer in self._streamers]
        return audio[0]


class Ours(Contestant):
    """Streams of the library.

    Args:
        codes: (frames, codebooks).
        block: frames of a call.
    """

    def __init__(self, folder: Path, codes: torch.Tensor, block: int) -> None:
        stream = StreamConfig(max_hop_tokens=block, lookahead_frames=0)
        self._block = block
        self._model = Token2Wav.load(folder, stream=stream, runtime=RuntimeConfig(device="cpu"))
        self._large_chunks = Token2Wav.load(folder, runtime=RuntimeConfig(device="cpu"))
        self._codes = codes.numpy().astype(self._model.config.tokens.dtype)
        self._utterances = list[Any]()

    def start(self, streams: int) -> None:
        pipeline, nobody = self._model.pipeline, voice_for(self._model.config, None)
        for utterance in self._utterances:
            pipeline.close(utterance)
        self._utterances = [pipeline.utterance(nobody) for _ in range(streams)]
        for utterance in self._utterances:
            pipeline.open(utterance)

    def whole(self) -> None:
        """Decodes all frames of one stream at once."""
        self._large_chunks.synthesize(self._codes)

    def frame(self, index: int) -> Audio:
        for utterance in self._utterances:
            start = index * self._block
            utterance.chunker.push(self._codes[start : start + self._block], end=False)
        # An utterance may wait for the end of an attention block.
        if self._utterances[0].chunker.next_chunk is None:
            return np.zeros(0, np.float32)
        chunks = self._model.pipeline.advance(self._utterances)
        for utterance in self._utterances:
            utterance.chunker.finish_chunk()
        chunk = chunks[0]
        if isinstance(chunk, Exception):
            raise chunk
        return np.zeros(0, np.float32) if chunk is None else chunk.audio

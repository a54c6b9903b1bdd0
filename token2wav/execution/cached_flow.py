"""Incremental flow stage, which computes only the new frames of every chunk.

The keys, values and convolution inputs of finished blocks stay in pages of one pool. The blocks
that lie wholly in a prompt are computed once for each voice, and streams share them. The result
equals that of `RecomputeFlow` up to float rounding. This module decides which pages are kept and
for which stream. A `Runner` and the `Encoder` of the family do the arithmetic.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from token2wav.cache.block_pool import (
    BlockPool,
    OutOfBlocksError,
    Prefix,
    PrefixCache,
    StreamBlocks,
)
from token2wav.cache.paged_kv_cache import PagedKVCache
from token2wav.errors import EngineError, StreamClosedError
from token2wav.execution.batch import ChunkInput
from token2wav.execution.recompute import RecomputeFlow, stream_mask
from token2wav.execution.runner import Runner
from token2wav.execution.stages import CacheUsage, FlowStage, StatefulStage, TokenChunk
from token2wav.networks.grouping import map_grouped
from token2wav.networks.masks import BlockMask
from token2wav.voice import Voice

_PREFILL_BLOCKS = 4  # blocks of a prompt computed at once; bounds memory and costs no time


@dataclass(eq=False)
class _Prompt:
    """Prefix that streams with the same voice and number of ODE steps share."""

    conv_state: torch.Tensor  # (steps, *layout.conv_state)
    encoder_state: Any
    prompt_mel: torch.Tensor  # (bands, 2 P)
    speaker: torch.Tensor  # (bands,)
    prompt_padding: int = 0  # number of padding frames before the prompt, see `ChunkInput`
    pages: list[int] = field(default_factory=list)


@dataclass(eq=False)
class _Stream:
    """State of one stream."""

    voice: Voice
    steps: int
    prefix: Prefix[_Prompt] | None  # None once the stream has released its pages
    prompt: _Prompt
    blocks: StreamBlocks
    conv_state: torch.Tensor
    encoder_state: Any
    next_frame: int
    # tokens of finished chunks, which are needed to start over without the cache
    tokens: list[NDArray[np.int32]] = field(default_factory=list)
    recomputing: int | None = None  # handle in the recompute stage; None while the cache is used
    busy: bool = False
    closed: bool = False


class CachedFlow(StatefulStage[_Stream], FlowStage):
    """Incremental flow on a CPU or a CUDA device.

    A stream takes the pages of its first chunks when it opens. If the pool is full then, the stream
    is rejected. If the pool is full later, the stream releases its own pages and its reference to
    the pages of the prompt, and recomputes its history from then on: slower, with the same result.
    With `left_blocks` >= 0 a stream needs a fixed number of pages, and takes all of them when it
    opens.

    Args:
        recompute: the same flow without cache. It serves streams that the pool has no room for, and
            whole utterances.
        runners: runners by number of ODE steps; the usual number comes first.
        cache: cache of keys and values that all runners use.
        longest_hop: tokens of the longest hop of a stream.
    """

    def __init__(
        self,
        recompute: RecomputeFlow,
        runners: Mapping[int, Runner],
        cache: PagedKVCache,
        *,
        longest_hop: int = 100,
    ) -> None:
        super().__init__()
        self._config, self._encoder, self._device = (
            recompute.config,
            recompute.encoder,
            recompute.device,
        )
        self._noise, self._left_blocks = recompute.noise, recompute.left_blocks
        self._recompute = recompute
        self._runners = dict(runners)
        self._usual = next(iter(runners))
        self._longest_hop = longest_hop
        self._layout = cache.layout
        self.pool = BlockPool(cache.pages)
        self.prefixes: PrefixCache[_Prompt] = PrefixCache(self.pool)
        self._lock = threading.Lock()  # guards `busy` and `closed` of the streams

    def usage(self) -> CacheUsage:
        prefixes = self.prefixes
        return CacheUsage(
            capacity=self.pool.capacity,
            used=self.pool.used,
            shared=prefixes.pages,
            idle=prefixes.idle_pages,
            page_bytes=self._layout.page_bytes,
            prompt_hits=prefixes.acquired - prefixes.computed,
            prompt_misses=prefixes.computed,
        )

    @torch.inference_mode()
    def open(self, voice: Voice, steps: int = 0) -> int:
        steps = steps or self._usual
        prefix = self.prefixes.acquire(
            (voice.content_hash, steps), lambda: self._prefill(voice, steps)
        )
        prompt = prefix.content
        assert prompt is not None
        with ExitStack() as taken:  # releases everything again if a later step fails
            taken.callback(self.prefixes.release, prefix)
            mask = stream_mask(self._config, voice, self._left_blocks)
            blocks = StreamBlocks(self.prefixes, prompt.pages, mask, self._reserved_blocks())
            taken.callback(blocks.release)
            next_frame = self._config.token_mel_ratio * self._config.prefix_tokens(
                len(voice.prompt_tokens)
            )
            states = prompt.conv_state.clone(), self._encoder.fork(prompt.encoder_state, mask)
            handle = self.register(
                _Stream(voice, steps, prefix, prompt, blocks, *states, next_frame)
            )
            taken.pop_all()
            return handle

    @torch.inference_mode()
    def advance(self, batch: Sequence[tuple[int, TokenChunk]]) -> list[torch.Tensor]:
        streams = self._enter([handle for handle, _ in batch])
        try:
            return self._advance(streams, [chunk for _, chunk in batch])
        finally:
            self._leave(streams)

    def close(self, handle: int) -> None:
        stream = self._streams.pop(handle, None)
        if stream is None:
            return
        with self._lock:
            stream.closed = True
            busy = stream.busy
        # A busy stream is released by `_leave`, because another thread still writes to its pages.
        if not busy:
            self._release(stream)

    def whole(
        self, tokens: NDArray[np.int32], voice: Voice, *, streaming: bool, steps: int = 0
    ) -> torch.Tensor:
        return self._recompute.whole(tokens, voice, streaming=streaming, steps=steps)

    def _reserved_blocks(self) -> int:
        """Returns the number of pages that a stream takes when it opens: for its first chunk, or
        for its whole life if the number of visible blocks is limited.
        """
        if self._left_blocks < 0:
            return 3
        # Besides its hop, a first chunk contains up to two blocks of the prompt, and a last chunk
        # contains the look-ahead tokens.
        return max(1, self._left_blocks) + self._longest_hop // self._config.block_tokens + 2

    def _enter(self, handles: list[int]) -> list[_Stream]:
        """Marks the streams of a batch as busy, so that `close` does not release their pages."""
        streams = [self.state(handle) for handle in handles]
        with self._lock:
            if any(stream.closed for stream in streams):
                raise StreamClosedError("stream: it was cancelled")
            for stream in streams:
                stream.busy = True
        return streams

    def _leave(self, streams: list[_Stream]) -> None:
        with self._lock:
            for stream in streams:
                stream.busy = False
            closed = [stream for stream in streams if stream.closed]
        for stream in closed:
            self._release(stream)

    def _advance(self, streams: list[_Stream], chunks: list[TokenChunk]) -> list[torch.Tensor]:
        running = zip(map(self._encoder_state, streams, chunks), chunks, strict=True)
        inputs = [
            self._next_input(*each)
            for each in zip(streams, chunks, self._encoder.encode([*running]), strict=True)
        ]
        ready = [
            (stream.steps, given)
            for stream, given in zip(streams, inputs, strict=True)
            if given is not None
        ]
        computed = iter(map_grouped(ready, lambda each: each[0], self._run))
        mels = []
        for stream, chunk, given in zip(streams, chunks, inputs, strict=True):
            mel = self._recomputed(stream, chunk) if given is None else next(computed)
            mels.append(mel)
            if not chunk.provisional:
                stream.next_frame += mel.shape[1]
            if given is None:
                continue
            if chunk.provisional:
                stream.blocks.retract(len(given.tables))
                continue
            stream.blocks.forget_unseen()
            if self._left_blocks < 0:  # with a limit the stream never needs to start over
                stream.tokens.append(
                    chunk.tokens[chunk.left : chunk.left + chunk.stop - chunk.start]
                )
        return mels

    def _encoder_state(self, stream: _Stream, chunk: TokenChunk) -> Any:
        if not chunk.provisional:
            return stream.encoder_state
        return self._encoder.fork(
            stream.encoder_state, stream_mask(self._config, stream.voice, self._left_blocks)
        )

    def _run(self, alike: Sequence[tuple[int, ChunkInput]]) -> list[torch.Tensor]:
        """Returns the mels of chunks that have the same number of ODE steps."""
        return self._runners[alike[0][0]].run([given for _, given in alike])

    def _next_input(
        self, stream: _Stream, chunk: TokenChunk, mu: torch.Tensor
    ) -> ChunkInput | None:
        """Prepares the input of a chunk; None if the stream must continue without the cache."""
        first_frame = self._config.token_mel_ratio * chunk.start
        if stream.next_frame != first_frame:
            raise EngineError(
                f"chunk starts at frame {first_frame}, but {stream.next_frame} come next"
            )
        if stream.recomputing is not None:
            return None
        try:
            conv_state = stream.conv_state.clone() if chunk.provisional else stream.conv_state
            return self._input(chunk, mu, stream.prompt, stream.blocks, conv_state)
        except OutOfBlocksError:
            return None

    def _input(
        self,
        chunk: TokenChunk,
        mu: torch.Tensor,
        prompt: _Prompt,
        blocks: StreamBlocks,
        conv_state: torch.Tensor,
    ) -> ChunkInput:
        """Prepares a chunk for the ODE from its conditions mu (bands, frames), and takes the pages
        of its blocks.
        """
        start, frames = self._config.token_mel_ratio * chunk.start, mu.shape[1]
        cond = torch.zeros_like(mu)
        given = prompt.prompt_mel[:, start : start + frames]
        cond[:, : given.shape[1]] = given
        noise = self._noise.window(start, start + frames)
        # Padding at the start makes the blocks of the prompt complete: the last one ends with it.
        if prompt.prompt_padding and not start:
            noise, mu, cond = (
                F.pad(value, (prompt.prompt_padding, 0)) for value in (noise, mu, cond)
            )
        else:
            start += prompt.prompt_padding
        tables = blocks.extend(-(-mu.shape[1] // self._layout.block_frames))
        joined = (
            self._config.full_prompt_attention
            and start < prompt.prompt_padding + prompt.prompt_mel.shape[1]
        )
        return ChunkInput(
            noise,
            mu,
            cond,
            prompt.speaker,
            start,
            tables,
            conv_state,
            prompt.prompt_padding,
            joined,
        )

    def _prefill(self, voice: Voice, steps: int) -> _Prompt:
        """Computes the blocks that lie wholly in a prompt."""
        config, size, count = self._config, self._config.block_tokens, len(voice.prompt_tokens)
        mask = stream_mask(config, voice)
        prompt = _Prompt(
            conv_state=torch.zeros(
                self._layout.steps, *self._layout.conv_state, device=self._device
            ),
            encoder_state=self._encoder.start(voice, mask),
            prompt_mel=torch.tensor(voice.prompt_mel, device=self._device).T,
            speaker=self._encoder.speaker(
                torch.tensor(voice.speaker_embedding, device=self._device)
            ),
            prompt_padding=config.token_mel_ratio * config.prompt_padding_tokens(count),
        )
        prefix = config.prefix_tokens(count)
        blocks = StreamBlocks(
            self.prefixes, [], BlockMask(self._layout.block_frames), mask.prefix_blocks
        )
        hop = max(1, prefix) if config.full_prompt_attention else _PREFILL_BLOCKS * size
        try:
            for start in range(0, prefix, hop):
                stop, left = min(prefix, start + hop), min(config.lookbehind_tokens, start)
                window = voice.prompt_tokens[start - left : stop + config.lookahead_tokens]
                chunk = TokenChunk(window, left, start, stop, last=False)
                [mu] = self._encoder.encode([(prompt.encoder_state, chunk)])
                self._runners[steps].run(
                    [self._input(chunk, mu, prompt, blocks, prompt.conv_state)]
                )
        except BaseException:
            blocks.release()
            raise
        prompt.pages = blocks.own
        return prompt

    def _recomputed(self, stream: _Stream, chunk: TokenChunk) -> torch.Tensor:
        """Computes the mel of a chunk without the cache. The first such chunk of a stream releases
        all pages of the stream.
        """
        if stream.recomputing is None:
            self._release_pages(stream)
            prefix = self._config.prefix_tokens(len(stream.voice.prompt_tokens))
            tokens = np.concatenate([stream.voice.prompt_tokens[:prefix], *stream.tokens])
            stream.tokens.clear()
            stream.recomputing = self._recompute.resume(stream.voice, tokens, stream.steps)
        [mel] = self._recompute.advance([(stream.recomputing, chunk)])
        return mel

    def _release(self, stream: _Stream) -> None:
        """Releases all memory of a stream. Every stream ends in this method."""
        self._release_pages(stream)
        if stream.recomputing is not None:
            self._recompute.close(stream.recomputing)

    def _release_pages(self, stream: _Stream) -> None:
        """Releases the pages of a stream, and its reference to the pages of its prompt."""
        stream.blocks.release()
        if stream.prefix is not None:
            self.prefixes.release(stream.prefix)
            stream.prefix = None

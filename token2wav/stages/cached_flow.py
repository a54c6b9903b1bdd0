"""Incremental flow stage, which computes only the new frames of every chunk.

The keys and values of finished blocks stay in pages of one pool, and the last inputs of
convolutions stay in the state store. Blocks that lie wholly in a prompt are computed once for each
voice, and streams share them. The result equals the result of `RecomputeFlow` up to float rounding.
This module decides which pages are kept, and for which stream. An `EncoderRunner` and a
`FlowRunner` compute the chunks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import ceil

import numpy as np
import torch
from numpy.typing import NDArray

from token2wav.cache.block_pool import (
    BlockPool,
    CommonReserve,
    OutOfBlocksError,
    PageNeeds,
    Prefix,
    PrefixCache,
    StreamBlocks,
)
from token2wav.cache.encoder_cache import EncoderCache
from token2wav.cache.paged_kv_cache import CacheLayout, PagedKVCache
from token2wav.cache.states import StateStore
from token2wav.config import StreamConfig
from token2wav.config.block_grid import BlockGrid
from token2wav.config.model_config import ModelConfig
from token2wav.errors import BackendError, ConfigError
from token2wav.execution.batch import ChunkInput
from token2wav.execution.buckets import map_grouped
from token2wav.execution.runner import ESTIMATOR, FlowRunner
from token2wav.execution.staging import joined, to_device
from token2wav.layers.streaming import StateSpec
from token2wav.networks.estimator import Estimator
from token2wav.stages.encoder_runner import ENCODER, ChunkEncoderRunner, EncoderRunner, PlacedChunk
from token2wav.stages.recompute import RecomputeFlow
from token2wav.stages.stage import (
    DEFAULT_OPTIONS,
    CacheUsage,
    Encoder,
    FlowStage,
    StreamOptions,
    TokenChunk,
)
from token2wav.voice import Voice

# Prompt blocks that are computed at once. The number bounds the memory, and costs no time.
_PREFILL_BLOCKS = 4
# Pages that a stream without a window takes when it opens, besides those of its first hop. They
# hold the end of the prompt.
_FIRST_PAGES = 2
_PROMPTS = 16  # slots for prompt states that exist from the start


@dataclass(eq=False)
class _Prompt:
    """Prefix that streams with the same voice and number of ODE steps share."""

    states: StateStore
    slot: int  # with the states after the prefix
    mel: torch.Tensor  # (bands, frames) of the whole prompt
    speaker: torch.Tensor  # (bands,)
    pages: list[int] = field(default_factory=list)

    def release(self) -> None:
        self.states.release(self.slot)


@dataclass(eq=False)
class _FlowStream:
    """State of one stream."""

    voice: Voice
    steps: int
    grid: BlockGrid  # in tokens
    prefix: Prefix[_Prompt] | None  # None after the stream has released its pages
    prompt: _Prompt
    blocks: StreamBlocks
    slot: int
    next_token: int
    # Tokens of finished chunks, with which the stream can continue without the cache.
    tokens: list[NDArray[np.int32]] = field(default_factory=list)
    recomputing: int | None = None  # handle in `RecomputeFlow`; None while the cache is used


@dataclass(frozen=True, eq=False)
class _PagedChunk:
    placed: PlacedChunk
    steps: int
    prompt: _Prompt


def flow_states(
    encoder: Encoder, estimator: Estimator, layout: CacheLayout, streams: int = 0
) -> StateStore:
    """Makes the state store of a flow, on the device of its encoder.

    The estimator has one state for each ODE step and guidance branch.

    Args:
        streams: streams that get a slot at once. Each prompt in the cache takes a slot too. The
            store grows if there are more streams or prompts.
    """
    shape = layout.steps, *layout.conv_state
    spec = StateSpec("estimator", shape, torch.float32)
    return StateStore(
        {ENCODER: encoder.state_specs(), ESTIMATOR: {estimator: spec}},
        encoder.device,
        1 + _PROMPTS + streams,
    )


def encoder_cache(encoder: Encoder, block_tokens: int, cache: PagedKVCache) -> EncoderCache:
    return EncoderCache(encoder.key_value_specs, block_tokens, cache.pages, encoder.device)


def _prefill_tokens(grid: BlockGrid) -> int:
    """Returns the most tokens of a prompt that one batch computes."""
    return max(1, grid.prefix) if grid.full_prompt_attention else _PREFILL_BLOCKS * grid.block


def page_needs(config: ModelConfig, left_blocks: int, longest_hop: int) -> PageNeeds:
    """Returns the pages that a stream needs besides its prefix, if each block sees `left_blocks`
    earlier blocks, 0 or more.

    The longest chunk is a last chunk. Besides its hop, it contains the tokens that would be the
    look-ahead of another chunk. A first chunk also contains the blocks at the prompt's end that
    depend on later tokens, but the stream keeps no block from before it.
    """
    block = config.block_tokens
    after = max(config.lookahead_tokens, config.optional_lookahead_tokens, 1) - 1
    last = ceil(after / block)
    first = config.hop_blocks[0] + last + 1 + ceil(max(0, config.lookahead_tokens - 1) / block)
    return PageNeeds(left_blocks, max(longest_hop // block + last, first - left_blocks))


def check_pages(config: ModelConfig, stream: StreamConfig, pages: int) -> None:
    """Raises ConfigError if a cache has too few pages for a stream with a window, and for the
    longest chunk.

    Without a window, a stream that finds too few pages is computed without them. So only a setting
    is checked there, and not the value of the model.
    """
    window, hop = config.window(stream), config.hops(stream)[1]
    if window < 0 and not stream.max_hop_tokens:
        return
    needs = page_needs(config, max(0, window), hop)
    if (least := needs.window + needs.chunk) <= pages:
        return
    problem = f"stream.max_hop_tokens: {hop} tokens"
    if window >= 0:
        problem = f"stream.left_blocks: {window} past blocks and a chunk of {hop} tokens"
    raise ConfigError(
        f"{problem} need {least} pages of the cache, which has {pages}; lower stream.left_blocks "
        "or stream.max_hop_tokens, or raise runtime.cache_mib"
    )


class CachedFlow(FlowStage[_FlowStream]):
    """Incremental flow on a CPU or a CUDA device.

    A stream takes the pages of its first chunk when it opens. If the pool has too few pages then,
    the stream is rejected. If a later chunk finds too few pages, the stream releases its own pages
    and its reference to the pages of the prompt. From then on it recomputes its history for every
    chunk, which is slower and has the same result. With a limited number of past blocks
    (`left_blocks` >= 0) a stream needs a bounded number of pages. When it opens, it takes the pages
    that it keeps between its chunks. Each chunk borrows the rest from a reserve that all streams
    share (`CommonReserve`).

    Args:
        recompute: the same flow without cache. It computes whole utterances, and the streams that
            the pool has no room for. It also gives the configuration, the encoder, the noise on the
            device and the number of visible past blocks.
        runners: runners by ODE steps; the default number comes first.
        provisional_runners: runners of provisional chunks, by the ODE steps of their streams. The
            runner of a missing number is the one in `runners`.
        states: state store that all runners use, see `flow_states`.
        encoder_runner: runner of the encoder; None to encode chunk by chunk.
        longest_hop: tokens of the longest hop of a stream.
    """

    def __init__(
        self,
        recompute: RecomputeFlow,
        runners: Mapping[int, FlowRunner],
        cache: PagedKVCache,
        states: StateStore,
        *,
        provisional_runners: Mapping[int, FlowRunner] | None = None,
        encoder_runner: EncoderRunner | None = None,
        longest_hop: int = 100,
    ) -> None:
        super().__init__()
        self._recompute = recompute
        self._config, self._left_blocks = recompute.config, recompute.left_blocks
        self._encoder, self._device = recompute.encoder, recompute.device
        self._noise = recompute.noise
        self._runners = dict(runners)
        self._provisional_runners = dict(provisional_runners or {})
        self._default_steps = next(iter(runners))
        self._layout = cache.layout
        self.states = states
        if encoder_runner is None:
            keys = encoder_cache(self._encoder, self._config.block_tokens, cache)
            encoder_runner = ChunkEncoderRunner(self._encoder, keys, states)
        self.encoder_runner = encoder_runner
        self.pool = BlockPool(cache.pages)
        self.prefixes: PrefixCache[_Prompt] = PrefixCache(self.pool)
        self._common = None
        if self._left_blocks >= 0:
            needs = page_needs(self._config, self._left_blocks, longest_hop)
            self._common = CommonReserve(self.prefixes, needs)
        self._zero = torch.zeros(self._config.mel_bands, 1, device=self._device)

    def usage(self) -> CacheUsage:
        prefixes = self.prefixes
        return CacheUsage(
            capacity=self.pool.capacity,
            used=self.pool.used,
            shared=prefixes.pages,
            idle=prefixes.idle_pages,
            page_bytes=self._layout.page_bytes + self.encoder_runner.cache.page_bytes,
            prompt_hits=prefixes.acquired - prefixes.computed,
            prompt_misses=prefixes.computed,
        )

    @torch.inference_mode()
    def open(self, voice: Voice, options: StreamOptions = DEFAULT_OPTIONS) -> int:
        steps = options.steps or self._default_steps
        prefix = self.prefixes.acquire(
            (voice.content_hash, steps), lambda: self._prefill(voice, steps)
        )
        prompt = prefix.content
        assert prompt is not None
        with ExitStack() as rollback:  # releases everything again if a later step fails
            rollback.callback(self.prefixes.release, prefix)
            grid = self._config.grid(len(voice.prompt_tokens), self._left_blocks)
            first = _FIRST_PAGES + self._config.hop_blocks[0]
            blocks = StreamBlocks(self.prefixes, prompt.pages, grid, first, self._common)
            rollback.callback(blocks.release)
            slot = self.states.take()
            rollback.callback(self.states.release, slot)
            self.states.copy(prompt.slot, slot)
            handle = self.register(
                _FlowStream(voice, steps, grid, prefix, prompt, blocks, slot, grid.prefix)
            )
            rollback.pop_all()
            return handle

    def prompt_batches(self, voice: Voice, options: StreamOptions = DEFAULT_OPTIONS) -> int:
        if self.prefixes.holds((voice.content_hash, options.steps or self._default_steps)):
            return 0
        grid = self._config.grid(len(voice.prompt_tokens))
        return ceil(grid.prefix / _prefill_tokens(grid))

    @torch.inference_mode()
    def advance(self, batch: Sequence[tuple[int, TokenChunk]]) -> list[torch.Tensor]:
        streams, chunks = [self.state(handle) for handle, _ in batch], [chunk for _, chunk in batch]
        parts: list[_PagedChunk | None] = []
        with ExitStack() as rollback:  # returns the pages of all chunks if one of them fails
            for stream, chunk in zip(streams, chunks, strict=True):
                parts.append(part := self._with_pages(stream, chunk))
                if part is not None:
                    rollback.callback(stream.blocks.retract, len(part.placed.place.tables))
            paged_mels = iter(self._compute([part for part in parts if part is not None]))
            rollback.pop_all()
        mels = []
        for stream, chunk, part in zip(streams, chunks, parts, strict=True):
            mel = self._recompute_chunk(stream, chunk) if part is None else next(paged_mels)
            mels.append(mel)
            if not chunk.provisional:
                stream.next_token = chunk.stop
            if part is None:
                continue
            if chunk.provisional:
                stream.blocks.retract(len(part.placed.place.tables))
                continue
            stream.blocks.forget_unseen()
            # With limited past blocks a stream has all its pages, so it never recomputes.
            if self._left_blocks < 0:
                stream.tokens.append(chunk.tokens[: chunk.stop - chunk.start])
        return mels

    def close(self, handle: int) -> None:
        if (stream := self._streams.pop(handle, None)) is not None:
            self._release_pages(stream)
            if stream.recomputing is not None:
                self._recompute.close(stream.recomputing)

    def limit_chunks(self, most: int) -> None:
        if self._common:
            self._common.limit(most)

    def whole(
        self, tokens: NDArray[np.int32], voice: Voice, *, streaming: bool, steps: int = 0
    ) -> torch.Tensor:
        return self._recompute.whole(tokens, voice, streaming=streaming, steps=steps)

    def _with_pages(self, stream: _FlowStream, chunk: TokenChunk) -> _PagedChunk | None:
        """Takes the pages of a chunk; None if the stream must continue without the cache."""
        if stream.next_token != chunk.start:
            raise BackendError(
                f"chunk starts at token {chunk.start}, but {stream.next_token} comes next"
            )
        if stream.recomputing is not None:
            return None
        try:
            tables = stream.blocks.extend(stream.grid.block_count(chunk.start, chunk.stop))
        except OutOfBlocksError:
            if self._common:  # more chunks run than `limit_chunks` allows, so the caller is wrong
                raise
            return None
        placed = PlacedChunk.of(chunk, stream.grid, stream.slot, tables)
        return _PagedChunk(placed, stream.steps, stream.prompt)

    def _compute(self, parts: Sequence[_PagedChunk]) -> list[torch.Tensor]:
        if not parts:
            return []
        mus = self.encoder_runner.run([part.placed for part in parts])
        kinds = [(part.steps, part.placed.chunk.provisional) for part in parts]
        pairs = list(zip(kinds, self._inputs(parts, mus), strict=True))
        return map_grouped(pairs, lambda pair: pair[0], self._run)

    def _run(self, pairs: Sequence[tuple[tuple[int, bool], ChunkInput]]) -> list[torch.Tensor]:
        steps, provisional = pairs[0][0]
        runner = self._provisional_runners.get(steps) if provisional else None
        return (runner or self._runners[steps]).run([chunk for _, chunk in pairs])

    def _inputs(self, parts: Sequence[_PagedChunk], mus: list[torch.Tensor]) -> list[ChunkInput]:
        """Prepares chunks for the ODE from their mu (bands, frames).

        One launch joins the noise of all chunks, and one their prompt mel.
        """
        ratio = self._config.token_mel_ratio
        noises: list[list[torch.Tensor]] = []
        conds: list[list[torch.Tensor]] = []
        padded: list[list[torch.Tensor]] = []
        for part, mu in zip(parts, mus, strict=True):
            start, frames = ratio * part.placed.chunk.start, mu.shape[1]
            # Padding at the start of a stream completes its first block, if the family needs that.
            padding = self._zeros(ratio * part.placed.place.padding)
            prompt = part.prompt.mel[:, start : start + frames]
            noises.append([padding, *self._noise.pieces(start, start + frames)])
            conds.append([padding, prompt, self._zeros(frames - prompt.shape[1])])
            padded.append([padding, mu])
        if any(part.placed.place.padding for part in parts):
            mus = joined(padded)
        return [
            ChunkInput(noise, mu, cond, part.prompt.speaker, part.placed.place.scaled(ratio))
            for part, noise, mu, cond in zip(parts, joined(noises), mus, joined(conds), strict=True)
        ]

    def _zeros(self, frames: int) -> torch.Tensor:
        return self._zero.expand(-1, frames)

    def _prefill(self, voice: Voice, steps: int) -> _Prompt:
        """Computes the prefix of a voice: the blocks that lie wholly in its prompt."""
        config, device = self._config, self._device
        grid = config.grid(len(voice.prompt_tokens))
        mel = to_device(voice.prompt_mel, device).T
        speaker = self._encoder.speaker(to_device(voice.speaker_embedding, device))
        hop = _prefill_tokens(grid)
        with ExitStack() as rollback:  # releases everything again if a later step fails
            prompt = _Prompt(self.states, self.states.take(), mel, speaker)
            rollback.callback(prompt.release)
            blocks = StreamBlocks(self.prefixes, [], grid, grid.prefix_blocks)
            rollback.callback(blocks.release)
            self.states.clear(prompt.slot)
            for start in range(0, grid.prefix, hop):
                stop = min(grid.prefix, start + hop)
                tokens = voice.prompt_tokens[start : stop + config.lookahead_tokens]
                chunk = TokenChunk(tokens, start, stop, last=False)
                tables = blocks.extend(grid.block_count(start, stop))
                placed = PlacedChunk.of(chunk, grid, prompt.slot, tables)
                self._compute([_PagedChunk(placed, steps, prompt)])
            rollback.pop_all()
        prompt.pages = blocks.pages
        return prompt

    def _recompute_chunk(self, stream: _FlowStream, chunk: TokenChunk) -> torch.Tensor:
        if stream.recomputing is None:
            self._release_pages(stream)
            prompt = stream.voice.prompt_tokens[: stream.grid.prefix]
            tokens = np.concatenate([prompt, *stream.tokens])
            stream.tokens.clear()
            stream.recomputing = self._recompute.resume(stream.voice, tokens, stream.steps)
        [mel] = self._recompute.advance([(stream.recomputing, chunk)])
        return mel

    def _release_pages(self, stream: _FlowStream) -> None:
        stream.blocks.release()
        if stream.prefix is not None:
            self.states.release(stream.slot)
            self.prefixes.release(stream.prefix)
            stream.prefix = None

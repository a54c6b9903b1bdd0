"""The incremental flow engine: every chunk costs only itself.

Keys, values and convolution inputs of finished blocks are kept in pages of one pool; the blocks that lie wholly in a
prompt are computed once per voice and shared. The result is that of `RecomputeFlowEngine` up to float rounding. This
module decides what is kept and for whom; the arithmetic is a `ChunkSolver`'s.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from token2wav.cache.block_pool import BlockPool, OutOfBlocksError
from token2wav.cache.prefix_cache import Prefix, PrefixCache
from token2wav.engines.base import CacheUsage, FlowChunk
from token2wav.engines.handles import HandleTable
from token2wav.engines.recompute_engine import RecomputeFlowEngine
from token2wav.engines.work import ChunkSolver, ChunkWork, Past
from token2wav.engines.work_maker import WorkMaker
from token2wav.errors import EngineError, StreamClosedError
from token2wav.flow.cache import KeyValueStore
from token2wav.flow.dit import CONTEXT_FRAMES
from token2wav.flow.flow import Flow
from token2wav.flow.masks import BlockMask
from token2wav.flow.noise import FlowNoise
from token2wav.groups import in_groups
from token2wav.voice import Voice

_PREFILL_BLOCKS = 4  # of a prompt computed at once: bounds memory, costs nothing


@dataclass(eq=False)
class _Prompt:
    """What all streams of a voice share."""

    blocks: int
    pages: list[int]
    contexts: torch.Tensor  # (steps, 2 convolutions, branches, dim, CONTEXT_FRAMES)
    prompt_mel: torch.Tensor  # (bands, 2 P)
    speaker: torch.Tensor  # (bands,)


@dataclass(eq=False)
class _Stream:
    """One utterance."""

    voice: Voice
    steps: int
    prompt: Prefix[_Prompt]
    content: _Prompt
    contexts: torch.Tensor
    next_frame: int
    first_block: int  # of `pages`
    pages: list[int] = field(default_factory=list)  # of finished blocks after the prompt's
    reserve: list[int] = field(default_factory=list)  # pages that are taken already, for the blocks to come
    tokens: list[NDArray[np.int32]] = field(default_factory=list)  # of finished chunks, to start over without the cache
    recomputing: int | None = None  # handle in the recompute engine, once it had to
    busy: bool = False
    closed: bool = False


class CachedFlowEngine:
    """Incremental flow on a CPU or a CUDA device.

    A stream takes the pages of its first chunks when it opens, or is refused. When the pool is full later on, it gives
    its pages back and goes on by recomputing: slower, with the same result. With `left_blocks` >= 0 it needs a fixed
    number of pages, all taken when it opens.

    Args:
        flow: on the device that is to be used.
        noise: of the flow.
        solvers: compute chunks, by number of ODE steps; the usual number comes first.
        store: memory of the pages, the same that all of them use.
        recompute: for streams that the pool has no room for, and for whole utterances.
        left_blocks: blocks of the past that stay visible beside the prompt's; negative for all, which is exact.
        keep_prompt: whether the prompt's stay visible.
        longest_hop: tokens of the longest hop that streams will take.
        tail: attention mask of the last chunk, see `StreamConfig`; under the full one it is recomputed.
    """

    def __init__(
        self,
        flow: Flow,
        noise: FlowNoise,
        solvers: Mapping[int, ChunkSolver],
        store: KeyValueStore,
        recompute: RecomputeFlowEngine,
        *,
        left_blocks: int = -1,
        keep_prompt: bool = True,
        longest_hop: int = 100,
        tail: Literal["streaming", "full"] = "streaming",
    ) -> None:
        self._flow = flow
        self._device = flow.spk_embed_affine_layer.weight.device
        self._works = WorkMaker(flow, noise)
        self._solvers = dict(solvers)
        self._usual = next(iter(solvers))
        self._recompute = recompute
        self._left_blocks = left_blocks
        self._keep_prompt = keep_prompt
        self._longest_hop = longest_hop
        self._tail = tail
        self._keeps_tokens = left_blocks < 0 or tail == "full"
        self._layout = store.layout
        self.pool = BlockPool(store.pages)
        self.prompts: PrefixCache[_Prompt] = PrefixCache(self.pool)
        self._streams: HandleTable[_Stream] = HandleTable()
        self._lock = threading.Lock()  # who is busy, and who is closed meanwhile

    @property
    def open_streams(self) -> int:
        return len(self._streams)

    def usage(self) -> CacheUsage:
        """See `FlowEngine.usage`."""
        prompts = self.prompts
        return CacheUsage(
            capacity=self.pool.capacity,
            used=self.pool.used,
            shared=prompts.pages,
            page_bytes=self._layout.page_bytes,
            prompt_hits=prompts.acquired - prompts.computed,
            prompt_misses=prompts.computed,
        )

    @torch.inference_mode()
    def open(self, voice: Voice, steps: int = 0) -> int:
        """See `FlowEngine.open`."""
        steps = steps or self._usual
        prompt = self.prompts.acquire((voice.content_hash, steps), lambda: self._prefill(voice, steps))
        try:
            reserve = self.prompts.take(self._reserved_blocks())
        except BaseException:
            self.prompts.release(prompt)
            raise
        content = prompt.content
        assert content is not None
        prefix = self._flow.config.prefix_tokens(len(voice.prompt_tokens))
        return self._streams.add(
            _Stream(
                voice=voice,
                steps=steps,
                prompt=prompt,
                content=content,
                contexts=content.contexts.clone(),
                next_frame=prefix * self._flow.config.token_mel_ratio,
                first_block=len(content.pages),
                reserve=reserve,
            )
        )

    @torch.inference_mode()
    def advance(self, batch: Sequence[tuple[int, FlowChunk]]) -> list[torch.Tensor]:
        streams = self._enter([handle for handle, _ in batch])
        try:
            return self._advance(streams, [chunk for _, chunk in batch])
        finally:
            self._leave(streams)

    def close(self, handle: int) -> None:
        stream = self._streams.remove(handle)
        if stream is None:
            return
        with self._lock:
            stream.closed = True
            busy = stream.busy
        if not busy:  # else another thread still writes to its pages, and releases them when it is done
            self._release(stream)

    def whole(self, tokens: NDArray[np.int32], voice: Voice, *, streaming: bool, steps: int = 0) -> torch.Tensor:
        """See `RecomputeFlowEngine.whole`."""
        return self._recompute.whole(tokens, voice, streaming=streaming, steps=steps)

    def _reserved_blocks(self) -> int:
        """Pages to take for a stream before it starts: for its first chunk, or all it will ever need."""
        if self._left_blocks < 0:
            return 3
        # Beside its hop, a first chunk has up to two blocks of the prompt, and a last one the look-ahead tokens.
        return max(1, self._left_blocks) + self._longest_hop // self._flow.config.block_tokens + 2

    def _enter(self, handles: list[int]) -> list[_Stream]:
        """The streams of a batch; until `_leave`, who closes one leaves its pages to this thread."""
        streams = [self._streams[handle] for handle in handles]
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

    def _advance(self, streams: list[_Stream], chunks: list[FlowChunk]) -> list[torch.Tensor]:
        conditions = self._works.conditions(chunks)
        works = [self._work_of(*each) for each in zip(streams, chunks, conditions, strict=True)]
        ready = [(stream.steps, work) for stream, work in zip(streams, works, strict=True) if work is not None]
        solved = iter(in_groups(ready, lambda each: each[0], self._solve))
        mels = []
        for stream, chunk, work in zip(streams, chunks, works, strict=True):
            mel = self._recomputed(stream, chunk) if work is None else next(solved)
            stream.next_frame += mel.shape[1]
            if work is not None:
                self._finished(stream, chunk)
            mels.append(mel)
        return mels

    def _solve(self, alike: Sequence[tuple[int, ChunkWork]]) -> list[torch.Tensor]:
        """Mels of chunks with as many steps."""
        return self._solvers[alike[0][0]].solve([work for _, work in alike])

    def _work_of(self, stream: _Stream, chunk: FlowChunk, mu: torch.Tensor) -> ChunkWork | None:
        """What there is to compute for a chunk, or None if the stream must go on without the cache."""
        first_frame = self._flow.config.token_mel_ratio * chunk.start
        if stream.next_frame != first_frame:
            raise EngineError(f"chunk starts at frame {first_frame}, but {stream.next_frame} come next")
        if stream.recomputing is not None or (chunk.last and self._tail == "full"):
            return None
        try:
            new = self._pages_for(stream, chunk)
        except OutOfBlocksError:
            return None
        content = stream.content
        blocks = [*range(len(content.pages)), *range(stream.first_block, stream.first_block + len(stream.pages))]
        past = self._past(blocks, content.pages + stream.pages, content, chunk.start)
        stream.pages += new
        return self._works.work(chunk, mu, content.prompt_mel, content.speaker, past, new, stream.contexts)

    def _past(self, blocks: list[int], pages: list[int], prompt: _Prompt, start: int) -> Past:
        """Blocks before a chunk that starts at token `start`, without a prompt's that it cannot see."""
        mask = self._mask(prompt)
        needed = mask.first_needed(start // self._flow.config.block_tokens)
        seen = [index for index, block in enumerate(blocks) if block < mask.prefix_blocks or block >= needed]
        return Past([blocks[index] for index in seen], [pages[index] for index in seen], mask.prefix_blocks)

    def _mask(self, prompt: _Prompt) -> BlockMask:
        kept = prompt.blocks if self._keep_prompt else 0
        return BlockMask(self._layout.block_frames, self._left_blocks, kept)

    def _finished(self, stream: _Stream, chunk: FlowChunk) -> None:
        self._forget_unseen(stream, chunk)
        if self._keeps_tokens:
            stream.tokens.append(chunk.tokens[chunk.left : chunk.left + chunk.stop - chunk.start])

    def _recomputed(self, stream: _Stream, chunk: FlowChunk) -> torch.Tensor:
        if stream.recomputing is None:
            stream.recomputing = self._start_over(stream, chunk)
        [mel] = self._recompute.advance([(stream.recomputing, chunk)])
        return mel

    def _prefill(self, voice: Voice, steps: int) -> _Prompt:
        """Computes the blocks that lie wholly in a prompt."""
        config = self._flow.config
        estimator = config.estimator
        prefix = config.prefix_tokens(len(voice.prompt_tokens))
        prefix_blocks = prefix // config.block_tokens
        prompt = _Prompt(
            blocks=prefix_blocks,
            pages=[],
            contexts=torch.zeros(
                *(self._layout.steps, 2, self._layout.branches, estimator.dim, CONTEXT_FRAMES), device=self._device
            ),
            prompt_mel=torch.tensor(voice.prompt_mel, device=self._device).T,
            speaker=self._flow.speaker(torch.tensor(voice.speaker_embedding, device=self._device)),
        )
        pages = self.prompts.take(prefix_blocks)
        try:
            for done in range(0, prefix_blocks, _PREFILL_BLOCKS):
                end = min(prefix_blocks, done + _PREFILL_BLOCKS)
                start, stop = done * config.block_tokens, end * config.block_tokens
                left = min(config.lookbehind_len, start)
                window = voice.prompt_tokens[start - left : stop + config.pre_lookahead_len]
                past = self._past(list(range(done)), pages[:done], prompt, start)
                chunk = FlowChunk(window, left, start, stop, last=False)
                [mu] = self._works.conditions([chunk])
                new = pages[done:end]
                self._solvers[steps].solve(
                    [self._works.work(chunk, mu, prompt.prompt_mel, prompt.speaker, past, new, prompt.contexts)]
                )
        except BaseException:
            self.pool.release(pages)
            raise
        prompt.pages = pages
        return prompt

    def _pages_for(self, stream: _Stream, chunk: FlowChunk) -> list[int]:
        """Pages for the blocks of a chunk, out of the stream's reserve as far as it goes."""
        config = self._flow.config
        blocks = -(-(chunk.stop - chunk.start) // config.block_tokens)
        if blocks > len(stream.reserve):
            stream.reserve += self.prompts.take(blocks - len(stream.reserve))
            stream.reserve.sort()
        new = stream.reserve[:blocks]
        del stream.reserve[:blocks]
        return new

    def _forget_unseen(self, stream: _Stream, chunk: FlowChunk) -> None:
        """Puts pages that no later chunk can see back into the reserve."""
        block = chunk.stop // self._flow.config.block_tokens
        unseen = min(len(stream.pages), self._mask(stream.content).first_needed(block) - stream.first_block)
        if unseen > 0:
            stream.reserve += stream.pages[:unseen]
            del stream.pages[:unseen]
            stream.first_block += unseen

    def _start_over(self, stream: _Stream, chunk: FlowChunk) -> int:
        """Gives up a stream's pages; returns its handle in the recompute engine, which goes on at this chunk."""
        self._release_pages(stream)
        prefix = self._flow.config.prefix_tokens(len(stream.voice.prompt_tokens))
        ahead = chunk.tokens[chunk.left :][: self._flow.config.pre_lookahead_len]
        tokens = np.concatenate([stream.voice.prompt_tokens[:prefix], *stream.tokens, ahead])
        stream.tokens.clear()
        return self._recompute.resume(stream.voice, tokens if chunk.start else None, stream.steps)

    def _release(self, stream: _Stream) -> None:
        self._release_pages(stream)
        self.prompts.release(stream.prompt)
        if stream.recomputing is not None:
            self._recompute.close(stream.recomputing)

    def _release_pages(self, stream: _Stream) -> None:
        self.pool.release(stream.pages)
        self.pool.release(stream.reserve)

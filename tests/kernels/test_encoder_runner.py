"""EncoderRunner of blocks of many streams equal the conditions of each stream alone.

Interpreted kernels are slow, so blocks have 8 tokens and the encoder two layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from testkit.captured_code import NothingCopied, OnDevice
from testkit.launches import Launches
from testkit.models.golden import TINY
from token2wav.cache.block_pool import BlockPool, PrefixCache, StreamBlocks
from token2wav.cache.encoder_cache import EncoderCache
from token2wav.cache.states import StateStore
from token2wav.config.block_grid import BlockGrid
from token2wav.execution.batch import BatchSize
from token2wav.execution.cuda_graphs import GraphPool, graphs_enabled
from token2wav.families.cosyvoice2 import FlowConfig
from token2wav.families.cosyvoice2.flow import Flow
from token2wav.families.cosyvoice3 import CosyVoice3Config
from token2wav.families.cosyvoice3.flow import Flow as DiTFlow
from token2wav.families.stepaudio2.flow import StepAudioFlow
from token2wav.kernels import relative_attention
from token2wav.published.sizes import ConformerConfig
from token2wav.stages.encoder_runner import (
    ENCODER,
    BlockEncoderRunner,
    ChunkEncoderRunner,
    EncoderBatch,
    EncoderRunner,
    PlacedChunk,
)
from token2wav.stages.stage import TokenChunk

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Tolerance of conditions, with a spread of about 1. The sums of a score have another order, and
# sinusoids of absolute positions are rounded, not sinusoids of distances.
CLOSE = 1e-5
# For equal kernels in batches of other sizes: 0 to 1.2e-6, by the processor.
SAME = 2e-6
BLOCK, LOOKAHEAD, PAGES, BANDS = 8, 3, 40, 8


def a_flow(kind: str, device: torch.device = DEVICE) -> Any:
    torch.manual_seed(0)
    if kind == "cosyvoice3":
        return DiTFlow(CosyVoice3Config.read(TINY).flow).eval().requires_grad_(False).to(device)
    sizes = ConformerConfig(32, 2, 24, layers=2, up_layers=2)
    config: Any = FlowConfig(
        6561,
        8,
        BANDS,
        LOOKAHEAD,
        0.7,
        sizes,
        None,
        block_tokens=BLOCK,
        ratio=4 if kind == "moss_speech" else None,
    )
    no_estimator: Any = torch.nn.Identity()
    flow = (StepAudioFlow if kind == "stepaudio2" else Flow)(config, no_estimator)
    for layer in (*flow.encoder.encoders, *flow.encoder.up_encoders):
        torch.nn.init.normal_(layer.self_attn.pos_bias_u)
        torch.nn.init.normal_(layer.self_attn.pos_bias_v)
    return flow.eval().requires_grad_(False).to(device)


@dataclass(eq=False)
class Rig:
    """Encoder with memory of its own, which begins as NaN."""

    flow: Any
    cache: EncoderCache
    states: StateStore

    @classmethod
    def of(cls, flow: Any, device: torch.device = DEVICE) -> Rig:
        cache = EncoderCache(flow.key_value_specs, BLOCK, PAGES, device)
        for layer in range(sum(spec.layers for spec in flow.key_value_specs)):
            cache.layer(layer).data.fill_(torch.nan)
        for spec in flow.key_value_specs:
            cache.sinusoids(spec.rate).fill_(torch.nan)
        return cls(flow, cache, StateStore({ENCODER: flow.state_specs()}, device))

    def streams(self) -> EncoderRunner:
        return ChunkEncoderRunner(self.flow, self.cache, self.states)

    def blocks(self, *, bucket: bool = False) -> BlockEncoderRunner:
        graphs = GraphPool(DEVICE) if bucket and graphs_enabled(DEVICE) else None
        buckets = [BatchSize(16, 1, 12)] if bucket else []
        runner = BlockEncoderRunner(self.flow, self.cache, self.states, BLOCK, buckets, graphs)
        if bucket and graphs is None:  # padding rows must not reach any stream
            [(work, _)] = runner._batches._buckets.values()
            assert isinstance(work, EncoderBatch)
            with torch.inference_mode():
                for view in work._rows.views.values():
                    view.fill_(torch.nan)
        return runner


WINDOW = BlockGrid(BLOCK, prompt=10, prefix=8, left_blocks=1)
PADDED = BlockGrid(
    BLOCK, prompt=19, prefix=19, prompt_padding=5, full_prompt_attention=True, left_blocks=2
)
ONE_BLOCK = BlockGrid(BLOCK, prompt=8, prefix=8, full_prompt_attention=True)
# For each stream: its grid, and the ends of its chunks; the end of a provisional chunk is negative.
STREAMS: dict[str, list[tuple[BlockGrid, list[int]]]] = {
    "cosyvoice2": [
        (BlockGrid(BLOCK, prompt=20, prefix=16), [16, 24, -29, 40, 43]),
        (BlockGrid(BLOCK), [8, 32, 34]),
        (WINDOW, [8, 24, 40, 48, 55]),
    ],
    "moss_speech": [(BlockGrid(BLOCK, prompt=20, prefix=16), [16, -21, 27]), (WINDOW, [8, 24, 26])],
    "stepaudio2": [(PADDED, [19, 27, -31, 43, 59, 60]), (ONE_BLOCK, [8, -13, 16, 19])],
    "cosyvoice3": [
        (BlockGrid(BLOCK, prompt=20, prefix=16), [16, -29, 40, 41]),
        (BlockGrid(BLOCK), [8, 32, 35]),
    ],
}


class Speaker:
    """Stream that makes its chunks one after the other."""

    def __init__(self, rig: Rig, pool: PrefixCache[Any], kind: str, index: int) -> None:
        self.grid, stops = STREAMS[kind][index]
        self.stops = list(stops)
        self._tokens = np.random.default_rng(index).integers(0, 6561, 100).astype(np.int32)
        self._slot, self._start, self._pool = rig.states.take(), 0, pool
        self._blocks = StreamBlocks(pool, [], self.grid, 0)
        rig.states.clear(self._slot)

    def next_chunk(self) -> PlacedChunk:
        grid, blocks, start = self.grid, self._blocks, self._start
        stop, provisional = abs(self.stops[0]), self.stops.pop(0) < 0
        last = not self.stops
        tokens = self._tokens[start : stop if last else stop + LOOKAHEAD]
        tables = blocks.extend(grid.block_count(start, stop))
        if provisional:
            blocks.retract(len(tables))
        elif stop == grid.prefix:
            self._blocks = StreamBlocks(self._pool, blocks.pages, grid, 0)
        else:
            blocks.forget_unseen()
        self._start = start if provisional else stop
        chunk = TokenChunk(tokens, start, stop, last, provisional=provisional)
        return PlacedChunk.of(chunk, grid, self._slot, tables)


def encoded(rig: Rig, runner: EncoderRunner, kind: str, chosen: list[int]) -> list[torch.Tensor]:
    """Returns the conditions of all chunks of streams, whose next chunks run in one batch."""
    pool: PrefixCache[Any] = PrefixCache(BlockPool(PAGES))
    pool.pool.release([pool.take(3)[1]])  # pages are not in order
    speakers = {index: Speaker(rig, pool, kind, index) for index in chosen}
    outputs: dict[int, list[torch.Tensor]] = {index: [] for index in chosen}
    while running := [index for index in chosen if speakers[index].stops]:
        mus = runner.run([speakers[index].next_chunk() for index in running])
        for index, mu in zip(running, mus, strict=True):
            outputs[index].append(mu)
    return [mu for mus in outputs.values() for mu in mus]


@pytest.mark.parametrize("kind", STREAMS)
def test_blocks_equal_streams_alone(kind: str) -> None:
    flow = a_flow(kind)
    everyone = list(range(len(STREAMS[kind])))
    alone, rig, bucket = Rig.of(flow), Rig.of(flow), Rig.of(flow)
    expected = encoded(alone, alone.streams(), kind, everyone)
    together = encoded(rig, rig.blocks(), kind, everyone)
    prepared = encoded(bucket, bucket.blocks(bucket=True), kind, everyone)
    for one, other, third in zip(expected, together, prepared, strict=True):
        assert one.shape == other.shape == third.shape
        spread = float(one.std())
        torch.testing.assert_close(other, one, atol=CLOSE * spread, rtol=0)
        torch.testing.assert_close(third, other, atol=SAME * spread, rtol=0)


def a_chunk(stream: int, past: int) -> PlacedChunk:
    """Returns a chunk of one block after some pages."""
    pages = list(range(past + 1))
    start = past * BLOCK
    chunk = TokenChunk(np.zeros(BLOCK + LOOKAHEAD, np.int32), start, start + BLOCK, last=False)
    return PlacedChunk.of(chunk, BlockGrid(BLOCK), stream + 1, [pages])


@pytest.mark.parametrize("kind", STREAMS)
def test_launches_do_not_grow_with_the_streams(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks also that captured code neither copies from the host nor waits for the device."""
    meta = torch.device("meta")
    monkeypatch.setattr(
        relative_attention, "relative_attention", lambda queries, *rest: torch.zeros_like(queries)
    )
    rig, counts = Rig.of(a_flow(kind, meta), meta), []
    for streams in (1, 16):
        size = BatchSize(streams, 1, 4)
        rows = rig.states.rows(ENCODER, streams)
        batch = EncoderBatch(size, rig.flow, rig.cache, rig.states, rows, BLOCK)
        # without inference mode, in which these modes do not see the parts of an operator
        mu = batch.mu
        with NothingCopied(), OnDevice(), torch.no_grad():
            batch.compute()
        assert batch.mu is mu  # not a result in the memory that all graphs share
        chunks = [a_chunk(stream, past=stream % 3) for stream in range(streams)]
        with Launches() as launches, torch.no_grad():
            batch.fill(chunks)
            batch.compute()
            batch.take(chunks)
        counts.append(launches.total)
    assert counts[0] == counts[1]

"""The conformer encoder in chunks equals the whole, with and without a window of past blocks."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from token2wav.cache.block_pool import BlockPool, PrefixCache, StreamBlocks
from token2wav.cache.encoder_cache import EncoderCache
from token2wav.config.block_grid import BlockGrid
from token2wav.layers.streaming import StreamStep, state_specs
from token2wav.networks.conformer import Conformer, SequenceAttention

SIZE, LOOKAHEAD, TOKENS, BLOCK, RATIO = 16, 3, 110, 25, 4
ROUNDING = 1e-5

EXACT = BlockGrid(BLOCK)
WINDOW = BlockGrid(BLOCK, prefix=BLOCK, left_blocks=1)


@pytest.fixture(scope="module")
def encoder() -> Conformer:
    torch.manual_seed(1)
    encoder = Conformer(
        SIZE, heads=2, hidden=24, layers=2, up_layers=2, lookahead=LOOKAHEAD, ratio=RATIO
    )
    for layer in (*encoder.encoders, *encoder.up_encoders):
        torch.nn.init.normal_(layer.self_attn.pos_bias_u)
        torch.nn.init.normal_(layer.self_attn.pos_bias_v)
    return encoder.eval().requires_grad_(False)


def chunked(
    encoder: Conformer, x: torch.Tensor, grid: BlockGrid, stops: tuple[int, ...]
) -> torch.Tensor:
    """Encodes one sequence in chunks: first its prefix, then a stream that shares the prefix.

    Its keys and values are in pages that are not in order.
    """
    pool: PrefixCache[Any] = PrefixCache(BlockPool(16))
    pool.pool.release([pool.take(3)[1]])
    blocks = StreamBlocks(pool, [], grid, 0)
    cache = EncoderCache(encoder.key_value_specs, BLOCK, 16, torch.device("cpu"))
    step = StreamStep(
        {layer: torch.zeros(1, *spec.shape) for layer, spec in state_specs(encoder).items()}
    )
    pieces = []
    for start, stop in itertools.pairwise(sorted({0, grid.prefix, *stops})):
        if start and start == grid.prefix:
            blocks = StreamBlocks(pool, blocks.pages, grid, 0)
        last = stop == x.shape[1]
        tables = blocks.extend(grid.block_count(start, stop))
        context = cache.context(
            grid, start, stop - start, tables[0], [table[-1] for table in tables]
        )
        inputs = x[:, start : stop if last else stop + LOOKAHEAD]
        pieces.append(encoder(inputs, SequenceAttention(grid, context), step, last=last))
        if stop > grid.prefix:
            blocks.forget_unseen()
    return torch.cat(pieces, dim=1)


@pytest.mark.parametrize("grid", [EXACT, WINDOW], ids=["exact", "window"])
@pytest.mark.parametrize("stops", [(25, 50, 75, 100, 110), (75, 110), (25, 100, 110)])
def test_chunks_give_the_whole(encoder: Conformer, grid: BlockGrid, stops: tuple[int, ...]) -> None:
    x = torch.randn(1, TOKENS, SIZE)
    whole = encoder(x, SequenceAttention(grid))
    assert whole.shape == (1, RATIO * TOKENS, SIZE)
    torch.testing.assert_close(chunked(encoder, x, grid, stops), whole, atol=ROUNDING, rtol=0)


def test_full_attention_is_another_result(encoder: Conformer) -> None:
    x = torch.randn(1, 60, SIZE)
    assert (
        encoder(x, SequenceAttention(None)) - encoder(x, SequenceAttention(EXACT))
    ).abs().max() > 0.01


def test_a_padded_prompt_is_one_block(encoder: Conformer) -> None:
    """The prompt of 40 tokens begins with 10 positions of padding."""
    x = torch.randn(1, 60, SIZE)
    grid = BlockGrid(BLOCK, prompt=40, prefix=40, prompt_padding=10, full_prompt_attention=True)
    whole = encoder(x, SequenceAttention(grid))
    ahead = encoder.pre_lookahead_layer(x)
    prompt = encoder.encode(ahead[:, :40], SequenceAttention(None))
    torch.testing.assert_close(whole[:, : RATIO * 40], prompt, atol=ROUNDING, rtol=0)
    torch.testing.assert_close(chunked(encoder, x, grid, (40, 60)), whole, atol=ROUNDING, rtol=0)

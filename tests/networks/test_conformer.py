"""The conformer encoder in chunks: what the whole gives, with and without a window, and from a
shared beginning.
"""

from __future__ import annotations

import pytest
import torch

from token2wav.networks.conformer import LOOKBEHIND, RATIO, Conformer, ConformerState
from token2wav.networks.masks import BlockMask

SIZE, LOOKAHEAD, TOKENS = 16, 3, 110
ROUNDING = 1e-5

EXACT = BlockMask(25)
WINDOW = BlockMask(25, left_blocks=1, prefix_blocks=1)


@pytest.fixture(scope="module")
def encoder() -> Conformer:
    torch.manual_seed(1)
    encoder = Conformer(SIZE, heads=2, hidden=24, layers=2, up_layers=2, lookahead=LOOKAHEAD)
    for layer in (*encoder.encoders, *encoder.up_encoders):
        torch.nn.init.normal_(layer.self_attn.pos_bias_u)
        torch.nn.init.normal_(layer.self_attn.pos_bias_v)
    return encoder.eval().requires_grad_(False)


def chunk(
    encoder: Conformer, x: torch.Tensor, mask: BlockMask, state: ConformerState, stop: int
) -> torch.Tensor:
    start, last = state.tokens, stop == x.shape[1]
    left = min(LOOKBEHIND, start)
    window = x[:, start - left : stop + (0 if last else LOOKAHEAD)]
    return encoder(window, mask, state, left=left, last=last)


@pytest.mark.parametrize("mask", [EXACT, WINDOW], ids=["exact", "window"])
@pytest.mark.parametrize("stops", [(25, 50, 75, 100, 110), (75, 110), (25, 100, 110)])
def test_chunks_give_the_whole(encoder: Conformer, mask: BlockMask, stops: tuple[int, ...]) -> None:
    x = torch.randn(2, TOKENS, SIZE)
    whole = encoder(x, mask)
    assert whole.shape == (2, RATIO * TOKENS, SIZE)
    state = ConformerState(encoder, batch=2)
    pieces = [chunk(encoder, x, mask, state, stop) for stop in stops]
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, atol=ROUNDING, rtol=0)


def test_full_attention_is_another_result(encoder: Conformer) -> None:
    x = torch.randn(1, 60, SIZE)
    assert (encoder(x, None) - encoder(x, EXACT)).abs().max() > 0.01


def test_streams_part_from_a_shared_beginning(encoder: Conformer) -> None:
    beginning, ends = torch.randn(1, 50, SIZE), torch.randn(2, 40, SIZE)
    wholes = [torch.cat((beginning, end[None]), dim=1) for end in ends]
    ahead = wholes[0][:, : 50 + LOOKAHEAD].clone()
    for whole in wholes:
        whole[:, 50 : 50 + LOOKAHEAD] = ahead[:, 50:]  # which the beginning sees
    shared = ConformerState(encoder)
    encoder(ahead, EXACT, shared, last=False)
    states = [shared.fork(), shared.fork()]
    for whole, state in zip(wholes, states, strict=True):
        pieces = [chunk(encoder, whole, EXACT, state, stop) for stop in (75, 90)]
        torch.testing.assert_close(
            torch.cat(pieces, dim=1), encoder(whole, EXACT)[:, 100:], atol=ROUNDING, rtol=0
        )
    assert shared.tokens == 50


def test_a_window_bounds_what_is_kept(encoder: Conformer) -> None:
    x, state = torch.randn(1, 250, SIZE), ConformerState(encoder)
    for stop in range(25, 251, 25):
        chunk(encoder, x, WINDOW, state, stop)
    kept = [sum(run.stop - run.start for run in runs) for runs in state.runs]
    assert kept == [50, 50, 100, 100]  # the prefix and one block


def test_blocks_may_begin_before_the_first_token_and_the_first_ones_be_joined(
    encoder: Conformer,
) -> None:
    x, mask = torch.randn(1, 60, SIZE), BlockMask(25, joined_blocks=2)
    state = ConformerState(encoder, start=10)  # so the first 40 tokens are one block
    whole = encoder(x, mask, state)
    joined = encoder.encode(
        encoder.pre_lookahead_layer(encoder.embed(x), left=0, last=True)[:, :40], None, None
    )
    torch.testing.assert_close(whole[:, : RATIO * 40], joined, atol=ROUNDING, rtol=0)
    assert state.tokens == 70

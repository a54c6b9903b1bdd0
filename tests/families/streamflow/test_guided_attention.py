"""Masks of guided attention, and the receptive field that results from the masks of the layers."""

from __future__ import annotations

import pytest
import torch

from tests.families.streamflow.rig import (
    BANDS,
    BLOCK,
    BLOCK_FRAMES,
    Parts,
    flow_config,
    mask_by_hand,
    model_config,
)
from token2wav import ConfigError, StreamConfig
from token2wav.networks.masks import guided_biases, guided_mask
from token2wav.published.sizes import GuidedAttention, Mask
from token2wav.serving.hops import HopSchedule

# Paper: 22 layers, counted from 1.
SR = GuidedAttention.assigned(22, backward=(7, 14), forward=(1,))
LR = GuidedAttention.assigned(22, backward=(7, 14), forward=(1, 22))


@pytest.mark.parametrize("mask", ["block", "backward", "forward"])
@pytest.mark.parametrize("frames", [1, BLOCK_FRAMES, BLOCK_FRAMES + 1, 43])
def test_mask_frame_by_frame(mask: Mask, frames: int) -> None:
    assert torch.equal(guided_mask(mask, frames, BLOCK_FRAMES), mask_by_hand(mask, frames))


def test_reach_of_the_paper() -> None:
    assert (SR.past_blocks, SR.future_blocks) == (2, 1)
    assert (LR.past_blocks, LR.future_blocks) == (2, 2)
    assert [SR.layers[layer - 1] for layer in (1, 2, 7, 14, 22)] == [
        "forward",
        "block",
        "backward",
        "backward",
        "block",
    ]
    assert LR.layers[21] == "forward"


@pytest.mark.parametrize(
    ("backward", "forward"),
    [((), ()), ((2, 4), (1,)), ((2, 4), (1, 5)), ((1,), (2, 3, 4)), ((1, 2, 3, 4, 5), ())],
)
def test_a_changed_frame_reaches_exactly_the_receptive_field(
    backward: tuple[int, ...], forward: tuple[int, ...]
) -> None:
    """A change reaches exactly the furthest block of the receptive field, and no further block."""
    parts = Parts.random(flow_config(backward=backward, forward=forward))
    estimator, guided, blocks, at = parts.flow.estimator, parts.config.guided, 13, 6
    torch.manual_seed(1)
    x, mu, speaker = (
        torch.randn(1, BANDS, blocks * BLOCK_FRAMES),
        torch.randn(1, BANDS, blocks * BLOCK_FRAMES),
        None,
    )
    speaker = torch.randn(1, BANDS)
    rope = estimator.rotary_embed(torch.arange(x.shape[2]))
    biases = guided_biases(guided, x.shape[2], BLOCK_FRAMES)

    def velocity(state: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            conditions = estimator.project_conditions(mu, speaker, None)
            return estimator.velocity(
                state, conditions, parts.solver.tables.modulation[1], biases, rope=rope
            )

    for frame in (at * BLOCK_FRAMES, (at + 1) * BLOCK_FRAMES - 1):
        changed = x.clone()
        changed[:, :, frame] += 1
        difference = (
            (velocity(changed) - velocity(x))
            .abs()[0]
            .amax(0)
            .unflatten(0, (blocks, BLOCK_FRAMES))
            .amax(1)
        )
        reached = [block for block in range(blocks) if difference[block] > 0]
        assert reached == list(range(at - guided.future_blocks, at + guided.past_blocks + 1))


def test_hops_and_look_ahead_follow_from_the_assignment() -> None:
    for forward, future in (((), 0), ((1,), 1), ((1, 5), 2)):
        config = flow_config(forward=forward)
        assert (config.past_tokens, config.lookahead_tokens) == (2 * BLOCK, future * BLOCK)
        assert HopSchedule.of(StreamConfig(), model_config(config)) == HopSchedule(
            2 * BLOCK,
            2 * BLOCK,
            BLOCK,
            provisional_lookahead=max(
                1, min(future * BLOCK, StreamConfig().provisional_lookahead_tokens)
            ),
            adaptive=False,
        )


@pytest.mark.parametrize(
    ("stream", "words"),
    [
        (
            StreamConfig(left_blocks=3),
            "stream.left_blocks: 3 cannot be combined with guided attention",
        ),
        (
            StreamConfig(reference=True),
            "stream.reference: True cannot be combined with guided attention",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(stream: StreamConfig, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        model_config(flow_config()).check(stream)

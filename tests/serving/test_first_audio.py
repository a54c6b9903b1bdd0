"""Mel of provisional chunks: missing look-ahead, and fewer ODE steps.

`tests/families/test_streams.py` tests that later blocks keep no trace of them.
"""

from __future__ import annotations

import numpy as np
import torch

from testkit.utterances import a_voice, off, some_tokens
from tests.stages.rig import MEL, Parts
from token2wav.config.token_format import NO_TOKEN
from token2wav.networks.masks import attention_bias
from token2wav.networks.ode import OdeTables
from token2wav.stages.stage import TokenChunk

LOOKAHEAD = 3
BLOCK = 25


def test_missing_lookahead_is_silent_as_after_the_end() -> None:
    """A provisional chunk without any look-ahead has the mel of an utterance that ends there."""
    engine, tokens = Parts.load().incremental(), some_tokens(10)
    absent = np.full(LOOKAHEAD, NO_TOKEN, np.int32)
    early = TokenChunk(np.concatenate((tokens, absent)), 0, 10, last=False, provisional=True)
    handle = engine.open(a_voice(0))
    [mel] = engine.advance([(handle, early)])
    [ended] = engine.advance([(handle, TokenChunk(tokens, 0, 10, last=True))])
    engine.close(handle)
    assert off(mel.numpy(), ended.numpy()) <= MEL


def test_fewer_steps_see_the_past_at_their_own_times() -> None:
    """A provisional chunk of 3 ODE steps equals the solver with 3 of the 10 times, beside the past
    that the solver with all times has at these times.
    """
    parts, tokens, voice = Parts.load(10), some_tokens(BLOCK + 8 + LOOKAHEAD), a_voice(0)
    engine = parts.incremental(provisional_steps=3)
    handle = engine.open(voice)
    [past] = engine.advance(
        [(handle, TokenChunk(tokens[: BLOCK + LOOKAHEAD], 0, BLOCK, last=False))]
    )
    late = TokenChunk(tokens[BLOCK:], BLOCK, BLOCK + 8, last=False, provisional=True)
    [mel] = engine.advance([(handle, late)])
    engine.close(handle)

    estimator, frames, count = parts.flow.estimator, 2 * BLOCK, 2 * (BLOCK + 8)
    solver, early = parts.solver.tables, OdeTables.of(parts.flow.estimator, 10, 0.7, evaluated=3)
    assert early.stored_steps == [0, 3, 7]
    with torch.inference_mode():
        mu = parts.flow.mu(torch.from_numpy(tokens)[None])[:, :, :count]
        speaker = parts.flow.speaker(torch.tensor(voice.speaker_embedding))[None]
        conditions = estimator.project_conditions(*solver.guided(mu, speaker, torch.zeros_like(mu)))
        grid = parts.config.grid(0).scaled(2)
        positions = torch.arange(count)
        bias, rope = attention_bias(grid.allows(positions, positions)), estimator.rope(positions)

        def advanced(tables: OdeTables, step: int, x: torch.Tensor) -> torch.Tensor:
            modulation = tables.modulation[step]
            velocity = estimator.velocity(tables.rows(x), conditions, modulation, bias, rope=rope)
            return tables.advance(step, x, velocity)

        whole = partial_x = parts.flow_noise.window(0, count)[None]
        for step in range(10):
            if step in early.stored_steps:
                mixed = torch.cat((whole[..., :frames], partial_x[..., frames:]), dim=2)
                partial_x = advanced(early, early.stored_steps.index(step), mixed)
            whole = advanced(solver, step, whole)
    assert off(past.numpy(), whole[0, :, :frames].numpy()) <= MEL
    assert off(mel.numpy(), partial_x[0, :, frames:].numpy()) <= MEL

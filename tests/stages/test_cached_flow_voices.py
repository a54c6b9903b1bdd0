"""The work for a prompt is done once per voice."""

from __future__ import annotations

from dataclasses import replace

import pytest

from testkit.batches import WHOLE_BLOCKS, spoken_together
from testkit.models.golden import TINY, snr_db
from testkit.utterances import a_voice, off, some_tokens
from tests.stages.rig import MEL, RESERVED, CountingSolver, Parts, flow_mel
from token2wav import Token2Wav, Voice

PREFILLED = 128  # tokens: 5 blocks and their look-ahead; more than are computed at once
SNR_DB = 40  # because F0 turns rounding of the mel into phase


def test_second_stream_of_a_voice_computes_nothing_of_it(parts: Parts) -> None:
    solver = CountingSolver()
    engine = parts.incremental(solver=solver)
    first = engine.open(a_voice(PREFILLED))
    assert (engine.prefixes.computed, solver.calls) == (1, 2)
    used = engine.pool.used
    engine.close(engine.open(a_voice(PREFILLED)))
    engine.close(first)
    engine.close(engine.open(a_voice(PREFILLED)))
    assert (engine.prefixes.computed, solver.calls) == (1, 2)
    assert used == 5 + RESERVED


@pytest.mark.parametrize("changed", ["prompt_tokens", "prompt_mel", "speaker_embedding"])
def test_voices_that_differ_anywhere_are_not_shared(parts: Parts, changed: str) -> None:
    engine = parts.incremental()
    arrays = {
        name: getattr(a_voice(28), name).copy()
        for name in ("prompt_tokens", "prompt_mel", "speaker_embedding")
    }
    arrays[changed].flat[-1] += 1 if arrays[changed].flat[-1] < 1 else -1
    other = Voice(**arrays)
    for voice in (a_voice(28), other):
        mel = flow_mel(parts, engine, [some_tokens(30)], voice)
        assert off(mel, parts.whole(some_tokens(30), voice)) <= MEL
    assert engine.prefixes.computed == 2


def test_numbers_of_steps_share_no_prompt() -> None:
    """The states of a prompt are those of its ODE steps, also in a batch of several numbers."""
    model = Token2Wav.load(TINY, stream=replace(WHOLE_BLOCKS, steps=(4, 2)))
    voice, tokens = a_voice(PREFILLED), some_tokens(30)
    utterances = [(voice, tokens, steps) for steps in (4, 2, 4)]
    for (_, _, steps), audio in zip(
        utterances, spoken_together(model.pipeline, utterances), strict=True
    ):
        assert snr_db(audio, model.vocode(model.mel(tokens, voice, steps=steps))) > SNR_DB

"""Pauses of speech beside the limits that end a stream: what they must not cut, and what they end.

`lab.quality.quality --only pauses` runs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lab.quality.recogniser import Signal
from token2wav import Token2Wav, UtteranceOptions, Voice
from token2wav.config.model_config import ModelConfig
from token2wav.serving.end_limits import audible, window_samples

# Recommended limits in seconds. The number of tokens is this time at the token rate of a model.
REPEATS_S, SILENCE_S = 2.0, 3.0
_LOOPS = 6  # sentences that become made-up token streams
_LOOP_S = 20.0  # of such a stream, after the half of its sentence

Tokens = NDArray[np.int32]


@dataclass(frozen=True)
class LoopEnd:
    """End of made-up token streams: halves of sentences, each of which is followed by a loop.

    Attributes:
        after_s: longest time from the start of the loop to the end of the audio, in seconds, with
            both recommended limits.
        reasons: streams that each limit has ended.
        silence_only: streams that end with the limit on silence alone.
    """

    after_s: float
    reasons: dict[str, int]
    silence_only: int


def longest_run(tokens: Tokens) -> int:
    """Returns the largest number of equal tokens in a row; tokens are (n,) or (n, codebooks)."""
    rows = tokens.reshape(len(tokens), -1)
    changes = np.flatnonzero((rows[1:] != rows[:-1]).any(axis=1)) + 1
    return int(np.diff([0, *changes, len(tokens)]).max())


def longest_pause_s(audio: Signal, sample_rate: int) -> float:
    """Returns the longest silence between the first and the last sound, in seconds."""
    window = window_samples(sample_rate)
    sounds = np.flatnonzero(audible(np.float32(audio), window))
    return float((np.diff(sounds).max() - 1) * window / sample_rate) if len(sounds) > 1 else 0.0


def repeats(config: ModelConfig) -> int:
    """Returns the recommended `end_after_repeats` of a model."""
    return round(REPEATS_S * config.token_frame_rate)


def measure(
    model: Token2Wav,
    voice: Voice | None,
    recordings: Sequence[Signal],
    tokens: Sequence[Tokens],
    quiet: Tokens,
) -> dict[str, Any]:
    """Measures sentences, and made-up token streams that begin as these sentences.

    Args:
        recordings: recordings of the sentences, at the sample rate of the model.
        tokens: tokens of the recordings.
        quiet: tokens of a recording of digital silence, at least 20 s.
    """
    rate, config = model.config.sample_rate, model.config
    spoken = [model.synthesize(sentence, voice) for sentence in tokens]
    cut = UtteranceOptions(end_after_repeats=repeats(config), end_after_silence_s=SILENCE_S)
    # A loop may begin anywhere in a sentence.
    half = [sentence[: len(sentence) // 2] for sentence in tokens[:_LOOPS]]
    loops = {
        "the last token, repeated": [sentence[-1:] for sentence in half],
        "the last two tokens, in turn": [sentence[-2:] for sentence in half],
        "the last second, again and again": [
            sentence[-round(config.token_frame_rate) :] for sentence in half
        ],
        "a token of silence, repeated": [quiet[len(quiet) // 2 :][:1]] * len(half),
        "tokens of silence": [quiet] * len(half),
    }
    return {
        "sentences": len(tokens),
        "seconds": round(sum(len(audio) for audio in recordings) / rate, 1),
        "longest_run_of_equal_tokens": max(map(longest_run, tokens)),
        "longest_pause_of_recordings_s": round(
            max(longest_pause_s(audio, rate) for audio in recordings), 2
        ),
        "longest_pause_of_speech_s": round(
            max(longest_pause_s(audio, rate) for audio in spoken), 2
        ),
        "sentences_cut_by_the_limits": sum(
            len(model.synthesize(sentence, voice, cut)) != len(audio)
            for sentence, audio in zip(tokens, spoken, strict=True)
        ),
        "limits": {"end_after_repeats": repeats(config), "end_after_silence_s": SILENCE_S},
        "loops": {
            name: asdict(_loop_end(model, voice, half, units)) for name, units in loops.items()
        },
    }


def _loop_end(
    model: Token2Wav, voice: Voice | None, starts: Sequence[Tokens], units: Sequence[Tokens]
) -> LoopEnd:
    config, after, reasons, silence_only = model.config, [], list[str](), 0
    count = round(_LOOP_S * config.token_frame_rate)
    both = UtteranceOptions(end_after_repeats=repeats(config), end_after_silence_s=SILENCE_S)
    silence = UtteranceOptions(end_after_silence_s=SILENCE_S)
    for start, unit in zip(starts, units, strict=True):
        loop = np.concatenate((start, np.resize(unit, (count, *unit.shape[1:]))))
        for options in (both, silence):
            with model.stream(voice, options) as stream:
                chunks = stream.finish(loop)
            reason = chunks[-1].end_reason
            if options is both:
                seconds = sum(chunk.duration_s for chunk in chunks)
                after.append(seconds - len(start) / config.token_frame_rate)
                reasons.append(reason.value if reason else "none")
            else:
                silence_only += reason is not None
    counts = {reason: reasons.count(reason) for reason in sorted(set(reasons))}
    return LoopEnd(round(max(after), 2), counts, silence_only)

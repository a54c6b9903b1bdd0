"""Options of an utterance, which pass from a client to the pipeline as one value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from token2wav.config import MOST_REPEATS, MOST_SILENCE_S
from token2wav.config.values import shown
from token2wav.errors import InputError
from token2wav.serving.audio_output import AudioFormat
from token2wav.serving.tempo import exact_speed


@dataclass(frozen=True)
class UtteranceOptions:
    """Options of one utterance.

    Attributes:
        steps: ODE steps, one of `StreamConfig.steps`; 0 for the default.
        decoder_noise: whether the decoder adds its noise, for models with noise (SNAC); None for
            `StreamConfig.decoder_noise`.
        delays: delay of every codebook in tokens, for tokens in a delay pattern; the first is 0.
            Codes beyond the vocabulary are then marks of start and end. None for aligned codes.
        audio_format: encoding and sample rate of the audio; by default float32 at the rate of the
            model.
        end_after_repeats: equal tokens in a row that end the stream, 2 or more; 0 for no limit;
            None for `StreamConfig.end_after_repeats`.
        end_after_silence_s: seconds of audio below -50 dBFS that end the stream; 0 for no limit;
            None for `StreamConfig.end_after_silence_s`.
        speed: tempo of the speech, 0.5 to 2, for models with a mel between flow and vocoder. With
            1.25 the audio has 4/5 of its usual length, at the same pitch.

    Raises:
        InputError: `end_after_repeats`, `end_after_silence_s` or `speed` is out of bounds.
    """

    steps: int = 0
    decoder_noise: bool | None = None
    delays: Sequence[int] | None = None
    audio_format: AudioFormat = field(default_factory=AudioFormat)
    end_after_repeats: int | None = None
    end_after_silence_s: float | None = None
    speed: float = 1.0

    def __post_init__(self) -> None:
        repeats, seconds = self.end_after_repeats, self.end_after_silence_s
        if repeats is not None and (
            type(repeats) is not int or repeats == 1 or not 0 <= repeats <= MOST_REPEATS
        ):
            raise InputError(
                "end_after_repeats",
                f"{shown(repeats)} is not 0 or an integer from 2 to {MOST_REPEATS}",
            )
        if seconds is not None and (
            type(seconds) not in (int, float) or not 0 <= seconds <= MOST_SILENCE_S
        ):
            raise InputError(
                "end_after_silence_s",
                f"{shown(seconds)} is not a number from 0 to {MOST_SILENCE_S:g}",
            )
        exact_speed(self.speed)


DEFAULTS = UtteranceOptions()

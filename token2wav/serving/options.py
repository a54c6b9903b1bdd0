"""Options of an utterance, which pass from a client to the pipeline as one value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from token2wav.serving.audio_output import AudioFormat


@dataclass(frozen=True)
class UtteranceOptions:
    """Options of one utterance.

    Attributes:
        steps: ODE steps, one of `StreamConfig.steps`; 0 for the default.
        decoder_noise: whether the decoder adds its noise, for models with noise (SNAC); None for
            `StreamConfig.decoder_noise`.
        delays: delay of every codebook in tokens, for tokens in a delay pattern; the first is 0.
            Codes beyond the vocabulary are then marks of start and end. None for aligned codes.
        audio_format: format of the audio that a server sends. The library returns float32 at the
            rate of the model.
    """

    steps: int = 0
    decoder_noise: bool | None = None
    delays: Sequence[int] | None = None
    audio_format: AudioFormat = field(default_factory=AudioFormat)


DEFAULTS = UtteranceOptions()

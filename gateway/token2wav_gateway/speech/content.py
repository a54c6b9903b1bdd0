"""Content and events of a turn: a text or codes go in, audio and words come out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from token2wav_client import ClientVoice
from token2wav_gateway.speech.growing_text import GrowingText
from token2wav_gateway.voices.voice_folder import Voice


@dataclass(frozen=True)
class Text:
    """Text to say.

    Attributes:
        growing: the text as it goes on, for a language model that takes it so; None for a text that
            has ended.
        instructions: how to say the text; None for the default of the template.
        sampling: fields of the request to the language model that replace those of the template.
        speed: tempo of the speech, 0.5 to 2.
        language: English name of the language, or its code, for templates with `{language}`.
        pronunciations: spellings of words, beside those of the settings.
    """

    text: str
    voice: Voice
    instructions: str | None = None
    sampling: Mapping[str, float] = field(default_factory=dict)
    speed: float = 1.0
    growing: GrowingText | None = None
    language: str = "Auto"
    pronunciations: Mapping[str, str] = field(default_factory=dict)

    @property
    def characters(self) -> int:
        """Characters that have arrived."""
        return len(self.text if self.growing is None else self.growing.text)


@dataclass(frozen=True)
class Codes:
    """Speech tokens, or codes of a codec, which need no language model.

    Attributes:
        codes: list of tokens, or list of frames with a code for each codebook.
        voice: voice as the speech server takes it; None for a model without voices.
    """

    codes: list[int] | list[list[int]]
    voice: ClientVoice | None
    speed: float = 1.0


@dataclass(frozen=True)
class Started:
    """First event of a turn, when its first audio has arrived."""


@dataclass(frozen=True)
class Audio:
    """Audio of a turn.

    Attributes:
        content: bytes of the format; never empty.
        samples: samples of a channel from the start of the turn to the end of the content. An
            encoder may keep some of them.
        tokens: speech tokens that these samples cover.
    """

    content: bytes
    samples: int
    tokens: int


@dataclass(frozen=True)
class Words:
    """Times of the next words of a turn, as soon as they are certain.

    Attributes:
        times: words with their times, as `Word.fields`; None if the other words are unknown.
        segments: after the audio, the whole text with its time; else empty.
    """

    times: list[dict[str, Any]] | None
    segments: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Ended:
    """Last event of a turn.

    Attributes:
        reason: limit that cut the speech off: `length` of the language model, or `repeats` or
            `silence` of the speech server; None if none did.
        usage: OpenAI's usage. Text is counted in characters.
    """

    reason: str | None
    usage: dict[str, int]

    @property
    def fields(self) -> dict[str, str]:
        """Field `end_reason` of a last message; {} if no limit has cut the speech off."""
        return {} if self.reason is None else {"end_reason": self.reason}


Event: TypeAlias = Started | Audio | Words | Ended

"""Progress of a text: its tokens, the audio that its client has been sent, and its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from token2wav_client import AudioChunk
from token2wav_client.audio import EndReason


@dataclass
class Progress:
    """Progress of a text.

    Attributes:
        tokens: speech tokens that the language model has sent.
        samples: samples that the client has been sent.
        spoken_tokens: speech tokens that these samples cover.
        end_reason: limit that cut the text off: `length` of the language model, or `repeats` or
            `silence` of the speech server; None if none did. It is known after the last chunk.
    """

    tokens: int = 0
    samples: int = 0
    spoken_tokens: int = 0
    end_reason: EndReason | Literal["length"] | None = None

    def advance(self, chunk: AudioChunk) -> None:
        """Counts a chunk that is sent to the client."""
        self.samples += len(chunk.audio)
        self.spoken_tokens = chunk.first_token + chunk.token_count

    @property
    def end(self) -> dict[str, str]:
        """Field `end_reason` of a last event; {} if no limit has cut the text off."""
        return {} if self.end_reason is None else {"end_reason": self.end_reason}

    def usage(self, characters: int) -> dict[str, int]:
        """Returns OpenAI's usage of a text, which is counted in characters."""
        return {
            "input_tokens": characters,
            "output_tokens": self.tokens,
            "total_tokens": characters + self.tokens,
        }

"""Text front end of the demo: it replaces a speech language model.

The piper voice, from which the demo voice was made, reads a sentence aloud. The tokenizer of the
demo turns this recording into tokens.
"""

from __future__ import annotations

from pathlib import Path

from token2wav_client import TokenError
from token2wav_server.demo import MODEL
from token2wav_server.demo.speaker import RATE_HZ, TOKEN_SAMPLES, Speaker
from token2wav_voice import FrontEnd, Recording
from token2wav_voice.recording import MAX_SECONDS

MAX_CHARACTERS = 300


class TextFrontEnd:
    """Text front end: reads a sentence aloud, and turns the recording into tokens."""

    def __init__(self) -> None:
        self._speaker = Speaker(seed=0)
        self._listener = FrontEnd(MODEL)

    def tokens(self, sentence: str) -> list[int]:
        """Turns a sentence into tokens.

        Raises:
            TokenError: the sentence has no words, or too many.
        """
        if not any(character.isalnum() for character in sentence):
            raise TokenError("sentence: 0 words; at least 1 is needed")
        if len(sentence) > MAX_CHARACTERS:
            raise TokenError(
                f"sentence: {len(sentence)} characters; at most {MAX_CHARACTERS} are allowed"
            )
        speech = self._speaker.say(sentence, vary=False)
        seconds = len(speech) / RATE_HZ
        if not TOKEN_SAMPLES / RATE_HZ <= seconds <= MAX_SECONDS:
            raise TokenError(
                f"sentence: {seconds:.0f} s of speech; must be more than 0 and at most "
                f"{MAX_SECONDS:g} s"
            )
        tokens: list[int] = self._listener.tokens(
            Recording(Path("sentence"), speech, RATE_HZ, 1, 0.0)
        ).tolist()
        return tokens

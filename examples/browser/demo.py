"""Demo page: the demo voice speaks the sentences that a person types, through a real Triton server.

    python -m examples.browser.demo

The piper voice, from which the demo voice was made, reads the sentence aloud. The tokenizer of the
demo turns this recording into tokens. Together they replace a speech language model.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from contextlib import nullcontext
from pathlib import Path

from examples.browser.bridge import Bridge
from examples.commands import serving
from examples.demo import MODEL, PROMPT
from examples.demo_voice.speech import RATE_HZ, TOKEN_SAMPLES, Speaker
from examples.demo_voice.text import UNSEEN, held_out
from token2wav_client import AsyncClient, ClientError, ClientVoice, TokenError
from token2wav_server import ServerError
from token2wav_voice import FrontEnd, FrontEndError, Recording
from token2wav_voice.recording import MAX_SECONDS

OFFERED = 4  # sentences
MAX_CHARACTERS = 300


class TextFrontEnd:
    """Text front end: reads a sentence aloud, and turns the recording into tokens."""

    def __init__(self) -> None:
        self._speaker = Speaker(seed=0)
        self._listener = FrontEnd(MODEL)

    def voice(self) -> ClientVoice:
        """Computes the demo's voice."""
        prompt = self._listener.voice(Recording.load(PROMPT))
        return ClientVoice(prompt.prompt_tokens, prompt.prompt_mel, prompt.speaker_embedding)

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


async def run(url: str, port: int) -> None:
    """Serves the page until it is stopped."""
    front_end = TextFrontEnd()
    async with AsyncClient(url, retries=3) as client:
        await Bridge(client, front_end.voice(), held_out(UNSEEN)[:OFFERED], front_end.tokens).serve(
            port
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve a page that speaks the text that you type.")
    parser.add_argument(
        "--url",
        help="gRPC address of a server with the demo voice (default: a new server is started)",
    )
    parser.add_argument(
        "--port", type=int, default=8080, help="port of the page (default: %(default)s)"
    )
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("page: terminated"))
    try:
        with nullcontext() if options.url else serving(MODEL) as url:
            asyncio.run(run(url or options.url, options.port))
    except (ClientError, FrontEndError, ServerError, OSError) as error:
        sys.exit(f"page: {error}")
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()

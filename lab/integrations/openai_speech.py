"""Speech of the gateway with the package `openai`, with and without asyncio.

python openai_speech.py http://127.0.0.1:8080/v1 "Hello." speech.wav
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from openai import AsyncOpenAI, OpenAI


def save(base_url: str, text: str, out: Path) -> None:
    """Writes the speech to a file while it arrives."""
    client = OpenAI(base_url=base_url, api_key="none")
    with client.audio.speech.with_streaming_response.create(
        model="gpt-4o-mini-tts", voice="alloy", input=text, response_format="wav"
    ) as response:
        response.stream_to_file(out)


async def length_of(base_url: str, text: str) -> int:
    """Returns the number of samples of the speech, which asyncio reads."""
    client = AsyncOpenAI(base_url=base_url, api_key="none")
    async with client.audio.speech.with_streaming_response.create(
        model="gpt-4o-mini-tts", voice="alloy", input=text, response_format="pcm"
    ) as response:
        return sum([len(piece) async for piece in response.iter_bytes()]) // 2


if __name__ == "__main__":
    base_url, text, out = sys.argv[1:]
    save(base_url, text, Path(out))
    print(f"{asyncio.run(length_of(base_url, text))} samples with asyncio")

"""Speech of the gateway with LiveKit's plug-in for OpenAI.

python livekit_speech.py http://127.0.0.1:8080/v1 "Hello." speech.wav
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from livekit.agents import utils
from livekit.plugins import openai


async def save(base_url: str, text: str, out: Path) -> None:
    """Synthesizes a text, and writes the speech to a file."""
    async with utils.http_context.open():
        speaker = openai.TTS(base_url=base_url, api_key="none")
        async with speaker.synthesize(text) as stream:
            frame = await stream.collect()
        await speaker.aclose()
    out.write_bytes(frame.to_wav_bytes())


if __name__ == "__main__":
    base_url, text, out = sys.argv[1:]
    asyncio.run(save(base_url, text, Path(out)))

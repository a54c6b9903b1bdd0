"""Speech of the gateway with LiveKit's plug-in for OpenAI.

python livekit_speech.py --base-url http://127.0.0.1:8080/v1 --text "Hello." --out speech.wav
"""

from __future__ import annotations

import argparse
import asyncio
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


def main() -> None:
    """Runs the example."""
    parser = argparse.ArgumentParser(description="Speak a text with LiveKit.")
    parser.add_argument("--base-url", default="http://127.0.0.1:8080/v1")
    parser.add_argument("--text", required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    asyncio.run(save(options.base_url, options.text, options.out))


if __name__ == "__main__":
    main()

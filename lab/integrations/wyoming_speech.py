"""Speech of the gateway for Home Assistant, through the proxy `wyoming_openai`.

python wyoming_speech.py http://127.0.0.1:8080/v1 "Hello." speech.wav

The program does what Home Assistant does: it asks the proxy for its voices, and then sends the text
word by word, as a chat model writes it.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import wave
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from wyoming.audio import AudioChunk, AudioStart, AudioStop
from wyoming.client import AsyncClient
from wyoming.info import Describe, Info
from wyoming.tts import (
    SynthesizeChunk,
    SynthesizeStart,
    SynthesizeStop,
    SynthesizeStopped,
    SynthesizeVoice,
)

_START_S = 30.0


@contextmanager
def proxy(base_url: str) -> Iterator[str]:
    """Runs the proxy in front of a gateway, and yields its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    uri = f"tcp://127.0.0.1:{port}"
    command = [sys.executable, "-m", "wyoming_openai", "--uri", uri, "--languages", "en"]
    command += ["--tts-openai-url", base_url, "--tts-openai-key", "none"]
    # With --tts-streaming-models, the proxy asks for each sentence as soon as it is complete.
    command += ["--tts-models", "tts-1", "--tts-streaming-models", "tts-1", "--tts-voices", "alloy"]
    process = subprocess.Popen(command)
    try:
        yield uri
    finally:
        process.terminate()
        process.wait()


async def connected(uri: str) -> AsyncClient:
    """Returns a client that is connected to the proxy, which needs some seconds to start."""
    deadline = asyncio.get_running_loop().time() + _START_S
    while True:
        client = AsyncClient.from_uri(uri)
        try:
            await client.connect()
            return client
        except OSError:
            if asyncio.get_running_loop().time() > deadline:
                raise
            await asyncio.sleep(0.2)


async def save(uri: str, text: str, out: Path) -> None:
    """Sends a text in pieces, and writes the speech to a file."""
    client = await connected(uri)
    await client.write_event(Describe().event())
    while (event := await client.read_event()) is not None and not Info.is_type(event.type):
        pass
    assert event is not None
    [program] = Info.from_event(event).tts
    voice = program.voices[0]
    print(f"voice {voice.name}, text in pieces: {program.supports_synthesize_streaming}")
    await client.write_event(SynthesizeStart(voice=SynthesizeVoice(name=voice.name)).event())
    for word in text.split(" "):
        await client.write_event(SynthesizeChunk(text=f"{word} ").event())
    await client.write_event(SynthesizeStop().event())
    with wave.open(str(out), "wb") as file:
        while (event := await client.read_event()) is not None:
            if AudioStart.is_type(event.type):
                start = AudioStart.from_event(event)
                if not file.getnframes():
                    file.setnchannels(start.channels)
                    file.setsampwidth(start.width)
                    file.setframerate(start.rate)
            elif AudioChunk.is_type(event.type):
                file.writeframes(AudioChunk.from_event(event).audio)
            elif SynthesizeStopped.is_type(event.type):
                break
            elif not AudioStop.is_type(event.type):
                raise RuntimeError(f"the proxy sent {event.type}: {event.data}")
    await client.disconnect()


if __name__ == "__main__":
    base_url, text, out = sys.argv[1:]
    with proxy(base_url) as uri:
        asyncio.run(save(uri, text, Path(out)))

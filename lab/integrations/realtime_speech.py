"""Speech of the gateway with the Realtime client of the package `openai`.

python realtime_speech.py http://127.0.0.1:8080/v1 "Hello." speech.wav
"""

from __future__ import annotations

import base64
import sys
import wave
from pathlib import Path
from typing import Any

from openai import OpenAI
from openai.resources.realtime.realtime import RealtimeConnection

RATE_HZ = 24_000


def say(connection: RealtimeConnection, text: str) -> None:
    """Asks for the speech of a text."""
    content: Any = [{"type": "input_text", "text": text}]
    connection.conversation.item.create(
        item={"type": "message", "role": "user", "content": content}
    )
    connection.response.create()


def hear(connection: RealtimeConnection, *, interrupt: bool = False) -> tuple[bytes, str]:
    """Returns the audio and the status of a response, which the listener may interrupt."""
    audio = b""
    for event in connection:
        if event.type == "response.output_audio.delta":
            audio += base64.b64decode(event.delta)
            if interrupt:
                connection.response.cancel()
                interrupt = False
        elif event.type == "error":
            sys.exit(event.error.message)
        elif event.type == "response.done":
            return audio, str(event.response.status)
    sys.exit("the connection has ended")


if __name__ == "__main__":
    base_url, text, out = sys.argv[1:]
    client = OpenAI(base_url=base_url, api_key="none")
    with client.realtime.connect(model="gpt-realtime") as connection:
        say(connection, text)
        audio, status = hear(connection, interrupt=True)
        if status != "cancelled":
            sys.exit(f"an interrupted response is {status}")
        say(connection, text)
        speech, status = hear(connection)
        if status != "completed":
            sys.exit(f"the response is {status}")
    with wave.open(str(Path(out)), "wb") as file:
        file.setparams((1, 2, RATE_HZ, 0, "NONE", ""))
        file.writeframes(speech)
    print(f"interrupted after {len(audio) // 2 / RATE_HZ:.1f} s")

"""Text in, speech out: starts a Triton server with the demo voice, a language model and a gateway.

    python -m examples.speech.demo

Then open the page of the gateway, or send text with curl, with the package `openai` or over a
WebSocket.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI

from examples.commands import running, serving
from examples.demo import MODEL, OUT
from examples.demo_voice.recordings import PROMPT, PROMPT_TEXT
from examples.speech import language_model
from examples.speech.text_front_end import TextFrontEnd
from token2wav_gateway.settings import Settings
from token2wav_gateway.voices.voice_folder import VoiceFolder
from token2wav_server import ServerError

TEMPLATE = Path(__file__).with_name("template.yaml")
VOICE = "joe"
_POLL_S = 0.1


def settings(grpc_url: str, language_model_port: int, voices: Path) -> dict[str, Any]:
    """Returns the settings of the demo's gateway."""
    return {
        "language_model": {
            "url": f"http://127.0.0.1:{language_model_port}/v1",
            "model": language_model.MODEL,
            "template": str(TEMPLATE),
        },
        "speech_server": {"url": grpc_url},
        "voices": {"folder": str(voices.resolve()), "model": str(MODEL), "default": VOICE},
        "aligner": {"name": "pocketsphinx"},
        "log_level": "warning",
    }


def listen(option: str, port: int) -> socket.socket:
    """Opens a port. Connections wait until an application serves the port."""
    try:
        return socket.create_server(("127.0.0.1", port))
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        sys.exit(f"speech: port {port}: {reason}; choose another one with {option}")


async def serve(app: FastAPI, listener: socket.socket) -> None:
    """Serves an application until the task is cancelled."""
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1)
    await uvicorn.Server(config).serve(sockets=[listener])


async def make_voice(chosen: dict[str, Any]) -> None:
    """Makes the demo voice in the folder of the gateway, unless it is there."""
    voices = VoiceFolder(Settings.model_validate(chosen).voices)
    if VOICE not in voices.names():
        await voices.create(VOICE, PROMPT_TEXT, PROMPT.read_bytes())


async def run(
    gateway: subprocess.Popen[str], port: int, listener: socket.socket, pace: float
) -> None:
    """Serves the language model until it is stopped, and says when the gateway is ready."""
    app = language_model.create_app(TextFrontEnd().tokens, pace)
    server = asyncio.create_task(serve(app, listener))
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
            break
        except OSError:
            if gateway.poll() is not None:
                raise ServerError("the gateway did not start, see above") from None
            await asyncio.sleep(_POLL_S)
    print(
        f"speech: ready; open http://127.0.0.1:{port}/ in a browser, or try:\n"
        f"  curl http://127.0.0.1:{port}/v1/audio/speech -H 'Content-Type: application/json' "
        f'-d \'{{"voice": "{VOICE}", "response_format": "wav", '
        '"stream": false, "input": "The first boats were coming home."}\' -o out/gateway.wav',
        flush=True,
    )
    await server


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Speak the text that clients of OpenAI's API send."
    )
    parser.add_argument(
        "--port", type=int, default=8080, help="port of the gateway (default: %(default)s)"
    )
    parser.add_argument(
        "--language-model-port",
        type=int,
        default=9000,
        help="port of the language model (default: %(default)s)",
    )
    parser.add_argument(
        "--riva-port",
        type=int,
        default=0,
        help="port of the gateway for clients of Riva (default: 0, none)",
    )
    parser.add_argument(
        "--tokens-per-second",
        type=float,
        default=50.0,
        help="pace of the language model (default: %(default)s)",
    )
    parser.add_argument(
        "--voices",
        type=Path,
        default=OUT / "voices",
        metavar="FOLDER",
        help="folder of the gateway's voices (default: out/voices)",
    )
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("speech: terminated"))
    listen("--port", options.port).close()  # checked before a server starts
    listener = listen("--language-model-port", options.language_model_port)
    OUT.mkdir(exist_ok=True)
    try:
        with (
            serving(MODEL) as url,
            tempfile.TemporaryDirectory(prefix="speech-", dir=OUT) as folder,
        ):
            chosen = settings(url, options.language_model_port, options.voices)
            config = Path(folder) / "gateway.yaml"
            config.write_text(json.dumps(chosen, indent=1))  # YAML contains JSON
            asyncio.run(make_voice(chosen))
            words = ["token2wav", "gateway", "--config", config, "--port", options.port]
            words += ["--riva-port", options.riva_port]
            with running(words) as gateway:
                asyncio.run(run(gateway, options.port, listener, options.tokens_per_second))
    except (ServerError, OSError) as error:
        sys.exit(f"speech: {error}")
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()

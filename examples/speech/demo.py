"""Text in, speech out: starts a Triton server with the demo voice, a language model and a gateway.

    python -m examples.speech.demo

Then send text with curl, with the package `openai` or over a WebSocket.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import sys
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from examples.browser.demo import TextFrontEnd
from examples.demo import MODEL, OUT, PROMPT
from examples.demo_voice.recordings import PROMPT_TEXT
from examples.speech import language_model
from token2wav_gateway.app import create_app
from token2wav_gateway.errors import GatewayError
from token2wav_gateway.metrics import Metrics
from token2wav_gateway.server import BoundedConfig, DrainingServer
from token2wav_gateway.settings import Settings
from token2wav_gateway.voices import VoiceFolder
from token2wav_server import Ports, ServerError, TritonServer

TEMPLATE = Path(__file__).with_name("template.yaml")
VOICE = "joe"


def settings(grpc_url: str, language_model_port: int, voices: Path) -> Settings:
    """Returns the settings of the demo's gateway."""
    return Settings.model_validate(
        {
            "language_model": {
                "url": f"http://127.0.0.1:{language_model_port}/v1",
                "model": language_model.MODEL,
                "template": str(TEMPLATE),
            },
            "speech_server": {"url": grpc_url},
            "voices": {"folder": voices, "model": MODEL, "default": VOICE},
        }
    )


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


async def serve_gateway(settings: Settings, listener: socket.socket, riva_port: int) -> None:
    """Serves the gateway until the task is cancelled, with the interface of Riva if it has a port.

    Raises:
        SettingsError: the port cannot be opened, or the extra `riva` is not installed.
    """
    app, (host, port) = create_app(settings, Metrics()), listener.getsockname()
    config = BoundedConfig(app, settings.limits, host=host, port=port, riva_port=riva_port)
    await DrainingServer(config, app, drain_s=1).serve(sockets=[listener])


async def run(
    grpc_url: str,
    voice_folder: Path,
    gateway: socket.socket,
    language_model_server: socket.socket,
    pace: float,
    riva_port: int,
) -> None:
    """Serves the language model and the gateway until they are stopped."""
    front_end = TextFrontEnd()
    port, language_model_port = (
        listener.getsockname()[1] for listener in (gateway, language_model_server)
    )
    chosen = settings(grpc_url, language_model_port, voice_folder)
    voices = VoiceFolder(chosen.voices)
    if VOICE not in voices.names():
        await voices.create(VOICE, PROMPT_TEXT, PROMPT.read_bytes())
    print(
        "speech: ready; try:\n"
        f"  curl http://127.0.0.1:{port}/v1/audio/speech -H 'Content-Type: application/json' "
        f'-d \'{{"model": "token2wav", "voice": "{VOICE}", "response_format": "wav", '
        '"input": "The first boats were coming home."}\' -o speech.wav',
        flush=True,
    )
    await asyncio.gather(
        serve(language_model.create_app(front_end.tokens, pace), language_model_server),
        serve_gateway(chosen, gateway, riva_port),
    )


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
    gateway = listen("--port", options.port)
    language_model_server = listen("--language-model-port", options.language_model_port)
    try:
        print("speech: starting a Triton server with the demo voice", flush=True)
        with TritonServer(MODEL, ports=Ports.free(), verbose=False) as server:
            asyncio.run(
                run(
                    server.grpc_url,
                    options.voices,
                    gateway,
                    language_model_server,
                    options.tokens_per_second,
                    options.riva_port,
                )
            )
    except (GatewayError, ServerError, OSError) as error:
        sys.exit(f"speech: {error}")
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()

"""Bridge to a browser: it serves a web page, and turns each WebSocket into one utterance on a token2wav server.

    python examples/browser/bridge.py --tokens tokens.npy --voice voice.safetensors

The page sends text frames with tokens (`<|s_17|>` or integers, cut anywhere) and an empty one at the end. It gets,
for each chunk, a text frame with its numbers and a binary one with its samples, float32 at 24 kHz; and if anything
goes wrong, a text frame {"error": "..."}. A page that is closed cancels its utterance.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path

import numpy as np
from websockets.asyncio.server import ServerConnection, serve
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response
from websockets.typing import Origin

from token2wav_client import AsyncClient, ClientError, ClientVoice, TokenParser
from token2wav_client.token_source import open_tokens

FOLDER = Path(__file__).parent
TYPES = {"index.html": "text/html", "page.js": "text/javascript", "ring.js": "text/javascript"}
NUMBERS = ("index", "final", "arrival_s", "latency_s", "sample_rate")
MAX_FRAME_BYTES = 65_536


class Bridge:
    """Bridge that serves the page, and an utterance for each WebSocket.

    Args:
        client: connection to the server that speaks.
        voice: voice of all utterances.
        tokens: tokens that the page begins with.
    """

    def __init__(self, client: AsyncClient, voice: ClientVoice, tokens: list[int]) -> None:
        self._client = client
        self._voice = voice
        self._tokens = tokens

    def answer(self, connection: ServerConnection, request: Request) -> Response | None:
        """Answers what is no WebSocket: three files and the tokens to begin with."""
        name = request.path.partition("?")[0].removeprefix("/") or "index.html"
        if name == "speak":
            return None  # goes on as a WebSocket
        if name == "tokens":
            return _page("".join(f"<|s_{token}|>" for token in self._tokens).encode(), "text/plain")
        if name in TYPES:
            return _page((FOLDER / name).read_bytes(), TYPES[name])
        return connection.respond(HTTPStatus.NOT_FOUND, "nothing here\n")

    async def speak(self, page: ServerConnection) -> None:
        """Speaks what one WebSocket sends."""
        with suppress(ConnectionClosed):  # the page is gone, and the utterance with it
            try:
                async for chunk in self._client.synthesize(_tokens_of(page), self._voice):
                    numbers = {name: getattr(chunk, name) for name in NUMBERS}
                    await page.send(json.dumps(numbers))
                    await page.send(chunk.audio.astype("<f4").tobytes())
            except ClientError as error:
                await page.send(json.dumps({"error": str(error)}))


async def _tokens_of(page: ServerConnection) -> AsyncIterator[list[int]]:
    parser = TokenParser()
    while text := await page.recv():
        if tokens := parser.feed(text.encode() if isinstance(text, str) else text):
            yield tokens
    if tokens := parser.close():
        yield tokens


def _page(content: bytes, kind: str) -> Response:
    headers = {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(content)), "Connection": "close"}
    return Response(HTTPStatus.OK, "OK", Headers(headers), content)


async def run(options: argparse.Namespace) -> None:
    """Serves until it is stopped."""
    voice = ClientVoice.load(options.voice)
    tokens = np.concatenate(list(open_tokens(options.tokens).pieces)).tolist()
    async with AsyncClient(options.url, retries=3) as client:
        bridge = Bridge(client, voice, tokens)
        # Only pages that came from here may speak: a browser would let any other page in the world connect, too.
        origins = [Origin(f"http://{host}:{options.port}") for host in ("127.0.0.1", "localhost")]
        async with serve(
            bridge.speak,
            "127.0.0.1",
            options.port,
            origins=origins,
            process_request=bridge.answer,
            max_size=MAX_FRAME_BYTES,
            compression=None,
        ) as server:
            print(f"open http://127.0.0.1:{options.port}", flush=True)
            await server.serve_forever()


def main() -> None:
    """Runs the example."""
    parser = argparse.ArgumentParser(description="Serve a page that plays speech as it arrives.")
    parser.add_argument("--tokens", required=True, help="that the page begins with: .npy, .json or text")
    parser.add_argument("--voice", required=True, help=".npz or .safetensors")
    parser.add_argument("--url", default="localhost:8001", help="of the token2wav server (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8080, help="of the page (default: %(default)s)")
    try:
        asyncio.run(run(parser.parse_args()))
    except (ClientError, OSError) as error:
        sys.exit(f"bridge: {error}")
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()

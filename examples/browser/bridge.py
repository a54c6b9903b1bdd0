"""Bridge to a browser: it serves a web page, and turns each WebSocket into one utterance on a
token2wav server.

    python -m examples.browser.bridge --tokens tokens.npy --voice voice.safetensors

The protocol of a WebSocket:

1. The page sends the text that a person typed. The bridge answers with {"tokens": [...]}.
2. The page sends the tokens as text, at its own pace. A frame may end within a token. An empty
   frame ends the tokens.
3. For each chunk, the bridge sends a text frame with numbers of the chunk, and a binary frame with
   its samples (float32).

After an error the bridge sends {"error": "..."}. If the page closes the WebSocket, the utterance
ends.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field
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
NUMBERS = ("final", "sample_rate", "samples_per_token")
MAX_FRAME_BYTES = 65_536


@dataclass(frozen=True, eq=False)
class Bridge:
    """Bridge that serves the page, and an utterance for each WebSocket.

    Attributes:
        client: connection to the token2wav server.
        tokens_of: function that turns a text into tokens; the bridge calls it in a thread. It
            raises ClientError with a sentence for the person.
    """

    client: AsyncClient
    voice: ClientVoice
    texts: list[str]
    tokens_of: Callable[[str], list[int]]
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def serve(self, port: int) -> None:
        """Serves the page on this machine until it is stopped."""
        # Only pages of this bridge may connect. Without this check a browser would let any other
        # page connect too.
        origins = [Origin(f"http://{host}:{port}") for host in ("127.0.0.1", "localhost")]
        async with serve(
            self._speak,
            "127.0.0.1",
            port,
            origins=origins,
            process_request=self._answer,
            max_size=MAX_FRAME_BYTES,
            compression=None,
        ) as server:
            print(f"open http://127.0.0.1:{port}", flush=True)
            await server.serve_forever()

    def _answer(self, connection: ServerConnection, request: Request) -> Response | None:
        """Answers HTTP requests: the three files of the page, and the texts that it offers."""
        name = request.path.partition("?")[0].removeprefix("/") or "index.html"
        if name == "speak":
            return None  # continue with the WebSocket
        if name == "texts":
            return _page(json.dumps(self.texts).encode(), "application/json")
        if name in TYPES:
            return _page((FOLDER / name).read_bytes(), TYPES[name])
        return connection.respond(HTTPStatus.NOT_FOUND, "nothing here\n")

    async def _speak(self, page: ServerConnection) -> None:
        """Synthesizes the utterance of one WebSocket."""
        with suppress(ConnectionClosed):  # the page has left, which ends the utterance
            try:
                text = str(await page.recv())
                async with self._turn:
                    tokens = await asyncio.to_thread(self.tokens_of, text)
                await page.send(json.dumps({"tokens": tokens}))
                async for chunk in self.client.synthesize(_paced(page), self.voice):
                    numbers = {name: getattr(chunk, name) for name in NUMBERS}
                    await page.send(json.dumps(numbers))
                    await page.send(chunk.audio.astype("<f4").tobytes())
            except ClientError as error:
                await page.send(json.dumps({"error": str(error)}))


async def _paced(page: ServerConnection) -> AsyncIterator[list[int]]:
    parser = TokenParser()
    while text := await page.recv():
        if tokens := parser.feed(text.encode() if isinstance(text, str) else text):
            yield tokens
    if tokens := parser.close():
        yield tokens


def _page(content: bytes, kind: str) -> Response:
    headers = {
        "Content-Type": f"{kind}; charset=utf-8",
        "Content-Length": str(len(content)),
        "Connection": "close",
    }
    return Response(HTTPStatus.OK, "OK", Headers(headers), content)


def parsed(text: str) -> list[int]:
    """Parses tokens that a person typed, as `<|s_17|>` or as integers."""
    parser = TokenParser()
    return parser.feed(text.encode()) + parser.close()


async def run(options: argparse.Namespace) -> None:
    """Serves until it is stopped."""
    voice = ClientVoice.load(options.voice)
    tokens = np.concatenate(list(open_tokens(options.tokens).pieces)).tolist()
    text = "".join(f"<|s_{token}|>" for token in tokens)
    async with AsyncClient(options.url, retries=3) as client:
        await Bridge(client, voice, [text], parsed).serve(options.port)


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve a page that plays speech as it arrives.")
    parser.add_argument(
        "--tokens", required=True, help="tokens that the page shows first: .npy, .json or text"
    )
    parser.add_argument("--voice", required=True, help=".npz or .safetensors")
    parser.add_argument(
        "--url",
        default="localhost:8001",
        help="gRPC address of the token2wav server (default: %(default)s)",
    )
    parser.add_argument(
        "--port", type=int, default=8080, help="port of the page (default: %(default)s)"
    )
    try:
        asyncio.run(run(parser.parse_args()))
    except (ClientError, OSError) as error:
        sys.exit(f"bridge: {error}")
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()

"""Bridge to a browser: it serves a web page, and turns each WebSocket into one utterance on a
token2wav server.

    python -m examples.browser.bridge --tokens tokens.npy --voice voice.safetensors

The page sends what a person typed, and gets its tokens as {"tokens": [...]}. It sends these as
text, at a pace of its own and cut anywhere, and an empty frame at the end. For each chunk it gets a
text frame with its numbers and a binary one with its samples, float32. If anything goes wrong, it
gets {"error": "..."}. When it is closed, its utterance ends.
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
        client: connection to the server that speaks.
        voice: voice of all utterances.
        texts: what the page offers to begin with.
        tokens_of: turns a text into tokens, in a thread; raises ClientError with a sentence for the
            person.
    """

    client: AsyncClient
    voice: ClientVoice
    texts: list[str]
    tokens_of: Callable[[str], list[int]]
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def serve(self, port: int) -> None:
        """Serves the page on this machine until it is stopped."""
        # Only pages that came from here may speak: a browser would let any other page in the world
        # connect, too.
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
        """Answers what is no WebSocket: three files and the texts to begin with."""
        name = request.path.partition("?")[0].removeprefix("/") or "index.html"
        if name == "speak":
            return None  # goes on as a WebSocket
        if name == "texts":
            return _page(json.dumps(self.texts).encode(), "application/json")
        if name in TYPES:
            return _page((FOLDER / name).read_bytes(), TYPES[name])
        return connection.respond(HTTPStatus.NOT_FOUND, "nothing here\n")

    async def _speak(self, page: ServerConnection) -> None:
        """Speaks what one WebSocket sends."""
        with suppress(ConnectionClosed):  # the page is gone, and the utterance with it
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
    """Reads tokens that are typed as such, `<|s_17|>` or integers."""
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
    """Runs the example."""
    parser = argparse.ArgumentParser(description="Serve a page that plays speech as it arrives.")
    parser.add_argument(
        "--tokens", required=True, help="that the page begins with: .npy, .json or text"
    )
    parser.add_argument("--voice", required=True, help=".npz or .safetensors")
    parser.add_argument(
        "--url", default="localhost:8001", help="of the token2wav server (default: %(default)s)"
    )
    parser.add_argument("--port", type=int, default=8080, help="of the page (default: %(default)s)")
    try:
        asyncio.run(run(parser.parse_args()))
    except (ClientError, OSError) as error:
        sys.exit(f"bridge: {error}")
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()

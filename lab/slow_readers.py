"""Gateway with clients that read slowly: its memory, and how much it reads ahead for them.

Clients ask for a long text each, and read its audio at a quarter of the speed of speech. A language
model server answers with stored tokens. The program measures the resident memory of the gateway
over time, and how much of the answers it has read: with back-pressure (`limits.ahead_s`), and
without.

    .venv/bin/python -m lab.slow_readers
"""

from __future__ import annotations

import asyncio
import json
import socket
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
from safetensors.numpy import save_file

from benchmarks.environment import describe, program_parser, save
from benchmarks.load.gateway import answering
from benchmarks.load.listener import GATEWAY_RATE_HZ, REQUEST
from benchmarks.load.subject import TRAINED, Subject
from testkit.patience import until
from testkit.rigs.gateway_rig import TEMPLATE, VOICE, serving
from testkit.rigs.metrics import scrape
from testkit.rigs.observed_gateway import ObservedGateway
from testkit.rigs.processes import resident_mib
from token2wav_client.voice import FIELDS
from token2wav_server import Ports, TritonServer

_MODEL = TRAINED["demo_voice"]
_START_S = 60.0
_TEXT_S = 160.0  # of speech, for each client
_READ_SHARE = 0.25  # of real time
_PIECE_S = 0.5
_WINDOW = 16_384  # bytes that the operating system receives for a client
_AHEAD_S = {"with back-pressure": 10.0, "without": 1e6}
_TOKENS, _HELD = "token2wav_gateway_speech_tokens_total", "token2wav_gateway_held_back"
_DESCRIPTORS = 4096


def ready(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health/ready").is_success
    except httpx.HTTPError:
        return False


async def read_slowly(port: int) -> None:
    """Asks for a text, and reads its audio slowly until it is cancelled."""
    loop, content = asyncio.get_running_loop(), json.dumps(REQUEST).encode()
    head = f"POST /v1/audio/speech HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n"
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _WINDOW)
        connection.setblocking(False)
        await loop.sock_connect(connection, ("127.0.0.1", port))
        request = f"{head}content-type: application/json\r\n\r\n".encode() + content
        await loop.sock_sendall(connection, request)
        piece = int(_READ_SHARE * 2 * GATEWAY_RATE_HZ * _PIECE_S)
        while await loop.sock_recv(connection, piece):
            await asyncio.sleep(_PIECE_S)


async def watch(gateway: ObservedGateway, clients: int, seconds: float) -> list[list[float]]:
    """Runs the clients, and returns rows of second, memory in MiB, tokens read, and texts held."""
    rows: list[list[float]] = []
    await asyncio.to_thread(until, lambda: ready(gateway.ports.http), seconds=_START_S)
    began = time.monotonic()
    readers = [asyncio.create_task(read_slowly(gateway.ports.http)) for _ in range(clients)]
    for second in range(round(seconds) + 1):
        await asyncio.sleep(began + second - time.monotonic())
        metrics = await asyncio.to_thread(scrape, gateway.metrics_url)
        counts = (int(metrics.get(name, 0)) for name in (_TOKENS, _HELD))
        rows.append([second, resident_mib(gateway.process.pid), *counts])
        if second % 10 == 0:
            print("second {}: {} MiB, {} tokens read, {} held back".format(*rows[-1]))
    for reader in readers:
        reader.cancel()
    await asyncio.gather(*readers, return_exceptions=True)
    return rows


def main() -> None:
    parser = program_parser()
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=120.0, help="of each of the two runs")
    parser.add_argument("--speed", type=float, default=4.0, help="of the tokens, to speech")
    options = parser.parse_args()
    subject, result = Subject.of(_MODEL, _TEXT_S), dict[str, Any]()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        config = Path(folder) / "server.yaml"
        tensors = {name: getattr(subject.voice, name) for name in FIELDS}
        save_file(tensors, Path(folder) / f"{VOICE}.safetensors")
        # The canary of the server needs a stream too.
        config.write_text(f"limits: {{streams: {options.clients + 8}}}\n")
        server = stack.enter_context(
            TritonServer(_MODEL, config=config, ports=Ports.free(), verbose=False)
        )
        for kind, ahead_s in _AHEAD_S.items():
            print(f"{kind} (ahead_s {ahead_s:g}):")
            limits = {"ahead_s": ahead_s, "streams": options.clients, "speech_tokens": 1_000_000}
            with serving(answering(subject, options.speed)) as port:
                language_model = {"url": f"http://127.0.0.1:{port}/v1", "template": TEMPLATE}
                settings = {
                    "language_model": language_model,
                    "speech_server": {"url": server.grpc_url},
                    "voices": {"folder": folder},
                    "limits": limits,
                }
                with ObservedGateway.start(settings, Path(folder), _DESCRIPTORS) as running:
                    result[kind] = asyncio.run(watch(running, options.clients, options.seconds))
    save("slow_readers", {**describe(), "columns": "second, MiB, tokens, held", **result})


if __name__ == "__main__":
    main()

"""Memory of a gateway whose clients read their audio more slowly than it is spoken.

Runs a server with the demo voice, a language model server that is faster than speech, and the
command `token2wav gateway`. Clients ask for a long text each, and read its audio at a quarter of
the speed of speech. The program prints the resident memory of the gateway over time, and how much
of the answers of the language model the gateway has read: with back-pressure (`limits.ahead_s`),
and without. It saves both, unless it ran with other options.

    .venv/bin/python -m benchmarks.slow_readers
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml
from safetensors.numpy import save_file

from benchmarks.environment import ROOT, describe, save
from benchmarks.open_loop import TRAINED, Subject
from examples.speech import language_model
from testkit.rigs.gateway_rig import TEMPLATE, serving
from token2wav_client.voice import FIELDS
from token2wav_server import Ports, TritonServer

_TEXT_S = 160.0  # of speech, for each client
_READ_SHARE = 0.25  # of real time
_BYTES_PER_S = 48_000  # of speech in `pcm`
_PIECE_S = 0.5
_WINDOW = 16_384  # bytes that the operating system receives for a client
_AHEAD_S = {"with back-pressure": 10.0, "without": 1e6}
_START_S = 60.0
_TOKENS = re.compile(r"(?m)^token2wav_gateway_speech_tokens_total (\S+)")
_HELD = re.compile(r"(?m)^token2wav_gateway_held_back (\S+)")
_MIB = 1 << 20


@contextmanager
def gateway(folder: Path, settings: dict[str, Any], ports: Ports) -> Iterator[int]:
    """Runs the command of the gateway, and yields its process id."""
    (folder / "gateway.yaml").write_text(yaml.safe_dump(settings))
    command = [sys.executable, "-m", "token2wav", "gateway", "--port", str(ports.http)]
    command += ["--metrics-port", str(ports.metrics), "--config", str(folder / "gateway.yaml")]
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        deadline = time.monotonic() + _START_S
        while process.poll() is None and time.monotonic() < deadline:
            try:
                httpx.get(f"http://127.0.0.1:{ports.http}/health/ready").raise_for_status()
                break
            except httpx.HTTPError:
                time.sleep(0.2)
        yield process.pid
    finally:
        process.kill()
        process.wait()


async def read_slowly(port: int) -> None:
    """Asks for a text, and reads its audio slowly until it is cancelled."""
    loop = asyncio.get_running_loop()
    body = {"model": "tts-1", "voice": "demo", "input": "Hello.", "response_format": "pcm"}
    content = json.dumps(body).encode()
    head = f"POST /v1/audio/speech HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n"
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _WINDOW)
        connection.setblocking(False)
        await loop.sock_connect(connection, ("127.0.0.1", port))
        request = f"{head}content-type: application/json\r\n\r\n".encode() + content
        await loop.sock_sendall(connection, request)
        piece = int(_READ_SHARE * _BYTES_PER_S * _PIECE_S)
        while await loop.sock_recv(connection, piece):
            await asyncio.sleep(_PIECE_S)


def resident_mib(process_id: int) -> float:
    pages = int(Path(f"/proc/{process_id}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / _MIB


def count_of(pattern: re.Pattern[str], metrics: str) -> int:
    match = pattern.search(metrics)
    return int(float(match[1])) if match else 0


async def watch(process_id: int, ports: Ports, clients: int, seconds: float) -> list[list[float]]:
    """Runs the clients, and returns rows of second, memory in MiB, tokens read, and texts held."""
    rows: list[list[float]] = []
    began = time.monotonic()
    readers = [asyncio.create_task(read_slowly(ports.http)) for _ in range(clients)]
    async with httpx.AsyncClient() as http:
        for second in range(round(seconds) + 1):
            await asyncio.sleep(began + second - time.monotonic())
            metrics = (await http.get(f"http://127.0.0.1:{ports.metrics}/metrics")).text
            tokens, held = count_of(_TOKENS, metrics), count_of(_HELD, metrics)
            rows.append([second, round(resident_mib(process_id), 1), tokens, held])
            if second % 10 == 0:
                print("second {}: {} MiB, {} tokens read, {} held back".format(*rows[-1]))
    for reader in readers:
        reader.cancel()
    await asyncio.gather(*readers, return_exceptions=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=120.0, help="of each of the two runs")
    parser.add_argument("--pace", type=float, default=4.0, help="of the language model, to speech")
    options = parser.parse_args()
    model = TRAINED["demo_voice"]
    subject = Subject.of(model, _TEXT_S, options.pace)
    assert subject.voice is not None
    answer = language_model.create_app(lambda _: subject.tokens.tolist(), subject.tokens_per_second)
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name, serving(answer) as model_port, ExitStack() as stack:
        folder = Path(name)
        # The canary of the server needs a stream too.
        (folder / "server.yaml").write_text(f"limits: {{streams: {options.clients + 8}}}\n")
        server = stack.enter_context(
            TritonServer(model, config=folder / "server.yaml", ports=Ports.free(), verbose=False)
        )
        arrays = {field: getattr(subject.voice, field) for field in FIELDS}
        save_file(arrays, folder / "demo.safetensors")
        for kind, ahead_s in _AHEAD_S.items():
            limits = {"ahead_s": ahead_s, "streams": options.clients, "speech_tokens": 1_000_000}
            settings = {
                "language_model": {
                    "url": f"http://127.0.0.1:{model_port}/v1",
                    "template": str(TEMPLATE),
                },
                "speech_server": {"url": server.grpc_url},
                "voices": {"folder": str(folder)},
                "limits": limits,
            }
            print(f"{kind} (ahead_s {ahead_s:g}):")
            ports = Ports.free()
            with gateway(folder, settings, ports) as process_id:
                result[kind] = asyncio.run(
                    watch(process_id, ports, options.clients, options.seconds)
                )
    if len(sys.argv) == 1:
        save("slow_readers", {**describe(), "columns": "second, MiB, tokens, held", **result})


if __name__ == "__main__":
    main()

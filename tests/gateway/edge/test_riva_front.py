"""Front of Riva's interface: the unfinished messages that it follows."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress

import anyio
import pytest

from testkit.patience import PATIENCE_SECONDS
from testkit.rigs.raw_grpc import DATA, END_HEADERS, END_STREAM, HEADERS, PREFACE, frame
from token2wav_gateway.edge.riva_front import FrameError, RivaFront, Unfinished
from token2wav_server import Ports

pytestmark = pytest.mark.anyio


def test_headers_without_an_answer_take_no_memory() -> None:
    """The library ignores headers of old streams, and those after the end of an answer."""
    unfinished, part = Unfinished(), frame(DATA, 0, 3, bytes([0, 0, 0, 0, 9]) + b"1234")
    unfinished.requests.feed(PREFACE + frame(HEADERS, END_HEADERS, 3) + part)
    assert unfinished.size == 4
    unfinished.responses.feed(frame(HEADERS, END_STREAM | END_HEADERS, 3))
    assert unfinished.size == 0
    unfinished.requests.feed((frame(HEADERS, END_HEADERS, 1) + frame(HEADERS, END_HEADERS, 3)) * 9)
    unfinished.requests.feed(part)
    assert unfinished.size == 0
    with pytest.raises(FrameError, match="even number"):
        unfinished.requests.feed(frame(HEADERS, END_HEADERS, 8))


async def test_too_many_bytes_close_the_connection_with_the_oldest_message() -> None:
    """The newer one, which is larger, may be the recording of an honest client."""

    async def send(port: int, size: int) -> asyncio.Task[bytes]:
        """Sends the first bytes of a message; the task ends when the connection is closed."""
        message = bytes([0, 0, 0, 0, 100]) + bytes(size)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(PREFACE + frame(HEADERS, END_HEADERS, 1) + frame(DATA, 0, 1, message))
        await asyncio.wait_for(arrived.get(), PATIENCE_SECONDS)
        writers.append(writer)
        return asyncio.create_task(reader.read())

    async def read(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        while await reader.read(1000):
            await arrived.put(None)

    arrived: asyncio.Queue[None] = asyncio.Queue()
    writers: list[asyncio.StreamWriter] = []  # a writer that nobody holds closes its connection
    front, port = RivaFront(most_bytes=100, most_connections=9, stall_s=60), Ports.free().grpc
    server = await asyncio.start_unix_server(read, front.path)
    await front.start("127.0.0.1", port)
    old, new = await send(port, 30), await send(port, 90)
    await asyncio.wait({old, new}, timeout=PATIENCE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
    assert (old.done(), new.done()) == (True, False)
    await front.close()
    server.close()


async def test_a_client_that_reads_nothing_keeps_no_place() -> None:
    async def flood(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while True:
                writer.write(frame(DATA, 0, 1, bytes(10_000)))
                await writer.drain()

    front, port = RivaFront(most_bytes=100, most_connections=1, stall_s=0.2), Ports.free().grpc
    server = await asyncio.start_unix_server(flood, front.path)
    await front.start("127.0.0.1", port)
    silent = socket.create_connection(("127.0.0.1", port))  # reads nothing, and stays open
    with anyio.fail_after(PATIENCE_SECONDS):
        answer = b""
        while not answer:  # a connection without a place is closed at once
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            with suppress(ConnectionError):
                answer = await reader.read(1)
            writer.close()
            await asyncio.sleep(0.05)
    silent.close()
    await front.close()
    server.close()


async def test_a_client_that_leaves_makes_room_for_its_next_connection() -> None:
    """It leaves answers unread, and its connection is reset."""

    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1000):
            writer.write(bytes(2))

    def reconnect() -> list[bytes]:
        answers = []
        for _ in range(50):
            with socket.create_connection(("127.0.0.1", port), PATIENCE_SECONDS) as client:
                client.sendall(PREFACE)
                answers.append(client.recv(1))
        return answers

    front, port = RivaFront(most_bytes=100, most_connections=1, stall_s=60), Ports.free().grpc
    server = await asyncio.start_unix_server(reply, front.path)
    await front.start("127.0.0.1", port)
    assert await asyncio.to_thread(reconnect) == [bytes(1)] * 50
    await front.close()
    server.close()

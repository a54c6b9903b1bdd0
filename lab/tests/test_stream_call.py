"""Client of gRPC in asyncio: messages of any size, and calls that the server ends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from lab.stream_call import StreamCall

METHOD = "/test.Echo/Echo"


@pytest.fixture
def echo() -> Iterator[str]:
    """Address of a gRPC server that repeats each message, and ends the call after b"end"."""

    def repeat(messages: Iterator[bytes], _: Any) -> Iterator[bytes]:
        for message in messages:
            if message == b"end":
                return
            yield message

    handler = grpc.stream_stream_rpc_method_handler(repeat)
    with ThreadPoolExecutor(2) as threads:
        server = grpc.server(threads)
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("test.Echo", {"Echo": handler}),)
        )
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield f"127.0.0.1:{port}"
        server.stop(0).wait()


def test_a_call_sends_and_receives_messages_of_any_size(echo: str) -> None:
    """Messages above 16 KB need several frames, and those above 64 KB wait for the server."""
    sent = [bytes([index]) * size for index, size in enumerate([0, 1, 40_000, 3_000_000, 7])]

    async def exchange() -> list[bytes]:
        received: list[bytes] = []
        call = await StreamCall.open(echo, METHOD, received.append)
        for message in sent:
            call.send(message)
        while len(received) < len(sent):
            await asyncio.sleep(0.01)
        call.close()
        await call.ended
        return received

    assert asyncio.run(asyncio.wait_for(exchange(), 60)) == sent


@pytest.mark.parametrize("method", [METHOD, "/test.Echo/Unknown"])
def test_a_call_that_the_server_ends(echo: str, method: str) -> None:
    async def end() -> None:
        call = await StreamCall.open(echo, method, lambda _: None)
        call.send(b"end")
        with pytest.raises(ConnectionError, match="the server has ended the call"):
            await asyncio.wait_for(call.ended, 60)

    asyncio.run(end())

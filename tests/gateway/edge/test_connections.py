"""Bounds of connections: which connection is closed for a new one."""

from __future__ import annotations

from typing import Any, cast

from token2wav_gateway.edge.connections import Connection, Connections


class Transport:
    """Transport of a client at an address. It is its own protocol."""

    def __init__(self, address: str, *, evictable: bool = True) -> None:
        self._address = address
        self.evictable = evictable
        self.aborted = False

    def get_extra_info(self, name: str) -> tuple[str, int] | None:
        return (self._address, 1) if name == "peername" else None

    def get_protocol(self) -> Transport:
        return self

    def is_closing(self) -> bool:
        return self.aborted

    def abort(self) -> None:
        self.aborted = True


def opened(connections: Connections, *transports: Transport) -> list[Connection]:
    return [connections.add(cast(Any, transport)) for transport in transports]


def test_an_address_with_few_connections_loses_none() -> None:
    connections, other = Connections(10), Transport("b")
    flood = [Transport("a") for _ in range(100)]
    opened(connections, other, *flood)
    assert not other.aborted
    assert [transport.aborted for transport in flood] == [True] * 91 + [False] * 9


def test_requests_that_are_answered_are_not_closed() -> None:
    connections = Connections(3)
    busy = [Transport("a", evictable=False) for _ in range(3)]
    health = Transport("b")
    opened(connections, *busy, health)
    assert health.aborted
    assert not any(transport.aborted for transport in busy)


def test_connections_that_end_leave_their_places() -> None:
    connections = Connections(3)
    for _ in range(10):
        for connection in opened(connections, Transport("a"), Transport("a"), Transport("b")):
            assert not connection.is_closing()
            connections.remove(connection)
            connections.remove(connection)  # after an eviction, the end is reported too

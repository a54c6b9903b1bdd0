"""Balancing rule of HAProxy's `leastconn`: a new stream goes to a server with the fewest open ones.

The simulation and the load program of the real run (`fleet/replicas.py`) choose by this class.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

ServerT = TypeVar("ServerT", bound=Hashable)


class LeastOpen(Generic[ServerT]):
    """Balancer that counts the streams that it has opened itself. All calls take constant time.

    Of several servers with equally few streams it chooses, like HAProxy, the server with the oldest
    change of its number.
    """

    def __init__(self) -> None:
        self._open: dict[ServerT, int] = {}
        # Servers that accept streams, by their open streams, in the order of their last change.
        self._groups: dict[int, OrderedDict[ServerT, None]] = {}
        self._accepting = 0
        self._least = 0

    def __len__(self) -> int:
        """Number of servers that accept streams."""
        return self._accepting

    def open_streams(self, server: ServerT) -> int:
        return self._open[server]

    def add(self, server: ServerT) -> None:
        """Adds a server that accepts streams, or lets a removed one accept streams again."""
        self._accepting += 1
        self._insert(server, self._open.setdefault(server, 0))

    def remove(self, server: ServerT) -> None:
        """Gives a server no new streams. Its open streams remain."""
        self._accepting -= 1
        self._withdraw(server, self._open[server])

    def open(self) -> ServerT | None:
        """Returns the server of a new stream; None if no server accepts streams."""
        if not self._accepting:
            return None
        while not self._groups.get(self._least):
            self._least += 1
        server, _ = self._groups[self._least].popitem(last=False)
        self._open[server] += 1
        self._insert(server, self._open[server])
        return server

    def close(self, server: ServerT) -> None:
        """Records that a stream of a server has ended."""
        count = self._open[server]
        self._open[server] = count - 1
        if server in self._groups.get(count, ()):
            self._withdraw(server, count)
            self._insert(server, count - 1)

    def _insert(self, server: ServerT, count: int) -> None:
        self._groups.setdefault(count, OrderedDict())[server] = None
        self._least = min(self._least, count)

    def _withdraw(self, server: ServerT, count: int) -> None:
        del self._groups[count][server]

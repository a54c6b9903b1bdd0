"""An engine without a model: it speaks the protocol of the engine's socket, as a test tells it."""

from __future__ import annotations

import queue
import socket
import struct
import threading
import time
from contextlib import suppress
from pathlib import Path

from testkit.patience import PATIENCE_SECONDS
from token2wav_server.engine import frames
from token2wav_server.engine.frames import RequestFrame


def frame(kind: int, payload: bytes) -> bytes:
    """Returns a frame that need not be one of the protocol."""
    return struct.pack("<IB", 1 + len(payload), kind) + payload


class FakeEngine:
    """Listens on a socket, and serves one front after the other until it is stopped.

    Attributes:
        requests: requests in their order.
        cancelled: slots that were cancelled, each with the time of `time.monotonic`.
        reading: the engine reads only while it is set.

    Args:
        greeting: first bytes of each connection.
    """

    def __init__(self, path: Path, greeting: bytes = frames.ready_frame()) -> None:
        self.requests: queue.Queue[RequestFrame] = queue.Queue()
        self.cancelled: queue.Queue[tuple[int, float]] = queue.Queue()
        self.reading = threading.Event()
        self.reading.set()
        self._greeting = greeting
        self._connected = threading.Event()
        self._connection: socket.socket | None = None
        self._stopped = False
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(1)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def wait_for_front(self) -> None:
        assert self._connected.wait(PATIENCE_SECONDS), "no front has connected"

    def request(self) -> RequestFrame:
        return self.requests.get(timeout=PATIENCE_SECONDS)

    def send(self, *sent: bytes) -> None:
        assert self._connection is not None
        self._connection.sendall(b"".join(sent))

    def stop(self) -> None:
        """Ends without a word, as a killed process does."""
        self._stopped = True
        self.reading.set()
        for open_socket in (self._listener, self._connection):
            if open_socket is not None:
                with suppress(OSError):
                    open_socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive()

    def _serve(self) -> None:
        with self._listener:
            while not self._stopped:
                try:
                    connection, _ = self._listener.accept()
                except OSError:  # stopped
                    return
                self._connection = connection
                with connection, suppress(OSError):
                    connection.sendall(self._greeting)
                    self._connected.set()
                    self._read(connection)
                self._connected.clear()

    def _read(self, connection: socket.socket) -> None:
        stream = connection.makefile("rb", buffering=1 << 16)
        while self.reading.wait() and (head := stream.read(4)):
            content = bytearray(stream.read(int.from_bytes(head, "little")))
            if content[0] == frames.CANCELLED:
                self.cancelled.put((frames.parse_slot(content), time.monotonic()))
            else:
                assert content[0] == frames.REQUEST
                self.requests.put(frames.parse_request(content))

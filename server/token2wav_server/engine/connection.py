"""Connection between the engine and the front, over which both send and read frames."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import deque
from collections.abc import Iterator

from token2wav_server.engine.frames import FrameBuffer

MOST_UNSENT = 64 << 20  # bytes of frames that wait to be sent
_AT_ONCE = 1 << 16  # bytes that are received, or sent by the thread, in one call


class Connection:
    """Connection over a Unix socket. Sending never waits for the other side.

    The thread that calls `send` also sends the frame, because waking another thread costs more. If
    the kernel has no room, the rest of the frame joins a list, which a thread of the connection
    sends.

    Bytes that the other side has read are never counted as unsent. Else an engine that answers at
    once would find its next request refused, because a thread has not counted the last one yet.

    Args:
        collects: whether frames that are sent while received frames are handled wait until all of
            these are handled. Then they need one call of the system.
    """

    def __init__(self, connected: socket.socket, *, collects: bool = False) -> None:
        self._socket = connected
        self._collects, self._collecting = collects, False
        self._changed = threading.Condition()
        self._frames: deque[memoryview] = deque()  # unsent frames, or their last parts
        self._in_flight = False  # whether the thread sends at this moment
        self._unsent = 0
        self._is_open = True
        self._writer = threading.Thread(target=self._write, name="frames", daemon=True)
        self._writer.start()

    @property
    def unsent(self) -> int:
        """Bytes that wait to be sent."""
        with self._changed:
            return self._unsent

    def send(self, frame: bytes) -> None:
        """Sends a frame. It is lost if the connection is closed."""
        with self._changed:
            if self._is_open:
                self._frames.append(memoryview(frame))
                self._unsent += len(frame)
                if not self._collecting:
                    self._send_waiting()

    def frames(self) -> Iterator[bytearray]:
        """Yields frames without their lengths, until either side closes the connection.

        Raises:
            FrameError: the other side has sent something else.
        """
        buffer = FrameBuffer()
        while True:
            try:
                data = self._socket.recv(_AT_ONCE)
            except OSError:
                return
            if not data:
                return
            self._collecting = self._collects
            yield from buffer.add(data)
            if self._collects:
                with self._changed:
                    self._collecting = False
                    self._send_waiting()

    def close(self) -> None:
        """Closes the connection at once; may be called several times, and from any thread.

        Frames that have not been sent are lost, and `frames` ends.
        """
        with self._changed:
            self._is_open = False
            self._frames.clear()
            self._changed.notify()
        with contextlib.suppress(OSError):  # the other side has closed it
            self._socket.shutdown(socket.SHUT_RDWR)
        if threading.current_thread() is not self._writer:
            self._writer.join()
            self._socket.close()

    def _send_waiting(self) -> None:
        """Sends all waiting frames, as far as the kernel has room. The lock is held."""
        if self._in_flight or not self._frames:  # the thread sends these frames after its own
            return
        data = b"".join(self._frames)
        try:
            sent = self._socket.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            sent = 0
        except OSError:  # the other side has closed the connection, as `frames` sees too
            sent = len(data)
        self._take(sent)
        if self._frames:
            self._changed.notify()

    def _take(self, size: int) -> bytes:
        """Removes the first bytes of the unsent frames. The lock is held."""
        parts = []
        while size and self._frames:
            frame = self._frames.popleft()
            parts.append(part := frame[:size])
            size -= len(part)
            self._unsent -= len(part)
            if len(part) < len(frame):
                self._frames.appendleft(frame[len(part) :])
        return b"".join(parts)

    def _write(self) -> None:
        while True:
            with self._changed:
                self._in_flight = False
                self._changed.wait_for(
                    lambda: (self._frames and not self._collecting) or not self._is_open
                )
                if not self._is_open:
                    return
                part = self._take(_AT_ONCE)
                self._in_flight = True
            try:
                self._socket.sendall(part)
            except OSError:
                self.close()
                return

"""Connection between the engine and the front, over which both send and read frames."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import Counter
from collections.abc import Iterator

from token2wav_server.engine.frames import FrameBuffer

MOST_UNSENT = 64 << 20  # bytes of frames that wait to be sent
_RECEIVED = 1 << 16  # bytes that are received at a time


class Connection:
    """Connection over a Unix socket. Sending never waits for the other side.

    The thread that calls `send` also sends the frame, because waking another thread costs more. If
    the kernel has no room, the rest of the frame joins a list, which a thread of the connection
    sends in one call.

    Args:
        collects: whether frames that are sent while received frames are handled wait until all of
            these are handled. Then they need one call of the system.
    """

    def __init__(self, connected: socket.socket, *, collects: bool = False) -> None:
        self._socket = connected
        self._collects, self._collecting = collects, False
        self._changed = threading.Condition()
        self._frames: list[tuple[object, bytes]] = []  # with their groups
        self._in_flight = False  # whether the thread sends frames at this moment
        self._unsent = 0
        self._unsent_of: Counter[object] = Counter()  # by group
        self._is_open = True
        self._writer = threading.Thread(target=self._write, name="frames", daemon=True)
        self._writer.start()

    @property
    def unsent(self) -> int:
        """Bytes that wait to be sent, including the bytes that a running call sends."""
        return self._unsent

    def unsent_of(self, group: object) -> int:
        """Returns the bytes of a group of frames that wait to be sent."""
        return self._unsent_of[group]

    def send(self, frame: bytes, group: object = None) -> None:
        """Sends a frame, of a group if there is one. It is lost if the connection is closed."""
        with self._changed:
            if self._is_open:
                self._frames.append((group, frame))
                self._count(group, len(frame))
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
                data = self._socket.recv(_RECEIVED)
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
        frames, self._frames = self._frames, []
        data = b"".join(frame for _, frame in frames)
        try:
            sent = self._socket.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            sent = 0
        except OSError:  # the other side has closed the connection, as `frames` sees too
            sent = len(data)
        for group, frame in frames:
            part = min(sent, len(frame))
            sent -= part
            self._count(group, -part)
            if part < len(frame):
                self._frames.append((group, frame[part:]))
        if self._frames:
            self._changed.notify()

    def _count(self, group: object, size: int) -> None:
        self._unsent += size
        if group is not None:
            self._unsent_of[group] += size
            if not self._unsent_of[group]:
                del self._unsent_of[group]

    def _write(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: (self._frames and not self._collecting) or not self._is_open
                )
                if not self._is_open:
                    return
                frames, self._frames = self._frames, []
                self._in_flight = True
            try:
                self._socket.sendall(b"".join(frame for _, frame in frames))
            except OSError:
                self.close()
                return
            with self._changed:
                for group, frame in frames:
                    self._count(group, -len(frame))
                self._in_flight = False

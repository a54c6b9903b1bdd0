"""Engine: the service of a model behind a Unix socket, to which a front connects."""

from __future__ import annotations

import logging
import socket
import threading
from functools import partial
from pathlib import Path
from typing import NoReturn

from token2wav.errors import Token2WavError
from token2wav.serving.audio_output import AudioChunk
from token2wav.serving.door.message import Message
from token2wav.serving.door.service import Service
from token2wav_server.engine.connection import MOST_UNSENT, Connection
from token2wav_server.engine.frames import (
    CANCELLED,
    REQUEST,
    STATUS_NUMBERS,
    FailedFrame,
    FrameError,
    RequestFrame,
    audio_frame,
    failed_frame,
    finished_frame,
    parse_request,
    parse_slot,
    ready_frame,
)
from token2wav_server.replies import outputs_of, status_of
from token2wav_server.requests import message_of

log = logging.getLogger(__name__)

# Suffix of a file beside the socket. The file exists while a front is connected.
CONNECTED = ".connected"


class Engine:
    """Engine of one model, which serves one front at a time.

    When a front disconnects, no client can receive the audio of open utterances any more, so the
    engine ends all utterances.

    Args:
        path: path of the Unix socket. The permissions of the folder decide which processes may
            connect. A socket that an earlier engine has left at the path is replaced.
    """

    def __init__(self, service: Service, path: Path) -> None:
        self._service = service
        self._connected = path.with_name(path.name + CONNECTED)
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        path.chmod(0o600)
        self._listener.listen(1)

    def serve(self) -> NoReturn:
        """Serves fronts one after another, for as long as the process runs."""
        while True:
            connected, _ = self._listener.accept()
            self._serve_front(Connection(connected, collects=True))

    def _serve_front(self, connection: Connection) -> None:
        replies: dict[int, _Reply] = {}
        self._connected.touch()
        connection.send(ready_frame())
        try:
            for frame in connection.frames():
                self._take(frame, connection, replies)
        except FrameError as error:
            log.error(
                "the front sent a frame that cannot be read, so it is disconnected: %s", error
            )
        finally:
            self._connected.unlink(missing_ok=True)
            connection.close()
            self._service.cancel_all()

    def _take(self, frame: bytearray, connection: Connection, replies: dict[int, _Reply]) -> None:
        kind = frame[0]
        if kind == REQUEST:
            request = parse_request(frame)
            reply = replies[request.slot] = _Reply(request.slot, connection, replies)
            self._service.take(partial(_message, request), reply)
        elif kind == CANCELLED:
            if (cancelled := replies.get(parse_slot(frame))) is not None:
                cancelled.is_gone = True
                self._service.drop_abandoned()
        else:
            raise FrameError(f"the kind {kind} is unknown")


def _message(request: RequestFrame) -> Message:
    return message_of(request.sequence_id, request.flags, request.parameters, request.inputs)


class _Reply:
    """Reply to one request, sent to the front. It is thread-safe.

    Args:
        open_replies: replies of the connection by slot, from which this one removes itself.

    Attributes:
        is_gone: whether the client has cancelled or vanished.
    """

    def __init__(self, slot: int, connection: Connection, open_replies: dict[int, _Reply]) -> None:
        self._slot = slot
        self._connection = connection
        self._open_replies = open_replies
        self._lock = threading.Lock()
        self._over = False
        self.is_gone = False

    def send(self, chunk: AudioChunk) -> None:
        frame = audio_frame(self._slot, outputs_of(chunk))
        with self._lock:
            if not self._over:  # false if the utterance was cancelled while the chunk was computed
                self._send(frame)

    def finish(self) -> None:
        self._end(finished_frame(self._slot))

    def fail(self, error: Token2WavError) -> None:
        status = STATUS_NUMBERS[status_of(error)]
        self._end(failed_frame(FailedFrame(self._slot, status, str(error))))

    def is_cancelled(self) -> bool:
        return self.is_gone

    def _end(self, last_frame: bytes) -> None:
        with self._lock:
            if not self._over:
                self._over = True
                self._open_replies.pop(self._slot, None)
                self._send(last_frame)

    def _send(self, frame: bytes) -> None:
        self._connection.send(frame)
        if self._connection.unsent > MOST_UNSENT:
            log.error("the front does not read, so it is disconnected")
            self._connection.close()

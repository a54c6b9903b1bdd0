"""Front in Python: a model of Triton's Python backend that forwards requests to the engine.

It runs wherever Triton's Python backend runs, and needs no compiler. `front/native/` is the same in
C++, and takes in more requests a second.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple

import triton_python_backend_utils as pb_utils

from token2wav.errors import InputError
from token2wav_server.engine.connection import MOST_UNSENT, Connection
from token2wav_server.engine.frames import (
    AUDIO,
    FAILED,
    FINISHED,
    LARGEST_FRAME,
    STATUS_NUMBERS,
    VERSION,
    FrameError,
    RequestFrame,
    cancelled_frame,
    parse_audio,
    parse_failed,
    parse_ready,
    parse_slot,
    request_frame,
)
from token2wav_server.triton_reply import TritonReply
from token2wav_server.triton_tensors import inputs_of

ENGINE_VARIABLE = "TOKEN2WAV_ENGINE"  # path of the engine's socket, in the environment
_START_S = 600.0  # longest time in which the engine loads its model
_READY_S = 5.0  # longest time in which a connected engine sends its first frame
_RECONNECT_S = 0.1
# Each check for a cancellation is a message to Triton.
_CANCEL_POLL_S = 0.05
_MOST_CHECKS_PER_S = 1000
_START = 1  # flag of the first request of a sequence
_LONGEST_ID = 65535  # bytes of a sequence id in a frame
_FINISHERS = 4  # threads that send final responses
_STATUS_NAMES = {number: name for name, number in STATUS_NUMBERS.items()}


class _Failure(NamedTuple):
    """Error for a client, with the name of Triton's status code."""

    status: str
    text: str


_ENDED = _Failure("UNAVAILABLE", "engine: its process has ended; send the utterance again")
_STARTING = _Failure(
    "UNAVAILABLE", "engine: it is starting; send the utterance again in some seconds"
)
_SLOW = _Failure("UNAVAILABLE", "engine: it does not read fast enough; send the utterance again")
_STOPPING = _Failure("UNAVAILABLE", "server: it is shutting down; try another one")


class PythonFront:
    """Front of the engine. An environment variable names the socket of the engine.

    Args:
        instance: name of the model's instance, as Triton gives it: token2wav_0_0 for the first one.

    Raises:
        TritonModelException: the model has several instances; no socket is named; or the engine was
            not ready in time, or has another version.
    """

    def __init__(self, instance: str) -> None:
        if not instance.endswith("_0_0"):
            raise pb_utils.TritonModelException(
                "instance_group: the model has one instance; set its count to 1"
            )
        if ENGINE_VARIABLE not in os.environ:
            raise pb_utils.TritonModelException(
                f"engine: {ENGINE_VARIABLE} does not name its socket"
            )
        self._path = os.environ[ENGINE_VARIABLE]
        # Open replies by slot, each with the key of its utterance: its sequence id, or the slot.
        self._replies: dict[int, tuple[TritonReply, int | str]] = {}
        self._next_slot = 1
        # The engine ignores the cancellation of a request that it does not have yet.
        self._last_forwarded = 0
        # Calls that send final responses, then None, for each thread that sends them. The sender
        # waits until Triton has acknowledged a final response, so neither the reader nor `execute`
        # sends it. A pool of threads would take longer to pass a call on. An utterance has one of
        # the threads, which keeps the order of its responses.
        self._endings: list[SimpleQueue[Callable[[], None] | None]] = [
            SimpleQueue() for _ in range(_FINISHERS)
        ]
        self._is_open = True
        deadline = time.monotonic() + _START_S
        while (engine := _connected(self._path)) is None:
            if time.monotonic() > deadline:
                raise pb_utils.TritonModelException(
                    f"engine: not ready on {self._path} after {_START_S:g} s"
                )
            time.sleep(_RECONNECT_S)
        self._engine: _Engine | None = engine
        self._threads = [
            threading.Thread(target=work, name=f"front-{work.__name__}", daemon=True)
            for work in (self._read, self._watch)
        ]
        self._threads += [
            threading.Thread(target=_run, args=(calls,), name="front-finish", daemon=True)
            for calls in self._endings
        ]
        for thread in self._threads:
            thread.start()

    def execute(self, requests: list[Any]) -> None:
        """Forwards requests. Other threads send their responses later."""
        for request in requests:
            slot, self._next_slot = self._next_slot, self._next_slot + 1
            # The reader first sets the engine to None, and then fails all replies. So it fails this
            # reply too, if the engine ends after the reply was added.
            self._replies[slot] = TritonReply(request), request.correlation_id() or -slot
            engine = self._engine
            try:
                if engine is not None:
                    failure = engine.forward(slot, request)
                else:  # the utterance of a further request ended with its engine
                    failure = _ENDED if _is_further(request) else _STARTING
            except InputError as error:
                failure = _Failure("INVALID_ARG", str(error))
            except Exception as error:  # else the reply would stay open
                failure = _Failure("INTERNAL", f"request: {type(error).__name__}: {error}")
            if failure is not None:
                self._fail(slot, failure)
            self._last_forwarded = slot

    def close(self) -> None:
        """Disconnects from the engine. Open requests get an error."""
        self._is_open = False
        if (engine := self._engine) is not None:
            engine.connection.close()
        reader, watcher, *finishers = self._threads
        reader.join()
        for calls in self._endings:
            calls.put(None)
        for thread in (watcher, *finishers):
            thread.join()

    def _read(self) -> None:
        """Reads the frames of one engine after another."""
        engine = self._engine
        while self._is_open:
            if engine is not None:
                try:
                    for frame in engine.frames:
                        self._take(frame)
                except FrameError as error:
                    pb_utils.Logger.log_error(f"a frame of the engine cannot be read: {error}")
                self._engine = None
                engine.connection.close()
                failure = _ENDED if self._is_open else _STOPPING
                for slot in list(self._replies):
                    self._fail(slot, failure)
            else:
                time.sleep(_RECONNECT_S)
            self._engine = engine = self._next_engine() if self._is_open else None

    def _next_engine(self) -> _Engine | None:
        try:
            return _connected(self._path)
        except pb_utils.TritonModelException as error:
            pb_utils.Logger.log_error(str(error))
            time.sleep(_READY_S)  # a restart of tritonserver may be needed
            return None

    def _take(self, frame: bytearray) -> None:
        kind = frame[0]
        if kind == AUDIO:
            slot, outputs = parse_audio(frame)
            if (open_reply := self._replies.get(slot)) is not None:
                try:
                    open_reply[0].send_outputs(outputs)
                except Exception as error:  # no room in /dev/shm, for example
                    self._fail(slot, _Failure("INTERNAL", f"response: {error}"))
                    self._cancel(slot)
        elif kind == FINISHED:
            if (open_reply := self._replies.pop(parse_slot(frame), None)) is not None:
                reply, key = open_reply
                self._end(key, reply.finish)
        elif kind == FAILED:
            failed = parse_failed(frame)
            self._fail(failed.slot, _Failure(_STATUS_NAMES[failed.status], failed.text))
        else:
            raise FrameError(f"the kind {kind} is unknown")

    def _cancel(self, slot: int) -> None:
        if (engine := self._engine) is not None:
            engine.connection.send(cancelled_frame(slot))

    def _end(self, key: int | str, ending: Callable[[], None]) -> None:
        self._endings[hash(key) % _FINISHERS].put(ending)

    def _fail(self, slot: int, failure: _Failure) -> None:
        # Several threads may fail one reply, but `pop` gives it to a single thread.
        if (open_reply := self._replies.pop(slot, None)) is not None:
            reply, key = open_reply
            self._end(key, partial(reply.fail_with, *failure))

    def _watch(self) -> None:
        """Tells the engine of clients that have cancelled or vanished.

        Only the oldest open reply of an utterance is checked, because all replies of an utterance
        have the same client.
        """
        reported: set[int] = set()
        pause_s = _CANCEL_POLL_S
        while self._is_open:
            time.sleep(pause_s)
            last_forwarded = self._last_forwarded
            replies = {
                slot: reply for slot, reply in dict(self._replies).items() if slot <= last_forwarded
            }
            reported &= replies.keys()
            oldest: dict[int | str, int] = {}
            for slot, (_, key) in replies.items():
                oldest.setdefault(key, slot)
            pause_s = max(_CANCEL_POLL_S, len(oldest) / _MOST_CHECKS_PER_S)
            cancelled = [
                slot
                for slot in oldest.values()
                if slot not in reported and _is_cancelled(replies[slot][0])
            ]
            reported.update(cancelled)
            for slot in cancelled:
                self._cancel(slot)


class _Engine:
    """Connection to an engine that is ready.

    Attributes:
        frames: frames of the engine, after the first one.
    """

    def __init__(self, connection: Connection, frames: Iterator[bytearray]) -> None:
        self.connection = connection
        self.frames = frames

    def forward(self, slot: int, request: Any) -> _Failure | None:
        """Sends a request to the engine; returns the reason if it is refused."""
        sequence_id = request.correlation_id()
        if isinstance(sequence_id, str) and len(sequence_id.encode()) > _LONGEST_ID:
            return _Failure("INVALID_ARG", "request: its sequence id is too long")
        frame = request_frame(
            RequestFrame(
                slot,
                request.flags(),
                sequence_id,
                request.parameters(),
                inputs_of(request),
            )
        )
        if len(frame) > LARGEST_FRAME:
            return _Failure(
                "INVALID_ARG", f"request: {len(frame)} bytes; at most {LARGEST_FRAME} are allowed"
            )
        if self.connection.unsent > MOST_UNSENT:
            return _SLOW
        self.connection.send(frame)
        return None


def _is_further(request: Any) -> bool:
    """Returns whether a request belongs to a sequence, and is not the first one of it."""
    return bool(request.correlation_id()) and not request.flags() & _START


def _run(calls: SimpleQueue[Callable[[], None] | None]) -> None:
    """Makes calls until None comes."""
    while (call := calls.get()) is not None:
        _attempt(call)


def _attempt(call: Callable[..., object], *arguments: Any) -> None:
    """Calls a method of a reply, and logs its exception: the other replies have to go on."""
    try:
        call(*arguments)
    except Exception as error:
        pb_utils.Logger.log_warn(f"a response could not be sent: {error}")


def _is_cancelled(reply: TritonReply) -> bool:
    """Returns whether the client of a reply has gone; True if Triton cannot say."""
    try:
        return reply.is_cancelled()
    except Exception as error:
        pb_utils.Logger.log_warn(f"a request is taken as cancelled: {error}")
        return True


def _connected(path: str) -> _Engine | None:
    """Connects to the engine; returns None if it is not ready.

    Raises:
        TritonModelException: the engine has another version of the protocol.
    """
    connected = socket.socket(socket.AF_UNIX)
    connected.settimeout(_READY_S)  # also if the queue of the listener is full
    try:
        connected.connect(path)
    except OSError:
        connected.close()
        return None
    connection = Connection(connected)
    frames = connection.frames()
    try:
        version = None if (first := next(frames, None)) is None else parse_ready(first)
    except FrameError:
        version = None
    if version == VERSION:
        connected.settimeout(None)
        return _Engine(connection, frames)
    connection.close()
    if version is None:
        return None
    raise pb_utils.TritonModelException(
        f"engine: it speaks version {version} of the protocol, and this front version {VERSION}"
    )

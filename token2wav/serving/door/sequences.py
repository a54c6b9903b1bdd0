"""Sequences of a server: finds the open stream that a request continues, and checks its owner.

Triton (server 2.51) passes neither the connection nor the address of a request to a model. The
model gets only the sequence id, the parameters and the forwarded gRPC headers of a request. So a
stream is bound to two values of its first request:

- the client name, which a load balancer sets as a gRPC header
- the parameter `stream_key`, a secret that the client chooses

Every further request of the stream must have the same name and the same key.
"""

from __future__ import annotations

import hmac
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from token2wav.errors import InputError, StreamClosedError

SequenceId = int | str
StreamT = TypeVar("StreamT")

log = logging.getLogger(__name__)

CLIENT_HEADER = "x-token2wav-client"  # gRPC header with the client's name, from a load balancer
STREAM_KEY = "stream_key"
_NAME_CHARS = 128
_OPEN_TO_OTHERS = (
    "a stream without the request parameter stream_key, and without a client name from a balancer, "
    "can be continued by any client that knows its sequence id (docs/security.md)"
)
# Closed streams for which the reason of the end is stored, to answer later requests.
_REMEMBERED = 1024
# Contested ids that are refused, see `Sequences.start_twice`.
_MOST_CONTESTED = 4096


@dataclass(frozen=True)
class Owner:
    """Owner of a stream: the client that sent its first request.

    Two clients that send neither a name nor a key are the same owner.
    """

    client: str = ""  # name in the forwarded gRPC header; empty without a header
    stream_key: str = field(default="", repr=False)  # secret of the client; empty for no key

    @classmethod
    def of(cls, parameters: Mapping[str, Any]) -> Owner:
        """Reads the owner from the parameters of a message. Raises InputError if the client name or
        the key is not a string, or is longer than 128 characters; or if the key is empty.
        """
        # Triton stores the forwarded gRPC header as a parameter of this name, and replaces a
        # parameter that the client itself has sent under this name.
        client = parameters.get(CLIENT_HEADER, "")
        if not isinstance(client, str) or len(client) > _NAME_CHARS:
            raise InputError(CLIENT_HEADER, f"not a text of at most {_NAME_CHARS} characters")
        key = parameters.get(STREAM_KEY)
        if key is not None and not (isinstance(key, str) and 1 <= len(key) <= _NAME_CHARS):
            raise InputError(STREAM_KEY, f"not a text of 1 to {_NAME_CHARS} characters")
        return cls(client, key or "")

    def owns(self, other: Owner) -> bool:
        """Returns whether the other owner has the same client name and the same key.

        The keys are compared in constant time, so that the time does not reveal a part of the key.
        """
        same_key = hmac.compare_digest(self.stream_key.encode(), other.stream_key.encode())
        return same_key and self.client == other.client


_NOBODY = Owner()


class Sequences(Generic[StreamT]):
    """Registry of the open streams of a server, by sequence id. It is thread-safe.

    A sequence id is in use from the first request of a stream until its last request, or until the
    stream is closed. While the last audio is still being computed, the id is already free again.

    Args:
        contested_s: seconds without a request after which a contested id is free again.
    """

    def __init__(self, contested_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._contested_s = contested_s
        self._clock = clock
        # Time until which each contested id is refused, in the order of the latest requests.
        self._contested: OrderedDict[SequenceId, float] = OrderedDict()
        self._open: dict[SequenceId, tuple[Owner, StreamT]] = {}
        # Reason why a stream was closed, by sequence id, in the order of closing.
        self._closed: OrderedDict[SequenceId, str] = OrderedDict()
        self._warned = False  # about a stream without client name and key
        self._lock = threading.Lock()

    def started_by(self, sequence_id: SequenceId, owner: Owner) -> StreamT | None:
        """Finds the open stream that already has the sequence id of a first request.

        Returns:
            The stream, if it has the same owner; None if the id is free.

        Raises:
            InputError: a stream of another client has the id; or the owner has neither a name nor a
                key, and the id is contested.
        """
        with self._lock:
            if self._refuses(sequence_id) and owner == _NOBODY:
                raise self._contested_error(sequence_id)
            entry = self._open.get(sequence_id)
        if entry is None:
            return None
        if not owner.owns(entry[0]):
            raise InputError(
                "sequence_id",
                f"'{sequence_id}' is in use by an open stream of another client; choose another "
                f"id at random. Further "
                "requests with this id are refused too, until that stream is closed",
            )
        return entry[1]

    def add(self, sequence_id: SequenceId, owner: Owner, stream: StreamT) -> None:
        """Adds a stream under a free sequence id.

        A stream with an empty id is not added, because its only request is the whole utterance.
        The first stream without client name and key logs a warning.
        """
        if not sequence_id:
            return
        with self._lock:
            self._closed.pop(sequence_id, None)
            self._open[sequence_id] = owner, stream
            first_of_nobody = owner == _NOBODY and not self._warned
            self._warned |= first_of_nobody
        if first_of_nobody:
            log.warning(_OPEN_TO_OTHERS)

    def find(self, sequence_id: SequenceId, owner: Owner) -> StreamT:
        """Returns the open stream that a request continues.

        Raises:
            InputError: the stream belongs to another client.
            StreamClosedError: no open stream has this id. The message gives the reason if it is
                known.
        """
        with self._lock:
            self._refuses(sequence_id)
            entry, reason = self._open.get(sequence_id), self._closed.get(sequence_id)
        if entry is None:
            raise StreamClosedError(
                reason
                or (
                    f"sequence_id: '{sequence_id}' is no open stream; the stream was closed "
                    "long ago, or its first request had no sequence_start"
                )
            )
        if not owner.owns(entry[0]):
            raise InputError(
                "sequence_id",
                f"'{sequence_id}' is an open stream of another client, because the client "
                "name or stream_key of this request differs from the first request",
            )
        return entry[1]

    def remove(self, sequence_id: SequenceId, stream: StreamT, reason: str) -> None:
        """Frees the sequence id of a stream, unless another stream has taken the id since.

        Args:
            reason: reason of the end. It becomes the error message for later requests with this id.
        """
        with self._lock:
            if (entry := self._open.get(sequence_id)) is None or entry[1] is not stream:
                return
            del self._open[sequence_id]
            self._closed[sequence_id] = reason
            if len(self._closed) > _REMEMBERED:
                self._closed.popitem(last=False)

    def start_twice(self, sequence_id: SequenceId, owner: Owner) -> InputError:
        """Returns the error for an owner that starts a sequence id again while the stream is open.

        The caller closes the stream, and refuses the new request, with this error. Two clients that
        send neither a name nor a key look like one owner. The first client may not have noticed
        that its stream is closed, so it may still send tokens. If the second client could start the
        id now, these tokens would become its audio. Therefore the id is contested: until nobody has
        sent a request with it for `contested_s`, owners without name and key cannot start it.
        """
        if owner != _NOBODY:
            return InputError(
                "sequence_id",
                f"'{sequence_id}' was started a second time while its stream was open, so the "
                "stream was closed",
            )
        with self._lock:
            self._contest(sequence_id)
        return self._contested_error(sequence_id)

    def _contest(self, sequence_id: SequenceId) -> None:
        self._contested[sequence_id] = self._clock() + self._contested_s
        self._contested.move_to_end(sequence_id)
        if len(self._contested) > _MOST_CONTESTED:
            self._contested.popitem(last=False)

    def _refuses(self, sequence_id: SequenceId) -> bool:
        """Returns whether an id is contested. If it is, the time of the refusal starts again."""
        until = self._contested.get(sequence_id)
        if until is None:
            return False
        if self._clock() < until:
            self._contest(sequence_id)
            return True
        del self._contested[sequence_id]
        return False

    def _contested_error(self, sequence_id: SequenceId) -> InputError:
        return InputError(
            "sequence_id",
            f"'{sequence_id}' was started a second time while its stream was open, by a client "
            "that sent no stream_key, so the stream was closed. The id is refused until nobody has "
            f"sent it for {self._contested_s:g} s; choose another id at random, and send a "
            "stream_key with each request",
        )

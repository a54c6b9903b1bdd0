"""Sequences of a server: each request finds the open stream that it continues, and only the owner's
requests do.

Triton gives a model neither the connection nor the address that a request came from (server 2.51).
A request carries its sequence id, its parameters and the gRPC headers that the server forwards. So
a stream is bound to two values of its first request: the client name, which a balancer sets as a
header, and the parameter `stream_key`, a secret that the client makes up. Every further request
must have the same two.
"""

from __future__ import annotations

import hmac
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from token2wav.errors import InputError, StreamClosedError

SequenceId = int | str
StreamT = TypeVar("StreamT")

_REMEMBERED = 1024  # ids of streams that are closed


@dataclass(frozen=True)
class Owner:
    """Owner of a stream: the client that sent its first request, as far as requests identify a
    client.

    Attributes:
        client: name in the forwarded gRPC header; empty without one.
        stream_key: secret of the client for this stream; empty without one.
    """

    client: str = ""
    stream_key: str = field(default="", repr=False)

    def owns(self, other: Owner) -> bool:
        """Returns whether a request with this client name and key belongs to the same client as
        another request.
        """
        same_key = hmac.compare_digest(self.stream_key.encode(), other.stream_key.encode())
        return same_key and self.client == other.client


class Sequences(Generic[StreamT]):
    """Open streams of a server by their sequence ids; several threads may use it.

    A sequence id is taken from the first request of a stream until its last request, or until the
    stream is closed. It is free while the last audio is still being computed.
    """

    def __init__(self) -> None:
        self._open: dict[SequenceId, tuple[Owner, StreamT]] = {}
        # the reason, by id; the latest last
        self._closed: OrderedDict[SequenceId, str] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._open)

    def items(self) -> list[tuple[SequenceId, StreamT]]:
        """Returns the open streams with their ids, at this moment."""
        with self._lock:
            return [(sequence_id, stream) for sequence_id, (_, stream) in self._open.items()]

    def started_by(self, sequence_id: SequenceId, owner: Owner) -> StreamT | None:
        """Returns the open stream that a second first request of the same owner meets; None if the
        id is free.

        Raises:
            InputError: the id is in use by a stream of another client.
        """
        with self._lock:
            found = self._open.get(sequence_id)
        if found is None:
            return None
        if not owner.owns(found[0]):
            raise InputError(
                "sequence_id",
                f"'{sequence_id}' is in use by an open stream of another client; choose another "
                f"id at random. Further "
                "requests with this id are refused too, until that stream is closed",
            )
        return found[1]

    def add(self, sequence_id: SequenceId, owner: Owner, stream: StreamT) -> None:
        """Adds a stream under a free id; a whole utterance, which has no id, needs none."""
        if sequence_id:
            with self._lock:
                self._closed.pop(sequence_id, None)
                self._open[sequence_id] = owner, stream

    def find(self, sequence_id: SequenceId, owner: Owner) -> StreamT:
        """Returns the open stream that a request continues.

        Raises:
            InputError: the stream belongs to another client.
            StreamClosedError: there is no open stream with this id; the message gives the reason if
                it is known.
        """
        with self._lock:
            found, reason = self._open.get(sequence_id), self._closed.get(sequence_id)
        if found is None:
            raise StreamClosedError(
                reason
                or f"sequence_id: '{sequence_id}' is no open stream; it was closed long ago, or its first request had "
                "no sequence_start"
            )
        if not owner.owns(found[0]):
            raise InputError(
                "sequence_id",
                f"'{sequence_id}' is an open stream of another client: the client name or "
                f"stream_key of this request "
                "is not that of the first request",
            )
        return found[1]

    def remove(self, sequence_id: SequenceId, stream: StreamT, reason: str) -> None:
        """Frees the id of a stream, unless another stream has taken it since; later requests are
        told the reason.
        """
        with self._lock:
            if (found := self._open.get(sequence_id)) is None or found[1] is not stream:
                return
            del self._open[sequence_id]
            self._closed[sequence_id] = reason
            if len(self._closed) > _REMEMBERED:
                self._closed.popitem(last=False)


OPEN_TO_OTHERS = (
    "a stream without the request parameter stream_key, and without a client name from a "
    "balancer, can be continued by "
    "any client that knows its sequence id (docs/security.md)"
)


def started_twice(sequence_id: SequenceId) -> InputError:
    """Makes the error that closes a stream whose owner sends a second first request, and that
    refuses this request.

    Two clients that send neither a name nor a key are one owner to the server. To close the stream
    is then the only answer that keeps the tokens of one client out of the audio of the other.
    """
    return InputError(
        "sequence_id",
        f"'{sequence_id}' was started a second time while its stream was open, and the stream is "
        f"closed; choose ids at "
        "random, and send a stream_key with each request",
    )

"""Base of both clients: settings, open utterances and the retry policy."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Generic, TypeVar
from weakref import WeakSet

import grpc
from tenacity import (
    RetryCallState,
    retry_if_exception,
    stop_after_attempt,
    wait_exponential,
    wait_random,
)
from tritonclient.grpc import service_pb2, service_pb2_grpc

from token2wav_client.call import Call
from token2wav_client.connection import Tls, checked_headers, checked_metadata, open_channel
from token2wav_client.errors import (
    ClientError,
    InputError,
    ModelNotReadyError,
    UtteranceClosedError,
    error_of_rpc,
)
from token2wav_client.utterance import BaseUtterance
from token2wav_client.wire import Opening

# Time that the thread or task which sends batches has to end after its utterance has ended.
SENDER_GRACE_S = 0.5
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 4.0
_JITTER_S = 0.5  # spreads the retries of clients that lost the same server at the same moment

logger = logging.getLogger("token2wav_client")
living_clients: WeakSet[Any] = WeakSet()

UtteranceT = TypeVar("UtteranceT", bound=BaseUtterance)


class BaseClient(Generic[UtteranceT]):
    """Base of the clients for threads and asyncio: settings, connection and open utterances. Raises
    InputError if an argument is invalid; the message names it.

    Args:
        url: host:port of the server's gRPC endpoint.
        connect_timeout_s: seconds in which the server must answer the question whether the model is
            ready. The client asks it before its first utterance.
        response_timeout_s: seconds without a response that are allowed while the server owes one.
            Time in which the server waits for tokens from the client does not count, and time in
            which a listener still plays delivered audio does not count either, because a busy
            server computes other streams first.
        retries: further attempts if no server answers, the connection is lost, the server
            sends nothing for too long, or the server is full. It applies to the question whether
            the model is ready, and to each utterance. Pauses grow from 0.5 to 4 s. An utterance is
            sent again from its start. Audio that was already delivered is not delivered again.
        tls: settings of an encrypted connection; None sends everything unencrypted.
        headers: headers of every call, for a proxy in front of the server.
        token: access token, sent as `authorization: Bearer ...`. It is accepted only with TLS or
            for a server on this machine.
        max_message_mib: largest size of a request or a response in MiB.
        keepalive_s: seconds between pings of an idle connection during an utterance, 2 to 86400; 0
            for none. Pings keep proxies from closing the connection while no tokens are sent.
            Without an answer within 20 s the connection counts as lost.
    """

    _library: Any  # grpc or grpc.aio, which opens the channel
    _kind: type[UtteranceT]

    def __init__(
        self,
        url: str = "localhost:8001",
        *,
        model: str = "token2wav",
        connect_timeout_s: float = 5.0,
        response_timeout_s: float = 30.0,
        retries: int = 0,
        tls: Tls | None = None,
        headers: Mapping[str, str] | None = None,
        token: str | None = None,
        max_message_mib: int = 64,
        keepalive_s: float = 0.0,
    ) -> None:
        self._metadata = checked_metadata(url, tls, headers or {}, token)
        self._url = url
        self._model = model
        self._connect_timeout_s = connect_timeout_s
        self._response_timeout_s = response_timeout_s
        if retries < 0:
            raise InputError(f"retries: {retries} sent; must be 0 or more")
        self._retries = retries
        self._model_seen_ready = False
        self._closed = threading.Event()
        # Open utterances. Threads need no lock, because each access is one atomic operation of a
        # set.
        self._utterances: set[UtteranceT] = set()
        self._channel = open_channel(self._library, url, tls, max_message_mib, keepalive_s)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        living_clients.add(self)

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise UtteranceClosedError(
                "the client is closed; create a new client to open another utterance"
            )

    def _new_utterance(
        self, opening: Opening, retries: int, timeout_s: float | None = None
    ) -> UtteranceT:
        """Opens an utterance. If `timeout_s` is not None, gRPC ends it after this many seconds."""
        self._check_open()
        headers = opening.headers or {}
        metadata = self._metadata + checked_headers(headers)
        if twice := {name for name, _ in self._metadata}.intersection(map(str.lower, headers)):
            raise InputError(f"headers: {min(twice)} is a header of the client already")
        utterance = self._kind(
            partial(self._stub.ModelStreamInfer, timeout=timeout_s, metadata=metadata),
            Call(self._model, opening, repeatable=retries > 0),
            url=self._url,
            response_timeout_s=self._response_timeout_s,
            retries=retries,
            on_close=self._utterances.discard,
        )
        self._utterances.add(utterance)
        if self._closed.is_set():  # by another thread meanwhile, which may have missed it
            utterance.cancel()
            self._utterances.discard(utterance)
            self._check_open()
        return utterance

    def _ask(self, question: str) -> Any:
        """Calls `ModelReady`, `ModelMetadata` or `ModelConfig` on the server.

        Returns:
            The response; in the client for asyncio, an awaitable of the response.
        """
        self._check_open()
        request = getattr(service_pb2, f"{question}Request")(name=self._model)
        return getattr(self._stub, question)(
            request, timeout=self._connect_timeout_s, metadata=self._metadata
        )

    def _note_ready(self, answer: Any) -> None:
        if not answer.ready:
            raise ModelNotReadyError(
                f"model {self._model!r} at {self._url} is not ready: it is missing, still "
                "loading, or failed to load"
            )
        self._model_seen_ready = True

    @contextmanager
    def _grpc_errors(self) -> Iterator[None]:
        """Context manager that converts errors of gRPC into errors of this package."""
        try:
            yield
        except grpc.RpcError as error:
            raise error_of_rpc(error, self._url) from None


def retry_policy(retries: int) -> dict[str, Any]:
    """Returns the retry policy of clients, as arguments for tenacity's Retrying or AsyncRetrying.

    The policy retries after errors whose attribute `transient` is true. The pauses are 0.5, 1, 2
    and then 4 s, each with up to half a second more. Every retry logs a warning.
    """

    def log_retry(attempt: RetryCallState) -> None:
        error = attempt.outcome.exception() if attempt.outcome else None
        pause_s = attempt.next_action.sleep if attempt.next_action else 0.0
        logger.warning(
            "%s; retry %d of %d in %.1f s", error, attempt.attempt_number, retries, pause_s
        )

    return {
        "stop": stop_after_attempt(retries + 1),
        "wait": wait_exponential(_FIRST_PAUSE_S, _LONGEST_PAUSE_S) + wait_random(0, _JITTER_S),
        "retry": retry_if_exception(
            lambda error: isinstance(error, ClientError) and error.transient
        ),
        "before_sleep": log_retry,
        "reraise": True,
    }

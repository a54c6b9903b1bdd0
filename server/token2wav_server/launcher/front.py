"""Reverse proxy in front of tritonserver's HTTP and metrics services, which admits few requests.

A client can crash Triton's own HTTP parser: server 2.51 crashes on a form of 4.2 MB (half the
size of its stack) that is sent to any path (docs/security.md). So Triton's HTTP and metrics
services listen only on the loopback interface. The proxy parses each request from outside, compares
it with a short list of allowed requests, checks its size, and sends a new request to Triton.
"""

from __future__ import annotations

import asyncio
import hmac
import re
from collections.abc import Callable

import aiohttp
from aiohttp import web
from yarl import URL

from token2wav_server.launcher.access import KEY_NAME, Access
from token2wav_server.launcher.http_ports import CONNECTIONS, PATIENCE_S, HttpPorts, refusal
from token2wav_server.launcher.metrics_folder import MetricsFolder
from token2wav_server.launcher.ports import LOOPBACK, Ports, listening
from token2wav_server.launcher.utterance_body import problem_of

# Largest body. A whole utterance at the default limits is 2.6 MB of JSON: 15,000 tokens and a voice
# of 30 s in the request.
BODY_BYTES = 3 * 1024 * 1024
_READING_S = 60.0  # time for a client to read a chunk, while it may play audio
_SILENCE_S = 300.0  # longest time between two chunks of tritonserver
# Largest number of utterances at a time. The other connections are reserved for health and
# metadata.
_UTTERANCES = CONNECTIONS * 3 // 4

_MODEL = r"/v2/models/[A-Za-z0-9_][A-Za-z0-9_.-]*(?:/versions/[0-9]+)?"
_INFORMATION_PATH = re.compile(
    rf"/v2|/v2/health/(?:live|ready)|{_MODEL}(?:/(?:ready|config|stats))?"
)
_INFERENCE_PATH = re.compile(
    rf"{_MODEL}/(?:generate_stream|infer(?:\?request_id=[A-Za-z0-9_-]{{1,64}})?)"
)
_METRICS_PATH = re.compile(r"/metrics")


class Front(HttpPorts):
    """Reverse proxy for the allowed requests, with limits; use it as a context manager.

    Args:
        ports: ports to listen on, of which the proxy uses HTTP and metrics.
        inner: ports of tritonserver's HTTP and metrics services on the loopback interface.
        metrics: metrics of the model processes, which follow Triton's own.

    Raises:
        PortInUseError: a port cannot be listened on.
    """

    def __init__(
        self, host: str, ports: Ports, inner: Ports, access: Access, metrics: MetricsFolder
    ) -> None:
        super().__init__(
            {
                listening(host, ports.http, "http"): self._http,
                listening(host, ports.metrics, "metrics"): self._metrics,
            }
        )
        self._inner = inner
        self._access = access
        self._metrics_folder = metrics
        self._utterances = asyncio.Semaphore(_UTTERANCES)

    async def _metrics(self, request: web.BaseRequest) -> web.StreamResponse:
        # If Triton does not answer, neither does this port. Then Prometheus' own metric `up` is 0,
        # and no series of this server looks alive.
        return await self._answer_question(
            request, _METRICS_PATH, self._inner.metrics, self._metrics_folder.text
        )

    async def _http(self, request: web.BaseRequest) -> web.StreamResponse:
        if not _INFERENCE_PATH.fullmatch(request.raw_path):
            return await self._answer_question(request, _INFORMATION_PATH, self._inner.http)
        if request.method != "POST":
            return refusal(405, "this path accepts only POST requests")
        key = request.headers.get(KEY_NAME, "").encode(errors="replace")
        if not (
            self._access.http_inference or hmac.compare_digest(key, self._access.admin_key.encode())
        ):
            return refusal(
                403,
                "inference over HTTP is disabled: use gRPC, start the server with "
                f"--http-inference, or send the header {KEY_NAME}",
            )
        size = request.content_length
        if not size or "Transfer-Encoding" in request.headers:
            return refusal(
                411, "the request needs a body with Content-Length and without Transfer-Encoding"
            )
        if size > BODY_BYTES:
            return refusal(
                413,
                f"the body has {size} bytes; at most {BODY_BYTES} are allowed, so use gRPC",
            )
        if "Content-Encoding" in request.headers:
            return refusal(415, "the body must not be compressed")
        if "Expect" in request.headers:
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            # The writer counts this line as output. Reset the count, so that an error response
            # can still be sent.
            request.writer.output_size = 0
        try:
            body = await asyncio.wait_for(request.content.readexactly(size), PATIENCE_S)
        except asyncio.TimeoutError:
            return refusal(408, f"the body did not arrive within {PATIENCE_S:g} s")
        headers = {"Content-Type": "application/json", KEY_NAME: self._access.admin_key}
        if self._utterances.locked():
            return refusal(
                503,
                f"utterances: {_UTTERANCES} requests over HTTP are open, which is the "
                "limit; try again later",
            )
        async with self._utterances:
            # The check of a large body takes a second. Meanwhile others are answered.
            if problem := await asyncio.to_thread(problem_of, body):
                return refusal(400, problem)
            return await _relay(request, self._inner.http, headers, body)

    async def _answer_question(
        self,
        request: web.BaseRequest,
        paths: re.Pattern[str],
        port: int,
        appendix: Callable[[], bytes] = bytes,
    ) -> web.StreamResponse:
        """Answers a GET request without a body, if its path is one of the allowed paths."""
        if not paths.fullmatch(request.raw_path):
            return refusal(403, "this path is not available over HTTP")
        if request.method != "GET":
            return refusal(405, "this path accepts only GET requests")
        return await _relay(request, port, {}, appendix=appendix)


async def _relay(
    request: web.BaseRequest,
    port: int,
    headers: dict[str, str],
    body: bytes | None = None,
    appendix: Callable[[], bytes] = bytes,
) -> web.StreamResponse:
    """Sends a new request to tritonserver, and relays its response to the client as it arrives.

    Only the method and the path of the client's request are passed on. The appendix follows
    tritonserver's text.
    """
    response = web.StreamResponse()
    response.force_close()
    try:
        async with aiohttp.request(
            request.method,
            URL(f"http://{LOOPBACK}:{port}{request.raw_path}", encoded=True),
            data=body,
            headers=headers | {"Accept-Encoding": "identity"},
            allow_redirects=False,
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=PATIENCE_S, sock_read=_SILENCE_S
            ),
        ) as upstream:
            response.set_status(upstream.status)
            response.headers["Content-Type"] = upstream.headers.get("Content-Type", "text/plain")
            await response.prepare(request)
            async for part in upstream.content.iter_any():
                await asyncio.wait_for(response.write(part), _READING_S)
            await asyncio.wait_for(response.write_eof(appendix()), _READING_S)
    except (aiohttp.ClientError, asyncio.TimeoutError) as error:
        if response.prepared:
            raise ConnectionError("the response of Triton broke off") from error
        return refusal(
            503, "the server does not respond, because it is starting or stopping; try again later"
        )
    return response

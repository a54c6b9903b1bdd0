"""Command `token2wav-gateway`: reads the settings, and serves until it is stopped."""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import secrets
import signal
import socket
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import uvicorn
from fastapi import FastAPI
from prometheus_client import start_http_server

from token2wav_gateway.app import create_app
from token2wav_gateway.errors import GatewayError
from token2wav_gateway.log import configure_log
from token2wav_gateway.metrics import Metrics
from token2wav_gateway.settings import read_settings
from token2wav_gateway.sockets import Sockets

DRAIN_S = 30
_POLL_S = 0.1


class DrainingServer(uvicorn.Server):
    """Server that lets open requests and WebSockets finish before it ends.

    uvicorn alone closes WebSockets at once, in the middle of their sentences.

    Args:
        config: configuration of uvicorn.
        app: application of the gateway.
    """

    def __init__(self, config: uvicorn.Config, app: FastAPI) -> None:
        super().__init__(config)
        self._app = app

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for listener in self.servers:
            listener.close()
        deadline = time.monotonic() + DRAIN_S
        open_sockets: Sockets = self._app.state.sockets
        open_sockets.drain()
        while open_sockets.count and time.monotonic() < deadline and not self.force_exit:
            await asyncio.sleep(_POLL_S)
        self.config.timeout_graceful_shutdown = max(1, round(deadline - time.monotonic()))
        await super().shutdown(sockets)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code: 0 after a normal stop, 2 for wrong settings."""
    parser = argparse.ArgumentParser(
        prog="token2wav-gateway",
        description="Serve speech with the interfaces of OpenAI, in front of a language model "
        "server and of the Triton model token2wav.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {version('token2wav')}")
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings (YAML)")
    parser.add_argument("--host", default="127.0.0.1", help="address (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8080, help="port (default: %(default)s)")
    parser.add_argument(
        "--metrics-port",
        type=int,
        default=0,
        help="port of the metrics (default: 0, no metrics)",
    )
    parser.add_argument(
        "--new-key", action="store_true", help="print a new access key with its SHA-256, and end"
    )
    options = parser.parse_args(arguments)
    if options.new_key:
        key = secrets.token_urlsafe(32)
        print(f"key: {key}\nsha256: {hashlib.sha256(key.encode()).hexdigest()}")
        return 0
    try:
        settings = read_settings(options.config)
        metrics = Metrics()
        app = create_app(settings, metrics)
    except GatewayError as error:
        print(f"token2wav-gateway: {error}", file=sys.stderr)
        return 2
    configure_log(settings.log_level)
    if options.metrics_port:
        try:
            start_http_server(options.metrics_port, options.host, metrics.registry)
        except OSError as error:
            print(
                f"token2wav-gateway: metrics port {options.metrics_port}: {error.strerror}",
                file=sys.stderr,
            )
            return 2
    config = uvicorn.Config(
        app,
        host=options.host,
        port=options.port,
        log_config=None,
        access_log=False,
        http="h11",  # httptools, which uvicorn prefers if it is installed, does not bound headers
        ws_max_size=settings.limits.body_bytes,
        h11_max_incomplete_event_size=64 << 10,
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        # uvicorn drains at a signal, and then raises it again.
        signal.signal(number, lambda *_: sys.exit(0))
    asyncio.run(DrainingServer(config, app).serve())
    return 0


if __name__ == "__main__":
    sys.exit(main())

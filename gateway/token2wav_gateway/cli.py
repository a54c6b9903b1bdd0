"""Command `token2wav-gateway`: reads the settings, and serves until it is stopped."""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import logging
import secrets
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import uvicorn
from prometheus_client import start_http_server

from token2wav_gateway.app import create_app
from token2wav_gateway.errors import GatewayError
from token2wav_gateway.metrics import Metrics
from token2wav_gateway.settings import read_settings

DRAIN_S = 30


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
    logging.basicConfig(
        level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    if options.metrics_port:
        start_http_server(options.metrics_port, options.host, metrics.registry)
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            host=options.host,
            port=options.port,
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=DRAIN_S,
            ws_max_size=settings.limits.body_bytes,
            h11_max_incomplete_event_size=64 << 10,
        )
    )
    asyncio.run(server.serve())
    return 0


if __name__ == "__main__":
    sys.exit(main())

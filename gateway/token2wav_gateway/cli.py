"""Command `token2wav gateway`: reads the settings, and serves until it is stopped."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import secrets
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from prometheus_client import start_http_server

from token2wav.commands import CommandParser
from token2wav_gateway.app import create_app
from token2wav_gateway.errors import GatewayError
from token2wav_gateway.log import configure_log
from token2wav_gateway.metrics import Metrics
from token2wav_gateway.server import BoundedConfig, DrainingServer
from token2wav_gateway.settings import SettingsError, read_settings
from token2wav_gateway.tracing import configure_tracing

PROGRAM = "token2wav gateway"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code: 0 after a normal stop, 2 for wrong settings."""
    options = parser().parse_args(arguments)
    if options.new_key:
        key = secrets.token_urlsafe(32)
        print(f"key: {key}\nsha256: {hashlib.sha256(key.encode()).hexdigest()}")
        return 0
    try:
        settings = read_settings(options.config)
        configure_tracing()
        metrics = Metrics()
        app = create_app(settings, metrics)
        config = BoundedConfig(
            app,
            settings.limits,
            host=options.host,
            port=options.port,
            riva_port=options.riva_port,
        )
    except GatewayError as error:
        return _refuse(error)
    configure_log(settings.log_level)
    if options.metrics_port:
        try:
            start_http_server(options.metrics_port, options.host, metrics.registry)
        except OSError as error:
            return _refuse(f"metrics port {options.metrics_port}: {error.strerror}")
    for number in (signal.SIGINT, signal.SIGTERM):
        # uvicorn drains at a signal, and then raises it again.
        signal.signal(number, lambda *_: sys.exit(0))
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as with `nohup`
        signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))
    gc.freeze()  # a collection does not visit the objects of libraries, which would take 50 ms
    try:
        asyncio.run(DrainingServer(config, app).serve())
    except SettingsError as error:
        return _refuse(error)
    return 0


def _refuse(reason: object) -> int:
    print(f"{PROGRAM}: {reason}", file=sys.stderr)
    return 2


def parser() -> CommandParser:
    """Returns the parser of `token2wav gateway`."""
    parser = CommandParser(
        prog=PROGRAM,
        description="Serve speech with the interfaces of OpenAI, in front of a language model "
        "server and of the Triton model token2wav.",
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings (YAML)")
    parser.add_argument("--host", default="127.0.0.1", help="address (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8080, help="port (default: %(default)s)")
    parser.add_argument(
        "--riva-port",
        type=int,
        default=0,
        help="port of Riva's gRPC interface, usually 50051 (default: 0, no such interface)",
    )
    parser.add_argument(
        "--metrics-port",
        type=int,
        default=0,
        help="port of the metrics (default: 0, no metrics)",
    )
    parser.add_argument(
        "--new-key", action="store_true", help="print a new access key with its SHA-256, and end"
    )
    return parser

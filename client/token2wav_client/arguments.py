"""Command-line arguments that commands share: add those that reach a server, read numbers with bounds."""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path

from token2wav_client.client import Client
from token2wav_client.connection import Tls
from token2wav_client.errors import InputError

TOKEN_VARIABLE = "TOKEN2WAV_TOKEN"


def add_connection(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that `client_of` needs, except `--timeout`, which each command defines."""
    server = parser.add_argument_group("server")
    server.add_argument(
        "--url", default="localhost:8001", metavar="HOST:PORT", help="gRPC endpoint (default: %(default)s)"
    )
    server.add_argument("--model", default="token2wav", metavar="NAME", help="default: %(default)s")
    server.add_argument(
        "--connect-timeout",
        type=positive,
        default=5.0,
        metavar="S",
        help="seconds in which the server must say that it is there (default: %(default)g)",
    )
    server.add_argument(
        "--max-message-mib",
        type=at_least_one,
        default=64,
        metavar="N",
        help="MiB that a request or a response may have (default: %(default)s)",
    )
    access = parser.add_argument_group("access", "any of --ca, --cert, --key and --server-name turns TLS on")
    access.add_argument("--tls", action="store_true", help="encrypt; the server's certificate must be a trusted one")
    access.add_argument("--ca", metavar="FILE", help="PEM of the authorities to trust, instead of the public ones")
    access.add_argument("--cert", metavar="FILE", help="PEM of this client's certificate, for mutual TLS")
    access.add_argument("--key", metavar="FILE", help="PEM of its private key")
    access.add_argument("--server-name", metavar="NAME", help="in the server's certificate, if the address has another")
    access.add_argument(
        "--token-file",
        metavar="FILE",
        help=f"a token, sent as authorization: Bearer; also from the variable {TOKEN_VARIABLE}. "
        "Only with TLS or to this machine",
    )
    access.add_argument(
        "--header",
        type=_header,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="to send with every call; may be repeated. Others on this machine can see it in the process list",
    )


def add_retry(parser: argparse.ArgumentParser) -> None:
    """Add the argument `--retry`."""
    parser.add_argument(
        "--retry",
        type=not_negative_int,
        default=0,
        metavar="N",
        help="when no server answers, or it is lost, silent or full, try again that often, after 0.5, 1, 2, then "
        "4 s; no audio comes twice (default: %(default)s)",
    )


def client_of(options: argparse.Namespace, *, retries: int = 0) -> Client:
    """Make the client that parsed arguments describe.

    Raises:
        InputError: an argument, or a file that one names, cannot be used.
    """
    return Client(
        options.url,
        model=options.model,
        connect_timeout_s=options.connect_timeout,
        response_timeout_s=options.timeout,
        retries=retries,
        tls=_tls(options),
        headers=dict(options.header),
        token=_token(options.token_file),
        max_message_mib=options.max_message_mib,
    )


def _tls(options: argparse.Namespace) -> Tls | None:
    files = {name: getattr(options, name) for name in ("ca", "cert", "key", "server_name")}
    if options.tls or any(value is not None for value in files.values()):
        return Tls(**files)
    return None


def _token(file: str | None) -> str | None:
    """Read the access token from its file or the environment; everybody on a machine could read an argument."""
    if file is None:
        return os.environ.get(TOKEN_VARIABLE) or None
    try:
        token = Path(file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"token-file: cannot read {file} ({error})") from None
    if not token:
        raise InputError(f"token-file: {file} is empty")
    return token


def _header(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def at_least_one(text: str) -> int:
    """Read an integer from 1 on."""
    return _integer(text, 1)


def not_negative_int(text: str) -> int:
    """Read an integer from 0 on."""
    return _integer(text, 0)


def _integer(text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least {least}")
    return int(text)


def positive(text: str) -> float:
    """Read a finite number above 0."""
    value = not_negative(text)
    if value == 0:
        raise argparse.ArgumentTypeError("must be above 0")
    return value


def not_negative(text: str) -> float:
    """Read a finite number from 0 on."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return value

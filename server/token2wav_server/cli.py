"""``token2wav-serve``: a Triton server for one model folder, in the foreground."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from token2wav.checkpoint import check_model_folder
from token2wav.config import load_server_config
from token2wav.errors import Token2WavError
from token2wav_server.errors import ServerError
from token2wav_server.ports import Ports
from token2wav_server.server import TritonServer

STOPPED, BAD_USAGE, NOT_STARTED, DIED = 0, 2, 3, 4


def main(arguments: Sequence[str] | None = None) -> int:
    """Serves until SIGINT or SIGTERM.

    Returns:
        0 stopped on request, 2 bad arguments, model folder or configuration, 3 the server could not start,
        4 the server ended by itself.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    own, extra = _split_at_dashes(given)
    options = _parser().parse_args(own)
    signal.signal(signal.SIGINT, _interrupt)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        return _serve(options, extra)
    except KeyboardInterrupt:
        return STOPPED
    except Token2WavError as error:
        return _failed(error, BAD_USAGE)
    except ServerError as error:
        return _failed(error, NOT_STARTED)


def _serve(options: argparse.Namespace, extra_args: list[str]) -> int:
    check_model_folder(options.model)
    load_server_config(options.config)
    server = TritonServer(
        options.model,
        config=options.config,
        model_repository=options.model_repository,
        ports=Ports(options.http_port, options.grpc_port, options.metrics_port),
        host=options.host,
        verbose=options.verbose,
        extra_args=extra_args,
    )
    with server:
        print(
            f"token2wav: ready, gRPC {server.grpc_url}, HTTP {server.http_url}, metrics {server.metrics_url}",
            flush=True,
        )
        status = server.wait()
        return _failed(f"the server ended by itself (status {status}): {server.failure_reason()}", DIED)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="token2wav-serve",
        description="Serve a token2wav model folder with NVIDIA Triton until Ctrl-C.",
        epilog="Arguments after -- go to tritonserver as they are.",
    )
    parser.add_argument("--model", type=Path, required=True, metavar="FOLDER", help="model folder")
    parser.add_argument("--config", type=Path, metavar="FILE", help="server configuration (YAML)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    for service, port in (("http", Ports.http), ("grpc", Ports.grpc), ("metrics", Ports.metrics)):
        parser.add_argument(f"--{service}-port", type=_port, default=port, metavar="PORT", help="default: %(default)s")
    parser.add_argument(
        "--model-repository", type=Path, metavar="DIR", help="Triton models (default: those of this checkout)"
    )
    parser.add_argument(
        "--verbose",
        action="store_true",
        help="show all of Triton's log, not only warnings, errors and what the models print",
    )
    return parser


def _split_at_dashes(arguments: list[str]) -> tuple[list[str], list[str]]:
    if "--" not in arguments:
        return arguments, []
    place = arguments.index("--")
    return arguments[:place], arguments[place + 1 :]


def _port(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port, which is a number from 1 to 65535")
    return int(text)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    # A second signal must not cut the clean stop short.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


def _failed(error: object, status: int) -> int:
    print(f"token2wav-serve: error: {error}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())

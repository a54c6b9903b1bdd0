"""Command `token2wav serve`: runs a Triton server for one model folder in the foreground."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import FrameType
from typing import NoReturn

from token2wav.commands import CommandParser
from token2wav.config.values import number
from token2wav.errors import ConfigError, Token2WavError
from token2wav.hub import MODEL_HELP, model_folder
from token2wav_server.check import check
from token2wav_server.doctor import BEFORE_START
from token2wav_server.findings import examine
from token2wav_server.launcher.access import Access, Certificates, read_or_make_key
from token2wav_server.launcher.errors import ServerError
from token2wav_server.launcher.http_ports import StatusPort
from token2wav_server.launcher.log import show
from token2wav_server.launcher.memory import default_bound_mib
from token2wav_server.launcher.ports import PORT, Ports, check_host
from token2wav_server.launcher.process import TritonServer
from token2wav_server.launcher.supervisor import Canary, Supervisor

PROGRAM = "token2wav serve"
STOPPED, BAD_USAGE, FAILED, CUT_OFF = 0, 2, 3, 5

_EXIT_CODES = (
    "exit codes:\n"
    "  0    stopped on request; every stream had ended\n"
    "  2    wrong usage, or an unusable model folder or configuration\n"
    "  3    the server could not start, or failed before it was ready\n"
    "  5    stopped on request; streams that were still open were cut off\n"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Serves until SIGINT, SIGTERM or SIGHUP, and then drains the server. Returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    option_count = words.index("--") if "--" in words else len(words)
    options = parser().parse_args(words[:option_count])
    signal.signal(signal.SIGINT, _interrupt)
    signal.signal(signal.SIGTERM, _interrupt)
    if (
        signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    ):  # `nohup` ignores SIGHUP, so that closing the terminal does not stop the server
        signal.signal(signal.SIGHUP, _interrupt)
    try:
        return _serve(options, words[option_count + 1 :])
    except KeyboardInterrupt:
        return STOPPED
    except Token2WavError as error:
        return _failed(error, BAD_USAGE)
    except ServerError as error:
        return _failed(error, FAILED)
    finally:
        _discard_unwritten_output()


def _serve(options: argparse.Namespace, extra_args: list[str]) -> int:
    log_note = "" if options.verbose else "; of its log you see the warnings (--verbose: all lines)"
    _announce(f"starting a server for {options.model}{log_note}")
    # before a model of some gigabytes is fetched
    _check_addresses(options)
    access = _access(options)
    _check_machine()
    options.model = model_folder(options.model)
    for warning in check(options.model, options.config):
        _announce(f"warning: {warning}")
    server = TritonServer(
        options.model,
        config=options.config,
        model_repository=options.model_repository,
        models=options.models,
        ports=Ports.of(options),
        host=options.host,
        access=access,
        verbose=options.verbose,
        extra_args=extra_args,
    )
    status = StatusPort(options.host, options.status_port) if options.status_port else None
    with status or nullcontext():
        supervisor = Supervisor(
            server,
            canary=_canary(options.canary_seconds, options.canary_patience_seconds, server),
            grace_s=options.grace_seconds,
            announce=_announce,
            set_status=status.set_status if status else lambda status: None,
            notice_s=options.notice_seconds,
            memory_mib=default_bound_mib() if options.memory_mib is None else options.memory_mib,
            interrupted=_interrupted,
        )
        if cut_off := supervisor.serve():
            return _failed(f"streams that were cut off: {cut_off}", CUT_OFF)
    return STOPPED


def _check_addresses(options: argparse.Namespace) -> None:
    """Checks the ports and the host of the command line."""
    services: dict[int, str] = {}
    for service in ("http", "grpc", "metrics", "status"):
        port = getattr(options, f"{service}_port")
        if port in services:
            raise ConfigError(
                f"--{services[port]}-port and --{service}-port are both {port}; give each its own "
                f"port"
            )
        if port is not None:
            services[port] = service
    check_host(options.host)


def _check_machine() -> None:
    """Runs the checks of `token2wav doctor` that a server needs."""
    for finding in examine(BEFORE_START):
        if finding.state == "error":
            raise ServerError(finding.message)
        if finding.state == "warning":
            _announce(f"warning: {finding.check}: {finding.message}")


def _access(options: argparse.Namespace) -> Access:
    certificates = None
    if options.tls_certificate or options.tls_key or options.tls_client_ca:
        if not (options.tls_certificate and options.tls_key):
            raise ConfigError("TLS needs both --tls-certificate and --tls-key")
        certificates = Certificates(options.tls_certificate, options.tls_key, options.tls_client_ca)
    if options.admin_key_file is None:
        return Access(certificates, http_inference=options.http_inference)
    return Access(certificates, read_or_make_key(options.admin_key_file), options.http_inference)


def _canary(interval_s: float, patience_s: float, server: TritonServer) -> Canary | None:
    if not interval_s:
        return None
    certificates, name = server.access.certificates, server.canary_name
    canary = Canary(interval_s, patience_s, server.models, certificates, name)
    if canary.unavailable_reason:
        _announce(
            "the canary is off, so a hanging model process is not detected: "
            f"{canary.unavailable_reason}"
        )
        return None
    return canary


def parser() -> CommandParser:
    """Returns the parser of `token2wav serve`."""
    parser = CommandParser(
        prog=PROGRAM,
        description="Serve a token2wav model folder with NVIDIA Triton until Ctrl-C.",
        epilog=f"Arguments after -- are passed to tritonserver unchanged.\n\n{_EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="YAML file with the settings of the server"
    )
    Ports.add_options(parser)
    parser.add_argument(
        "--model-repository",
        type=Path,
        metavar="DIR",
        help="folder of Triton models (default: those of this package)",
    )
    parser.add_argument(
        "--models",
        nargs="+",
        default=(),
        metavar="NAME",
        help="Triton models to load, such as token2wav_ensemble (default: token2wav)",
    )
    for option, text in (
        (
            "--tls-certificate",
            "PEM file of the gRPC server's certificate, followed by its intermediate certificates",
        ),
        ("--tls-key", "PEM file of the gRPC server's private key"),
        (
            "--tls-client-ca",
            "PEM file of certificate authorities: accept only clients with a certificate "
            "of these (mutual TLS); the canary uses the server's certificate",
        ),
        (
            "--admin-key-file",
            "file with the key that opens the list of models, trace and logging calls and HTTP "
            "inference; created if it does not exist (default: a secret key)",
        ),
    ):
        parser.add_argument(option, type=Path, metavar="FILE", help=text)
    parser.add_argument(
        "--http-inference",
        action="store_true",
        help="allow inference over HTTP without a key, for every client that can reach the HTTP "
        "port",
    )
    parser.add_argument(
        "--status-port",
        type=PORT,
        metavar="PORT",
        help="HTTP port with the state for load balancers: 200 ready, 503 not ready, 404 "
        "draining (default: none)",
    )
    for option, seconds, text in (
        (
            "--grace-seconds",
            30.0,
            "seconds that open streams have to end after SIGTERM, SIGHUP or Ctrl-C, while "
            "new streams are refused; a second Ctrl-C stops at once (default: %(default)g)",
        ),
        (
            "--notice-seconds",
            0.0,
            "seconds in which the server still accepts new streams after SIGTERM, SIGHUP "
            "or Ctrl-C, while the status port reports draining, so that load balancers "
            "notice (default: %(default)g)",
        ),
        (
            "--canary-seconds",
            30.0,
            "seconds between test syntheses of three tokens; two failures in a row restart the "
            "server (default: %(default)g, 0: never)",
        ),
        (
            "--canary-patience-seconds",
            60.0,
            "time limit of a test synthesis, which fails after it only if no batch has finished "
            "meanwhile (default: %(default)g)",
        ),
    ):
        parser.add_argument(option, type=number(float), default=seconds, metavar="S", help=text)
    parser.add_argument(
        "--memory-mib",
        type=number(int),
        metavar="MIB",
        help="limit of the resident memory of tritonserver and its models together, in MiB; the "
        "server is drained and restarted above it (default: 80%% of the memory of the "
        "machine or container; 0: no limit)",
    )
    parser.add_argument(
        "--verbose",
        action="store_true",
        help="show the whole log of Triton and the whole configuration of the model; the "
        "default shows warnings, errors, a summary of five lines (model, device, backend, "
        "limits, ports) and other output of the models",
    )
    return parser


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    # The first signal starts the drain. After it only Ctrl-C (SIGINT) is handled, so that a second
    # Ctrl-C ends the drain early. Then SIGINT is ignored too: nothing may interrupt the clean-up.
    first = signal.getsignal(signal.SIGTERM) is _interrupt
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if not first:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def _interrupted() -> bool:
    """Returns whether `_interrupt` has run. It sets SIGTERM to be ignored."""
    return signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


def _announce(line: str) -> None:
    show(f"token2wav: {line}", sys.stdout)


def _failed(error: object, status: int) -> int:
    show(f"{PROGRAM}: error: {error}", sys.stderr)
    return status


def _discard_unwritten_output() -> None:
    """Flushes stdout and stderr, and discards output that cannot be written.

    Python replaces the exit code by 120 if it cannot flush its output at the end, for example to
    a terminal that was closed. A stream that was closed before the start is None.
    """
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)

"""Command `token2wav doctor`: checks this machine, and a model with its settings, before a server.

Each check yields findings, or raises an error with the message of a finding. `token2wav serve` runs
the checks of `BEFORE_START` before it fetches a model, and `examine_model` before it starts.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
import time
import timeit
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from token2wav.commands import CommandParser
from token2wav.hub import MODEL_HELP, model_folder
from token2wav_server.findings import Check, Finding, error, examine, ok, warning
from token2wav_server.front.build import native_front
from token2wav_server.gpu_findings import gpus, kernels, tensorrt
from token2wav_server.launcher.binaries import find_tritonserver
from token2wav_server.launcher.errors import PortInUseError
from token2wav_server.launcher.memory import default_bound_mib
from token2wav_server.launcher.ports import Ports, client_host, fetched
from token2wav_server.model_findings import MEMORY_CHECK, examine_model

PROGRAM = "token2wav doctor"
SOUND, FAULTY = 0, 3
_EXIT_CODES = (
    "exit codes:\n"
    "  0    no error was found; there may be warnings\n"
    "  2    wrong usage\n"
    "  3    an error was found, with which a server cannot run\n"
)
_PYTHONS = ((3, 10), (3, 14))  # first and last version
# Modules of the extra `server`.
_MODULES = (
    "aiohttp",
    "huggingface_hub",
    "prometheus_client",
    "safetensors",
    "soxr",
    "torch",
    "yaml",
)
# A model needs 1 MiB of shared memory to start, and room for its largest requests and their audio.
# The default of docker is 64 MB.
_LEAST_SHARED, _USUAL_SHARED = 1 << 20, 64 * 10**6
_ROOM = 5 * 10**9  # bytes on the disk of the cache, for the largest decoders
_READINGS = 1000
_SLOW_READING_S = 1e-6


def python(running: tuple[int, int] = sys.version_info[:2], system: str = sys.platform) -> Finding:
    """Checks the version of Python, and the operating system."""
    if system != "linux":
        return error(f"{system}: a server needs Linux; run it in a container")
    if not _PYTHONS[0] <= running <= _PYTHONS[1]:
        return error(
            f"{running[0]}.{running[1]}: a server needs Python 3.10 to 3.14; make a virtual "
            "environment with one of these"
        )
    return ok(f"{platform.python_version()}, {platform.machine()}")


def packages(names: Sequence[str] = _MODULES) -> Finding:
    """Checks that the modules of the extra `server` are installed."""
    if absent := [name for name in names if not _installed(name)]:
        return error(f"{', '.join(absent)}: missing; run: pip install 'token2wav[server]'")
    return ok(f"token2wav {version('token2wav')}, with its extra server")


def triton_server() -> Finding:
    """Checks that a tritonserver is installed. For the Python front it needs a Python backend.

    Raises:
        TritonNotFoundError: there is none.
    """
    with tempfile.TemporaryDirectory(prefix="token2wav-doctor-") as folder:
        triton = find_tritonserver(Path(folder), python_models=native_front() is None)
    return ok(str(triton.executable))


def front() -> Finding:
    """Reports which front passes requests from Triton to the engine, by default."""
    if (library := native_front()) is not None:
        return ok(f"native, {library}")
    return warning(
        "python, which takes in fewer requests a second; for the native one install g++ and run "
        "`token2wav setup`"
    )


def shared_memory(folder: Path = Path("/dev/shm")) -> Finding:
    """Checks the shared memory, through which Triton passes requests and audio."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError as absent:
        return error(f"{folder}: {absent.strerror}; mount a tmpfs there")
    if not os.access(folder, os.W_OK):
        return error(f"{folder}: not writable; let this user write there")
    if free < _LEAST_SHARED:
        return error(f"{free:,} bytes free in {folder}; enlarge it, in docker with --shm-size=1g")
    text = f"{free / 1e6:,.0f} MB free in {folder}"
    if free < _USUAL_SHARED:
        return warning(
            f"{text}: large requests will be refused; enlarge it, in docker with --shm-size=1g"
        )
    return ok(text)


def ports(host: str, numbers: Ports) -> Finding:
    """Checks that the ports of a server are free, or that a server is already running on them.

    Raises:
        PortInUseError: another program has taken one.
    """
    try:
        numbers.check_free(host)
    except PortInUseError:
        if not server_runs(host, numbers.http):
            raise
        return warning(
            f"a server already runs here, with HTTP on port {numbers.http} of {host}; for a "
            "second one choose other ports: --http-port, --grpc-port and --metrics-port"
        )
    shown = ", ".join(f"{service} {port}" for service, port in asdict(numbers).items())
    return ok(f"{shown} are free on {host}")


def server_runs(host: str, http_port: int) -> bool:
    """Returns whether a Triton server answers on an HTTP port of this machine."""
    answer = fetched(http_port, "/v2", client_host(host))
    return answer is not None and b'"name":"triton"' in answer


def memory() -> Finding:
    """Reports the memory of this machine or container, and the limit of a server."""
    from token2wav.execution.device import available_bytes

    limit = default_bound_mib()
    free = available_bytes() >> 20
    return ok(f"{free:,} MiB free; a server restarts above {limit:,} MiB")


def cache() -> Finding:
    """Checks the folder in which pulled models are kept."""
    from huggingface_hub import constants, get_token

    folder = Path(constants.HF_HOME)
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    offline = "; HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else ""
    if not (existing.is_dir() and os.access(existing, os.W_OK)):
        return warning(
            f"{folder}: not writable, so no model can be pulled; set HF_HOME to another folder"
        )
    free = shutil.disk_usage(existing).free
    text = f"{folder}, {free / 1e9:,.0f} GB free"
    if free < _ROOM and not offline:
        return warning(f"{text}; make room, or set HF_HOME to another disk")
    token = "a token" if get_token() else "no token"
    return ok(f"{text}; {token} for {constants.ENDPOINT}{offline}")


def clock(
    now: Callable[[], float] = time.time, reading: Callable[[], float] = time.monotonic
) -> Finding:
    """Checks the date, by which certificates are valid, and how long the time takes to read."""
    if now() < Path(__file__).stat().st_mtime:
        date = time.strftime("%Y-%m-%d", time.gmtime(now()))
        return error(
            f"{date} is before this program was installed, so TLS refuses certificates; set the "
            "clock, for example with chrony"
        )
    # the fastest of five rounds, because other processes may interrupt a round
    cost_s = min(timeit.repeat(reading, number=_READINGS, repeat=5)) / _READINGS
    file = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
    source = file.read_text().strip() if file.is_file() else "unknown source"
    text = f"{1e6 * cost_s:.2f} µs a reading ({source})"
    if cost_s > _SLOW_READING_S:
        return warning(
            f"{text}, many in every chunk; boot with the clock source tsc, if the machine has it"
        )
    return ok(text)


# Checks that a server needs, and that import no torch. A server checks its ports as it opens them.
BEFORE_START: dict[str, Check] = {
    "triton server": triton_server,
    "shared memory": shared_memory,
}


def _all_checks(options: argparse.Namespace) -> dict[str, Check]:
    # The check of packages reports a missing torch.
    with_torch: dict[str, Check] = {
        "torch": gpus,
        "triton language": kernels,
        "memory": memory,
    }
    checks: dict[str, Check] = {
        "python": python,
        "packages": packages,
        **(with_torch if _installed("torch") else {}),
        "tensorrt": tensorrt,
        **BEFORE_START,
        "front": front,
        "ports": partial(ports, options.host, Ports.of(options)),
        "cache": cache,
        "clock": clock,
    }
    if options.model is not None:
        checks["model"] = partial(_pulled_model, options)
    return checks


def _pulled_model(options: argparse.Namespace) -> Iterator[Finding]:
    for finding in examine_model(model_folder(options.model), options.config):
        full = finding.check == MEMORY_CHECK and finding.state == "error"
        if full and server_runs(options.host, options.http_port):
            text = f"{finding.message}; the server that runs here holds a part of it"
            finding = replace(finding, state="warning", message=text)
        yield finding


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the findings, and returns the exit code: 3 if there is an error, else 0."""
    options = parser().parse_args(arguments)
    findings = []
    for finding in examine(_all_checks(options)):
        findings.append(finding)
        if not options.json:
            print(finding, flush=True)
    errors, warnings = (
        sum(finding.state == state for finding in findings) for state in ("error", "warning")
    )
    if options.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1, ensure_ascii=False))
    else:
        print(f"{PROGRAM}: {errors} errors, {warnings} warnings")
    return FAULTY if errors else SOUND


def parser() -> CommandParser:
    """Returns the parser of `token2wav doctor`."""
    program = CommandParser(
        prog=PROGRAM,
        description="Check whether this machine can run a server: Python, torch, GPU, Triton, "
        "shared memory, ports, memory, cache and clock. With a model, also check its folder and "
        "settings, and whether its memory suffices.",
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    program.add_argument("model", metavar="MODEL", nargs="?", help=MODEL_HELP)
    program.add_argument(
        "--config", type=Path, metavar="FILE", help="YAML file with the settings of the server"
    )
    Ports.add_options(program)
    program.add_argument("--json", action="store_true", help="print a JSON list of the findings")
    return program


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ValueError:  # a module that a test has removed
        return False

"""Command `token2wav doctor`: checks this machine, and a model with its settings, before a server.

Each check yields findings, or raises an error whose message is the finding. `token2wav serve` runs
the checks of `BEFORE_START` before it fetches a model, and `examine_model` before it starts.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import shutil
import sys
import tempfile
import time
import timeit
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from token2wav.commands import CommandParser, missing
from token2wav.config.values import number
from token2wav.errors import Token2WavError
from token2wav.hub import MODEL_HELP, model_folder
from token2wav_server.front.build import native_front
from token2wav_server.launcher.binaries import find_tritonserver
from token2wav_server.launcher.errors import PortInUseError, ServerError
from token2wav_server.launcher.memory import default_bound_mib
from token2wav_server.launcher.ports import LOOPBACK, Ports, client_host, fetched, listening

PROGRAM = "token2wav doctor"
SOUND, FAULTY = 0, 3
_EXIT_CODES = (
    "exit codes:\n"
    "  0    no error was found; there may be warnings\n"
    "  2    wrong usage\n"
    "  3    an error was found, with which a server cannot run\n"
)
_PYTHONS = ((3, 10), (3, 12))  # first and last version with a Python backend of Triton
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
# Distributions of the extras, and of the image of NVIDIA.
_TENSORRT = ("tensorrt-rtx-cu13", "tensorrt-cu13", "tensorrt")
# A model needs 1 MiB of shared memory to start, and room for its largest requests and their audio.
# docker gives 64 MB unless it is told otherwise.
_LEAST_SHARED, _USUAL_SHARED = 1 << 20, 64 * 10**6
_ROOM = 5 * 10**9  # bytes on the disk of the cache, for the largest decoders
_READINGS = 1000
_SLOW_READING_S = 1e-6
_SPEECH_SECONDS, _PROMPT_SECONDS = 30, 3  # of the streams that memory is counted for
_MIB = 1 << 20
_MEMORY_CHECK = "model's memory"


@dataclass(frozen=True)
class Finding:
    """Result of a check.

    Attributes:
        check: name of the check.
        message: what was found; of a warning or an error with its remedy.
    """

    check: str
    state: Literal["ok", "warning", "error"]
    message: str

    def __str__(self) -> str:
        return f"{self.state:8} {self.check:16} {self.message}"


Check = Callable[[], Iterable[Finding]]


def examine(checks: Mapping[str, Check]) -> Iterator[Finding]:
    """Runs checks by their names, and yields their findings."""
    for name, check in checks.items():
        try:
            yield from check()
        except (ServerError, Token2WavError) as error:
            yield Finding(name, "error", str(error))
        except ModuleNotFoundError as error:
            yield Finding(name, "error", missing(error, "server"))


def python(running: tuple[int, int] = sys.version_info[:2], system: str = sys.platform) -> Finding:
    """Checks the version of Python, and the operating system."""
    name = "python"
    if system != "linux":
        return Finding(name, "error", f"{system}: a server needs Linux; run it in a container")
    if not _PYTHONS[0] <= running <= _PYTHONS[1]:
        return Finding(
            name,
            "error",
            f"{running[0]}.{running[1]}: Triton's Python backend exists for 3.10, 3.11 and 3.12; "
            "make a virtual environment with one of these",
        )
    return Finding(name, "ok", f"{platform.python_version()}, {platform.machine()}")


def packages(names: Sequence[str] = _MODULES) -> Finding:
    """Checks that the modules of the extra `server` are installed."""
    if absent := [name for name in names if not _installed(name)]:
        return Finding(
            "packages",
            "error",
            f"{', '.join(absent)}: missing; run: pip install 'token2wav[server]'",
        )
    return Finding("packages", "ok", f"token2wav {version('token2wav')}, with its extra server")


def gpus() -> Iterator[Finding]:
    """Checks torch, the driver of NVIDIA, and every GPU."""
    torch = importlib.import_module("torch")
    from token2wav.execution.cuda_facts import driver_fact, missing_gpu

    made_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs"
    yield Finding("torch", "ok", f"{torch.__version__}, for {made_for}")
    if not torch.cuda.is_available():
        if reason := missing_gpu():
            remedy = (
                "docs/deployment.md names the torch for each driver"
                if torch.version.cuda
                else "install the torch for CUDA, as docs/deployment.md shows"
            )
            yield Finding("driver", "warning", f"{reason}, so models run on the CPU; {remedy}")
        else:
            yield Finding("driver", "ok", "no NVIDIA driver; models run on the CPU")
        return
    yield Finding("driver", "ok", driver_fact() or "an NVIDIA driver")
    for index in range(torch.cuda.device_count()):
        yield gpu(torch.device("cuda", index))


def gpu(device: Any) -> Finding:
    """Checks that torch can run on a GPU."""
    torch = importlib.import_module("torch")
    from token2wav.execution.cuda_facts import device_facts, driver_fact

    name = f"gpu {device.index or 0}"
    try:
        capability = torch.cuda.get_device_capability(device)
        free, total = torch.cuda.mem_get_info(device)
    except RuntimeError as error:  # for example if its compute mode admits no further process
        reason = str(error).partition("\n")[0]
        return Finding(name, "error", f"{reason}; check it with nvidia-smi")
    facts = [fact for fact in device_facts(device) if fact != driver_fact()]
    text = (
        f"{', '.join(facts)}, compute capability {capability[0]}.{capability[1]}, "
        f"{free / _MIB:,.0f} of {total / _MIB:,.0f} MiB free"
    )
    if not runs_on(capability, torch.cuda.get_arch_list()):
        return Finding(
            name,
            "error",
            f"{text}: this torch has no code for it; install a torch whose release notes name this "
            "GPU, or set runtime.device: cpu",
        )
    return Finding(name, "ok", text)


def runs_on(capability: tuple[int, int], architectures: Iterable[str]) -> bool:
    """Returns whether a GPU can run a torch.

    Args:
        capability: compute capability of the GPU.
        architectures: the architectures of torch, such as `sm_90` (machine code) and `compute_120`
            (code that the driver translates for newer GPUs).
    """
    for architecture in architectures:
        kind, _, digits = architecture.partition("_")
        digits = digits.rstrip("af")  # `sm_90a` has features of this GPU alone
        major, minor = int(digits[:-1]), int(digits[-1])
        newer = (major, minor) <= capability
        if newer and (kind == "compute" or major == capability[0]):
            return True
    return False


def kernels() -> Finding:
    """Checks whether the kernels of GPUs can run, which need the Triton language."""
    name = "triton language"
    torch: Any = importlib.import_module("torch")
    release = _release("triton")
    if not torch.cuda.is_available():
        return Finding(name, "ok", f"{release or 'not installed'}; only a GPU needs it")
    if release is None:
        return Finding(
            name,
            "warning",
            "not installed, so models run without kernels; run: pip install 'token2wav[gpu]'",
        )
    from token2wav.backends import gpu_runs_kernels

    if not gpu_runs_kernels(torch.device("cuda", 0)):
        return Finding(
            name,
            "warning",
            f"{release}, but models run without kernels: they need compute capability 8.0, a C "
            "compiler (gcc or clang) and the headers of Python",
        )
    return Finding(name, "ok", release)


def tensorrt(names: Sequence[str] = _TENSORRT) -> Finding:
    """Reports which TensorRT is installed."""
    releases = [f"{name} {release}" for name in names if (release := _release(name))]
    installed = ", ".join(releases) or "not installed"
    return Finding("tensorrt", "ok", f"{installed}; only runtime.backend: tensorrt needs it")


def triton_server() -> Finding:
    """Checks that a tritonserver for this Python is installed.

    Raises:
        TritonNotFoundError: there is none.
    """
    with tempfile.TemporaryDirectory(prefix="token2wav-doctor-") as folder:
        triton = find_tritonserver(Path(folder))
    return Finding("triton server", "ok", str(triton.executable))


def front() -> Finding:
    """Reports which front passes requests from Triton to the engine, by default."""
    name = "front"
    if (library := native_front()) is not None:
        return Finding(name, "ok", f"native, {library}")
    return Finding(
        name,
        "warning",
        "python, which takes in fewer requests a second; for the native one install g++ and run "
        "`token2wav setup`",
    )


def shared_memory(folder: Path = Path("/dev/shm")) -> Finding:
    """Checks the shared memory, through which Triton passes requests and audio."""
    name = "shared memory"
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return Finding(name, "error", f"{folder}: {error.strerror}; mount a tmpfs there")
    if not os.access(folder, os.W_OK):
        return Finding(name, "error", f"{folder}: not writable; let this user write there")
    if free < _LEAST_SHARED:
        return Finding(
            name,
            "error",
            f"{free:,} bytes free in {folder}; enlarge it, in docker with --shm-size=1g",
        )
    text = f"{free / 1e6:,.0f} MB free in {folder}"
    if free < _USUAL_SHARED:
        return Finding(
            name,
            "warning",
            f"{text}: large requests will be refused; enlarge it, in docker with --shm-size=1g",
        )
    return Finding(name, "ok", text)


def ports(host: str = LOOPBACK, numbers: Ports | None = None) -> Finding:
    """Checks that the ports of a server are free, or that a server is already running on them.

    Raises:
        PortInUseError: another program has taken one.
    """
    chosen = asdict(numbers or Ports())
    try:
        for service, port in chosen.items():
            listening(host, port, service).close()
    except PortInUseError:
        if not server_runs(host, chosen["http"]):
            raise
        return Finding(
            "ports",
            "warning",
            f"a server already runs here, with HTTP on port {chosen['http']} of {host}; for a "
            "second one choose other ports: --http-port, --grpc-port and --metrics-port",
        )
    shown = ", ".join(f"{service} {port}" for service, port in chosen.items())
    return Finding("ports", "ok", f"{shown} are free on {host}")


def server_runs(host: str, http_port: int) -> bool:
    """Returns whether a Triton server answers on an HTTP port of this machine."""
    answer = fetched(http_port, "/v2", client_host(host))
    return answer is not None and b'"name":"triton"' in answer


def memory() -> Finding:
    """Reports the memory of this machine or container, and the limit of a server."""
    from token2wav.execution.device import available_bytes

    limit = default_bound_mib()
    free = available_bytes() >> 20
    return Finding("memory", "ok", f"{free:,} MiB free; a server restarts above {limit:,} MiB")


def cache() -> Finding:
    """Checks the folder in which pulled models are kept."""
    from huggingface_hub import constants, get_token

    name, folder = "cache", Path(constants.HF_HOME)
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    offline = "; HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else ""
    if not (existing.is_dir() and os.access(existing, os.W_OK)):
        return Finding(
            name,
            "warning",
            f"{folder}: not writable, so no model can be pulled; set HF_HOME to another folder",
        )
    free = shutil.disk_usage(existing).free
    text = f"{folder}, {free / 1e9:,.0f} GB free"
    if free < _ROOM and not offline:
        return Finding(name, "warning", f"{text}; make room, or set HF_HOME to another disk")
    token = "a token" if get_token() else "no token"
    return Finding(name, "ok", f"{text}; {token} for {constants.ENDPOINT}{offline}")


def clock(
    now: Callable[[], float] = time.time,
    reading: Callable[[], float] = time.monotonic,
    root: Path = Path("/"),
) -> Finding:
    """Checks the date, by which certificates are valid, and how long the time takes to read."""
    name = "clock"
    if now() < Path(__file__).stat().st_mtime:
        date = time.strftime("%Y-%m-%d", time.gmtime(now()))
        return Finding(
            name,
            "error",
            f"{date} is before this program was installed, so TLS refuses certificates; set the "
            "clock, for example with chrony",
        )
    # the fastest of five rounds, because other processes may interrupt some of them
    cost_s = min(timeit.repeat(reading, number=_READINGS, repeat=5)) / _READINGS
    file = root / "sys/devices/system/clocksource/clocksource0/current_clocksource"
    source = file.read_text().strip() if file.is_file() else "unknown source"
    text = f"{1e6 * cost_s:.2f} µs a reading ({source})"
    if cost_s > _SLOW_READING_S:
        return Finding(
            name,
            "warning",
            f"{text}, many in every chunk; boot with the clock source tsc, if the machine has it",
        )
    return Finding(name, "ok", text)


def examine_model(folder: Path, config: Path | None) -> Iterator[Finding]:
    """Checks a model folder, its settings, the GPU and the memory, without reading weights whole.

    Raises:
        ConfigError: the folder or a setting cannot be used. The message gives the reason.
    """
    # These import torch.
    from token2wav.assembly import check_folder
    from token2wav.config import load_server_config
    from token2wav.execution.device import device_named
    from token2wav.model import check_settings
    from token2wav.published.registry import family_name, read_config
    from token2wav.serving.door.voice_registry import voices_in

    settings = load_server_config(config)
    device = device_named(settings.runtime.device)
    if device.type == "cuda":
        yield gpu(device)
    check_settings(folder, settings.stream, settings.runtime)
    computes = settings.runtime.backend != "pause"
    if computes:
        check_folder(folder)
    model = read_config(folder).with_stream_settings(settings.stream)
    voices_in(settings, model)
    yield Finding("model", "ok", f"{family_name(model)}, on {device.type}: {folder}")
    if computes:
        yield _need(model, settings, device)
        return
    yield Finding(
        "backend",
        "warning",
        "runtime.backend: pause sends a test signal in place of speech; remove it to serve clients",
    )


def _need(model: Any, settings: Any, device: Any) -> Finding:
    """Compares the need of the model with the free memory, as `token2wav plan` counts both."""
    import torch

    from token2wav.execution.device import available_bytes, cache_bytes
    from token2wav.serving.policy import chunks_at_once
    from token2wav.serving.worker import default_workers
    from token2wav_server.plan_memory import share_out, stream_needs, weight_bytes

    runtime, name = settings.runtime, _MEMORY_CHECK
    on_gpu = device.type == "cuda"
    precision = runtime.precision
    if precision == "auto":
        precision = "float16" if on_gpu else "float32"
    weights = weight_bytes(model, precision)
    free = torch.cuda.mem_get_info(device)[0] if on_gpu else available_bytes()
    if weights > free:
        return Finding(
            name,
            "error",
            f"the weights take {weights // _MIB:,} MiB, but {free // _MIB:,} MiB are free on "
            f"{device.type}; stop other programs, or use a machine with more memory",
        )
    rate = model.token_frame_rate
    needs = stream_needs(
        model,
        settings.stream,
        precision if runtime.cache_storage == "auto" else runtime.cache_storage,
        round(_PROMPT_SECONDS * rate) if model.takes_prompt else 0,
        round(_SPEECH_SECONDS * rate),
    )
    pages = min(cache_bytes(runtime.cache_mib, device), free - weights)
    workers = runtime.workers or default_workers(device.type)
    chunks = chunks_at_once(model, settings.limits.batch_streams, workers)
    streams = share_out(free, 0, weights, pages, needs, voices=1, chunks=chunks).streams
    limit = settings.limits.streams
    if streams < limit:
        return Finding(
            name,
            "warning",
            f"room for {streams} streams of {_SPEECH_SECONDS} s in {free // _MIB:,} MiB, but "
            f"limits.streams is {limit}; lower it"
            + (", or bound the past with stream.left_blocks" if needs.page_bytes else ""),
        )
    return Finding(
        name, "ok", f"room for {streams} streams of {_SPEECH_SECONDS} s; limits.streams is {limit}"
    )


# Checks that a server needs, and that import no torch. A server checks its ports as it opens them.
BEFORE_START: dict[str, Check] = {
    "triton server": lambda: [triton_server()],
    "shared memory": lambda: [shared_memory()],
}


def _all_checks(options: argparse.Namespace) -> dict[str, Check]:
    numbers = Ports(options.http_port, options.grpc_port, options.metrics_port)
    # Without torch, the check of packages says so.
    with_torch: dict[str, Check] = {
        "torch": gpus,
        "triton language": lambda: [kernels()],
        "memory": lambda: [memory()],
    }
    checks: dict[str, Check] = {
        "python": lambda: [python()],
        "packages": lambda: [packages()],
        **(with_torch if _installed("torch") else {}),
        "tensorrt": lambda: [tensorrt()],
        **BEFORE_START,
        "front": lambda: [front()],
        "ports": lambda: [ports(options.host, numbers)],
        "cache": lambda: [cache()],
        "clock": lambda: [clock()],
    }
    if options.model is not None:
        checks["model"] = partial(_pulled_model, options)
    return checks


def _pulled_model(options: argparse.Namespace) -> Iterator[Finding]:
    for finding in examine_model(model_folder(options.model), options.config):
        full = finding.check == _MEMORY_CHECK and finding.state == "error"
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
    program.add_argument(
        "--host", default=LOOPBACK, help="address to listen on (default: %(default)s)"
    )
    for service, port in asdict(Ports()).items():
        program.add_argument(
            f"--{service}-port",
            type=number(int, 1, 65535, "a port, which is a number"),
            default=port,
            metavar="PORT",
            help="default: %(default)s",
        )
    program.add_argument("--json", action="store_true", help="print a JSON list of the findings")
    return program


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ValueError:  # a module that a test has removed
        return False


def _release(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None

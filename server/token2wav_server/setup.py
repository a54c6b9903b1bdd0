"""Command `token2wav setup`: installs tritonserver for this Python environment, with pip, and
compiles the native front if the package has none for this machine.

NVIDIA publishes tritonserver for pip only inside the wheel nvidia-pytriton. The requirements of the
wheel, with NumPy 1, belong to an API that this project does not use. So the wheel is installed
without its requirements, into a folder of its own: beside the other packages, `pip check` would
report that the requirements are missing.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from token2wav.commands import CommandParser
from token2wav_server.front.build import (
    COMPILED_FOLDER,
    CompileError,
    compile_front,
    cxx_compiler,
    native_front,
)
from token2wav_server.launcher.binaries import (
    STUB_NUMPY_FOLDER,
    WHEEL,
    WHEEL_FOLDER,
    wheel_has_stub,
)

PROGRAM = "token2wav setup"
DONE, FAILED = 0, 3
# Name of a libpython of the wheel, and its name in the system, filled up to the same length.
_WHEEL_LIBPYTHON = re.compile(rb"libpython3-[0-9a-f]{8}\.(\d+)\.so\.1\.0")
_SYSTEM_LIBPYTHON = rb"libpython3.\1.so.1.0" + len("-419a3a08") * b"\0"
# The wheel's Python backend reads strings only with NumPy 1.
_STUB_NUMPY = "numpy==1.26.4"


def main(arguments: Sequence[str] | None = None) -> int:
    """Installs the missing parts, and returns the exit code: 3 if no server can run, else 0."""
    options = parser().parse_args(arguments)
    needed = [(WHEEL, WHEEL_FOLDER)]
    if options.recipe:
        if sys.version_info >= (3, 13):
            print(
                f"{PROGRAM}: error: --recipe needs Python 3.10, 3.11 or 3.12, because "
                f"{_STUB_NUMPY} exists for no later one",
                file=sys.stderr,
            )
            return FAILED
        needed.append((_STUB_NUMPY, STUB_NUMPY_FOLDER))
    for package, folder in needed:
        if _installed(package, folder):
            print(f"{PROGRAM}: {package} is already in {folder}")
            continue
        print(f"{PROGRAM}: installing {package} into {folder}", flush=True)
        if not _install(package, folder):
            print(f"{PROGRAM}: error: {package} was not installed, see above", file=sys.stderr)
            return FAILED
    _link_stubs()
    return DONE if _prepare_front() else FAILED


def parser() -> CommandParser:
    """Returns the parser of `token2wav setup`."""
    program = CommandParser(
        prog=PROGRAM,
        description=f"Install tritonserver for this Python environment, from the wheel {WHEEL} "
        f"(150 MB on disk), into {WHEEL_FOLDER}. It is not needed where an installation of Triton "
        "is found, as in NVIDIA's image. Needs Linux with glibc 2.35 or newer (Debian 12, "
        "Ubuntu 22.04). The settings of pip apply. Without a library of the native front for this "
        "machine, it is compiled with the C++ compiler in $CXX, g++, c++ or clang++.",
    )
    program.add_argument(
        "--recipe",
        action="store_true",
        help=f"also install {_STUB_NUMPY} into {STUB_NUMPY_FOLDER}, which only the models of "
        "CosyVoice's Triton recipe use",
    )
    return program


def _link_stubs() -> None:
    """Links the stubs of Triton's Python backend with the libpython of this system.

    The stub for Python 3.13 is linked with a library of the wheel, `libpython3-419a3a08.13.so.1.0`.
    That library has modules such as `binascii` in files of their own, which Debian does not have.
    The name of the library is replaced by a shorter one, with zero bytes up to the same length.
    """
    for stub in WHEEL_FOLDER.glob("pytriton/tritonserver/python_backend_stubs/*/*_stub"):
        content, count = _WHEEL_LIBPYTHON.subn(_SYSTEM_LIBPYTHON, stub.read_bytes())
        if count:
            stub.write_bytes(content)


def _prepare_front() -> bool:
    """Compiles the native front, unless it is there, and returns whether a server has a front."""
    library = native_front()
    if library is not None:
        print(f"{PROGRAM}: the native front is already in {library.parent}")
        return True
    if has_python_front := wheel_has_stub():
        consequence = "so the server uses the Python front, which takes in fewer messages a second"
    else:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        consequence = f"so no server runs with Python {version}, which has no Python front"
    compiler = cxx_compiler()
    if compiler is None:
        print(
            f"{PROGRAM}: no C++ compiler found, {consequence}; install g++ and run `{PROGRAM}` "
            "again"
        )
        return has_python_front
    print(f"{PROGRAM}: compiling the native front into {COMPILED_FOLDER}", flush=True)
    try:
        compile_front(compiler, COMPILED_FOLDER)
    except CompileError as error:
        print(
            f"{PROGRAM}: the native front was not compiled, {consequence}:\n{error}",
            file=sys.stderr,
        )
        return has_python_front
    return True


def _installed(package: str, folder: Path) -> bool:
    name, _, version = package.partition("==")
    return (folder / f"{name.replace('-', '_')}-{version}.dist-info").is_dir()


def _install(package: str, folder: Path) -> bool:
    """Runs pip, or uv in an environment without pip, and returns whether it succeeded."""
    target = ["--no-deps", "--upgrade", "--target", str(folder), package]
    if find_spec("pip") is not None:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile"]
    elif (uv := shutil.which("uv")) is not None:
        command = [uv, "pip", "install", "--quiet", "--python", sys.executable]
    elif (pip := shutil.which("pip")) is not None:
        command = [pip, "--python", sys.executable, "install", "--quiet", "--no-compile"]
    else:
        print(f"{PROGRAM}: neither pip nor uv found; install one of them", file=sys.stderr)
        return False
    return subprocess.run([*command, *target], check=False).returncode == 0

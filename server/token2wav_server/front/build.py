"""Build of the native front, a Triton backend in C++, from the sources in `native/`.

The wheel has the library for x86_64 and aarch64: `python build.py [MACHINE ...]` builds both, or
those that are named, with the compiler of the package ziglang. In a checkout, `token2wav setup`
compiles it with the C++ compiler of the machine. The name of a library contains a hash of its
sources, so a stale one is never used. This file needs no other module of the project, because it
runs before the wheel is built.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

SOURCES = Path(__file__).with_name("native")
# For the libraries that `token2wav setup` compiles: beside the wheel with tritonserver.
COMPILED_FOLDER = Path(sys.prefix) / "share" / "token2wav" / "front"
# Triton finds the library of a backend by this name.
LIBRARY = "libtriton_token2wav.so"
MACHINES = ("x86_64", "aarch64")
# Symbols of newer versions of glibc are not used in the libraries of the wheel.
GLIBC = "2.28"
_COMPILERS = ("g++", "c++", "clang++")
_FLAGS = (
    *("-std=c++17", "-O2", "-s", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread"),
    *("-Wall", "-Wextra", "-Werror"),
    *("-static-libstdc++", "-static-libgcc"),
)


class CompileError(Exception):
    """The native front was not compiled. The text is the last lines of the compiler."""


def native_front() -> Path | None:
    """Returns the library of the native front for this machine, or None.

    The launcher copies it into the folder of the model, with the name `LIBRARY`.
    """
    candidates = (COMPILED_FOLDER, SOURCES / platform.machine())
    return next((path for folder in candidates if (path := folder / _name()).is_file()), None)


def cxx_compiler() -> list[str] | None:
    """Returns the command of the C++ compiler of this machine: $CXX, g++, c++, clang++, or None."""
    setting = shlex.split(os.environ.get("CXX", ""))
    if setting:
        return setting if shutil.which(setting[0]) else None
    return next(([name] for name in _COMPILERS if shutil.which(name)), None)


def compile_front(compiler: list[str], folder: Path) -> Path:
    """Compiles the native front into a folder, which is created, and returns the library.

    Raises:
        CompileError: the compiler failed, or cannot be run.
    """
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / _name()
    # Another process may compile it too, or load it.
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        unfinished = Path(temporary) / LIBRARY
        command = [
            *(*compiler, *_FLAGS, f"-Wl,--version-script={SOURCES / 'exports.map'}"),
            *(*map(str, sorted(SOURCES.glob("*.cc"))), "-o", str(unfinished)),
        ]
        try:
            run = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            raise CompileError(f"{compiler[0]}: {error.strerror}") from error
        if run.returncode:
            raise CompileError("\n".join(run.stderr.strip().splitlines()[-20:]))
        unfinished.replace(library)
    for other in folder.glob(f"{Path(LIBRARY).stem}-*.so"):
        if other != library:  # of other sources
            other.unlink(missing_ok=True)
    return library


def _name() -> str:
    digest = hashlib.sha256(" ".join(_FLAGS).encode())
    for source in sorted(SOURCES.iterdir()):
        if source.is_file():
            digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return f"{Path(LIBRARY).stem}-{digest.hexdigest()[:16]}.so"


def main(machines: Sequence[str]) -> int:
    """Builds the libraries of the wheel, and returns the exit code."""
    for machine in machines:
        # zig links its C++ library statically without these flags, and would call them an error.
        target = ["-target", f"{machine}-linux-gnu.{GLIBC}", "-Wno-unused-command-line-argument"]
        try:
            library = compile_front(
                [sys.executable, "-m", "ziglang", "c++", *target], SOURCES / machine
            )
        except CompileError as error:
            print(f"{machine}: {error}", file=sys.stderr)
            return 1
        print(f"{library}: {library.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or MACHINES))

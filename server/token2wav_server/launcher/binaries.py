"""Search for a tritonserver on this machine, with a Python backend for this interpreter.

There are two sources. The first is an installation of Triton; the NGC image has one in
/opt/tritonserver. An installation is complete, but its Python backend works with one Python version
only. The second source is the wheel nvidia-pytriton, from which only files are used: `token2wav
setup` installs it into a folder of its own, because its requirements are not installed. Its
Python backend has to be assembled from a library and the stub for this Python version. The stub is
the program that runs a Python model in a process of its own.

The native front is no Python model, so a server with this front works with any Python version. The
Python front, the ensemble and the models of CosyVoice's Triton recipe are Python models.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from token2wav_server.launcher.errors import TritonNotFoundError

WHEEL = "nvidia-pytriton==0.7.0"
WHEEL_FOLDER = Path(sys.prefix) / "share" / "token2wav" / "triton"
# Folder with NumPy 1, if `token2wav setup --recipe` made it. The wheel's stubs do not know the
# layout of NumPy 2: with it, an input of strings ends the model process.
STUB_NUMPY_FOLDER = WHEEL_FOLDER.with_name("numpy1")
_VARIABLE = "TOKEN2WAV_TRITONSERVER"
_INSTALLED = Path("/opt/tritonserver")
_EXECUTABLE = Path("bin/tritonserver")
_STUB = "triton_python_backend_stub"
# Name of the Python library, in the list of libraries that a stub is linked with.
_STUB_PYTHON = re.compile(rb"libpython(\d+\.\d+)\.so")
_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
_LIBPYTHON = f"libpython{_PYTHON}.so.1.0"


@dataclass(frozen=True)
class Triton:
    """Installation of tritonserver that can be run.

    Attributes:
        backends: folder for the option ``--backend-directory``.
    """

    executable: Path
    backends: Path
    environment: dict[str, str]


def find_tritonserver(folder: Path, *, python_models: bool = True) -> Triton:
    """Finds a tritonserver.

    The first of these is used: the installation in $TOKEN2WAV_TRITONSERVER, an installation on
    PATH, /opt/tritonserver, the wheel.

    Args:
        folder: folder in which the Python backend of the wheel is assembled.
        python_models: whether Python models will run, which need a Python backend for this version.

    Raises:
        TritonNotFoundError: no tritonserver can be used. The message names the missing part, and
            how to get it.
    """
    installation = _installation()
    if installation is not None:
        if python_models:
            _check_stub(installation)
        return Triton(installation / _EXECUTABLE, installation / "backends", _environment([]))
    if not (root := _wheel_root()).is_dir():
        raise TritonNotFoundError(
            "tritonserver not found: run `token2wav setup` (Linux with glibc 2.35 or newer: "
            f"Debian 12, Ubuntu 22.04), or set {_VARIABLE} to an installation of Triton such as "
            f"{_INSTALLED}"
        )
    (backends := folder / "backends").mkdir(parents=True)
    libraries = [WHEEL_FOLDER / "nvidia_pytriton.libs"]
    if python_models:
        libraries = [*_libpython_folders(), *libraries]
        _assemble(backends / "python", _environment(libraries))
    return Triton(root / _EXECUTABLE, backends, _environment(libraries))


def _installation() -> Path | None:
    setting = os.environ.get(_VARIABLE)
    if setting:
        if not _is_executable(Path(setting) / _EXECUTABLE):
            raise TritonNotFoundError(
                f"{_VARIABLE}={setting} is not an installation of Triton, because "
                f"{_EXECUTABLE} is not an executable file there: correct or unset the "
                "variable"
            )
        return Path(setting).resolve()
    on_path = shutil.which(_EXECUTABLE.name)
    if on_path:
        return Path(on_path).resolve().parent.parent
    return _INSTALLED if _is_executable(_INSTALLED / _EXECUTABLE) else None


def _is_executable(path: Path) -> bool:
    # In this order: `os.access` returns False in a folder without permission, where `is_file` could
    # raise an error.
    return os.access(path, os.X_OK) and path.is_file()


def _check_stub(installation: Path) -> None:
    """Checks that an installation of Triton has a stub for this Python version."""
    backends = installation / "backends"
    stub = backends / "python" / _STUB
    if not stub.is_file():
        raise TritonNotFoundError(
            f"{installation} has no Python backend in {backends}: "
            f"name another installation with {_VARIABLE}, or use Triton's image with the Python "
            f"backend"
        )
    match = _STUB_PYTHON.search(stub.read_bytes())
    if match and (stub_python := match[1].decode()) != _PYTHON:
        # The stub would use the standard library of one Python and the packages of the other.
        raise TritonNotFoundError(
            f"{stub} is made for Python {stub_python}, but this is Python {_PYTHON}: install "
            f"token2wav for Python {stub_python}, or name another installation with {_VARIABLE}"
        )


def wheel_has_stub() -> bool:
    """Returns whether the wheel, once installed, has a Python backend for this Python version."""
    return _wheel_stub().is_file()


def _wheel_root() -> Path:
    return WHEEL_FOLDER / "pytriton" / "tritonserver"


def _wheel_stub() -> Path:
    return _wheel_root() / "python_backend_stubs" / _PYTHON / _STUB


def _assemble(backend: Path, environment: dict[str, str]) -> None:
    """Assembles the Python backend of the wheel.

    Args:
        backend: folder of the new backend.
        environment: environment of tritonserver, in which libpython must be found.
    """
    if not wheel_has_stub():
        raise TritonNotFoundError(
            f"{WHEEL} has no Python backend for Python {_PYTHON}, which the Python front, the "
            "ensemble and the models of CosyVoice's recipe need: use Python 3.10 to 3.13, or for a "
            "server without these install g++ and run `token2wav setup`"
        )
    backend.mkdir()
    library_folder = _wheel_root() / "backends" / "python"
    for file in (library_folder / "libtriton_python.so", _wheel_stub()):
        (backend / file.name).symlink_to(file)
    # Stubs ignore PYTHONPATH. A model that takes strings imports this module before NumPy.
    utilities = library_folder / "triton_python_backend_utils.py"
    code = utilities.read_text()
    if STUB_NUMPY_FOLDER.is_dir():
        code = f"import sys\nsys.path.insert(0, {str(STUB_NUMPY_FOLDER)!r})\n{code}"
    (backend / utilities.name).write_text(code)
    # Loads the library in a new process, because the loader's path of a running process is fixed.
    probe = [sys.executable, "-I", "-S", "-c", f"import ctypes; ctypes.CDLL({_LIBPYTHON!r})"]
    if subprocess.run(probe, env=environment, stderr=subprocess.DEVNULL, check=False).returncode:
        raise TritonNotFoundError(
            f"{_LIBPYTHON}, which Triton's Python backend needs, cannot be loaded: "
            f"install it (Debian, Ubuntu: `apt-get install libpython{_PYTHON}`), "
            "or use a Python that was built with --enable-shared"
        )


def _libpython_folders() -> list[Path]:
    """Returns the folder with the libpython of this interpreter, if it comes with one.

    The libpython of a Linux distribution is on the loader's path already.
    """
    candidates = [
        Path(sysconfig.get_config_var("LIBDIR") or sys.base_prefix),
        Path(sys.base_prefix) / "lib",
    ]
    return [folder for folder in candidates if (folder / _LIBPYTHON).is_file()][:1]


def _environment(libraries: list[Path]) -> dict[str, str]:
    """Returns the environment in which stubs find the packages and the library of this Python.

    Stubs find site-packages through ``python3`` on PATH, and libpython on the loader's path.
    """
    environment = dict(os.environ)
    for name, folders in (("PATH", [Path(sys.executable).parent]), ("LD_LIBRARY_PATH", libraries)):
        if folders:
            environment[name] = os.pathsep.join(
                [*map(str, folders), *filter(None, [environment.get(name)])]
            )
    return environment

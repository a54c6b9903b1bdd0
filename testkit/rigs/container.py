"""Runs the entry point of the server's image without docker, confined as in docker-compose.yml.

Instead of the image, it uses this checkout, which has the same layout, the environment of the
tests, and an installation of Triton. The installation has the layout of NVIDIA's image, and
consists of links to the files of the wheel.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import yaml

from token2wav_server.launcher.binaries import WHEEL_FOLDER

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
ENTRYPOINT = DOCKER / "entrypoint.sh"
COMPOSE = DOCKER / "docker-compose.yml"
WITH_BALANCER = DOCKER / "balancer" / "docker-compose.yml"
WITH_MPS = DOCKER / "mps.yml"
WITH_HUB = DOCKER / "hub.yml"

# Arguments: number of kept paths, the kept paths, and the command. The confinement is that of
# docker: only small temporary folders are writable, and no program can run from them. The user has
# no name, no capability and no way to get one.
_CONFINE = """
set -e
kept=$1; shift
mount -t tmpfs tmpfs /mnt
for number in $(seq "$kept"); do
    mkdir "/mnt/$number"; mount --bind "$1" "/mnt/$number"; \
printf '%s\\n' "$1" > "/mnt/$number.path"; shift
done
options=mode=1777,noexec,nosuid,nodev
mount -t tmpfs -o mode=755 tmpfs /root
mount -t tmpfs -o "size=256m,$options" tmpfs /tmp
mount -t tmpfs -o "size=256m,$options" tmpfs /dev/shm
mount -t tmpfs -o mode=755 tmpfs /run
mkdir /run/token2wav
mount -t tmpfs -o "size=1m,$options" tmpfs /run/token2wav
for number in $(seq "$kept"); do
    path=$(cat "/mnt/$number.path"); mkdir -p "$path"
    mount --bind "/mnt/$number" "$path"; mount -o remount,bind,ro "$path"
done
mount -o remount,bind,ro /
exec setpriv --reuid=10001 --regid=10001 --clear-groups --no-new-privs --bounding-set=-all \
--inh-caps=-all "$@"
"""


class _Loader(yaml.SafeLoader):
    """YAML loader that knows the tags of docker compose."""


def _sequence(loader: Any, node: Any) -> list[Any]:
    return list(loader.construct_sequence(node, deep=True))


_Loader.add_constructor("!reset", lambda loader, node: None)
_Loader.add_constructor("!override", _sequence)


def read_compose(file: Path) -> dict[str, Any]:
    document: dict[str, Any] = yaml.load(file.read_text(), _Loader)
    return document


def defaults(text: str) -> str:
    """Returns a value of a compose file, with all its variables unset."""
    default = re.compile(r"\$\{\w+(?::(?:-([^}]*)|\?[^}]*))?\}")
    return default.sub(lambda match: match[1] or "", text)


def confined(*folders: Path) -> list[str]:
    """Returns the start of a command that runs another one confined as in docker-compose.yml.

    The folders stay readable at their paths.
    """
    environment = {Path(sys.prefix), Path(sys.base_prefix)} - {Path("/usr")}
    paths = [str(path) for path in (ROOT, *environment, *folders)]
    return ["unshare", "--mount", "sh", "-c", _CONFINE, "sh", str(len(paths)), *paths]


def why_not_confined() -> str:
    """Returns the reason why this machine cannot confine a command; empty if it can."""
    probe = [*confined(), sys.executable, "-c", "import token2wav_server.cli"]
    try:
        tried = subprocess.run(probe, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        return str(error)
    return tried.stderr.strip() or f"exit code {tried.returncode}" if tried.returncode else ""


def ngc_installation(root: Path) -> Path:
    """Builds the layout of /opt/tritonserver in NVIDIA's image, with links to the wheel's files."""
    wheel = WHEEL_FOLDER / "pytriton" / "tritonserver"
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    files = {
        "bin/tritonserver": wheel / "bin" / "tritonserver",
        "backends/python/libtriton_python.so": wheel
        / "backends"
        / "python"
        / "libtriton_python.so",
        "backends/python/triton_python_backend_utils.py": wheel
        / "backends/python/triton_python_backend_utils.py",
        "backends/python/triton_python_backend_stub": wheel
        / "python_backend_stubs"
        / python
        / ("triton_python_backend_stub"),
    }
    for name, file in files.items():
        link = root / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(file)
    return root


def image_environment(installation: Path) -> dict[str, str]:
    """Returns the environment of this process plus the variables that ENV sets in the image.

    The loader's path includes the libraries that NVIDIA's image has on it.
    """
    wheel_libraries = WHEEL_FOLDER / "nvidia_pytriton.libs"
    libraries = [sysconfig.get_config_var("LIBDIR"), str(wheel_libraries)]
    return os.environ | {
        "TOKEN2WAV_TRITONSERVER": str(installation),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "LD_LIBRARY_PATH": os.pathsep.join(libraries),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HOME": "/tmp",
        "TMPDIR": "/tmp",
    }

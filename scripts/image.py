"""Image run without an engine: a command in its file system, confined as docker confines it by
docker-compose.yml.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
# Commands that make the devices and the virtual file systems of a container.
_DEVICES = """\
mount --rbind /proc proc
mount --bind /sys sys
mount -t tmpfs -o mode=755 tmpfs dev
mkdir dev/shm
ln -s /proc/self/fd dev/fd
touch dev/null; mount --bind /dev/null dev/null
touch dev/zero; mount --bind /dev/zero dev/zero
touch dev/urandom; mount --bind /dev/urandom dev/urandom"""
_WITHOUT_PRIVILEGES = ["--clear-groups", "--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"]


@dataclass(frozen=True)
class Image:
    """Container image that is run without a container engine.

    Attributes:
        root: folder at which its file system lies.
        config: its configuration: user, entry point, environment and the rest.
        service: its service in docker-compose.yml.
    """

    name: str
    root: Path
    config: dict[str, Any]
    service: dict[str, Any]

    @classmethod
    @contextmanager
    def mounted(cls, name: str, service: str) -> Iterator[Image]:
        """Mounts the image of a service for as long as it is used."""
        services = yaml.safe_load((ROOT / "docker" / "docker-compose.yml").read_text())["services"]
        config = json.loads(call("buildah", "inspect", "--type", "image", name))["OCIv1"]["config"]
        container = call("buildah", "from", "--pull-never", name).strip()
        try:
            yield cls(
                name, Path(call("buildah", "mount", container).strip()), config, services[service]
            )
        finally:
            call("buildah", "rm", container)

    def command(
        self, words: Sequence[str], binds: dict[str, Path], writable: Sequence[str] = ()
    ) -> list[str]:
        """Returns a command that runs the image's entry point as docker would by the compose file.

        Its root can only be read; the network is this machine's.

        Args:
            words: arguments of the entry point, or a command where the first begins with a slash.
            binds: files and folders of this machine, by their path in the container.
            writable: paths in the container, among `binds`, that can be written.
        """
        root = shlex.quote(str(self.root))
        hosts = {path: Path(path) for path in ("/etc/resolv.conf", "/etc/hosts")}
        lines = [f"mount --bind {root} {root}", f"cd {root}", *_DEVICES.splitlines()]
        shared = str(self.service.get("shm_size", "64m")).rpartition("-")[2].rstrip("}")
        shm = f"/dev/shm:size={shared},mode=1777,noexec,nosuid,nodev"
        for mount in [shm, *self.service.get("tmpfs", [])]:
            path, _, options = mount.partition(":")
            lines += [f"mkdir -p .{path}", f"mount -t tmpfs -o {options} tmpfs .{path}"]
        for path, source in {**hosts, **binds}.items():
            file = f"mkdir -p $(dirname .{path}); touch .{path}"
            lines.append(f"mkdir -p .{path}" if source.is_dir() else file)
            lines.append(f"mount --bind {shlex.quote(str(source))} .{path}")
            if path not in writable:
                lines.append(f"mount -o remount,bind,ro .{path}")
        lines += ["mount -o remount,bind,ro .", 'exec "$@"']
        isolated = ["unshare", "--mount", "sh", "-c", "\n".join(["set -e", *lines]), "sh"]
        folder, user = f"--chdir={self.config['WorkingDir']}", self.config["User"].split(":")
        inside = ["chroot", str(self.root), "env", "--ignore-environment", folder]
        confined = ["setpriv", f"--reuid={user[0]}", f"--regid={user[1]}", *_WITHOUT_PRIVILEGES]
        program = [] if words and words[0].startswith("/") else self.config["Entrypoint"]
        return [*isolated, *inside, *self.config["Env"], *confined, *program, *words]


def call(*command: str | Path, **options: Any) -> str:
    """Runs a command and returns its output. If the command fails, the check fails."""
    done = subprocess.run(
        [str(word) for word in command], stdout=subprocess.PIPE, text=True, check=False, **options
    )
    if done.returncode != 0:
        sys.exit(
            f"check: {shlex.join(map(str, command))} ended with "
            f"{done.returncode}\n{done.stdout[-4000:]}"
        )
    return str(done.stdout)

"""Resources of a running server, so that a test can check later that all are released."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path

from testkit.rigs.processes import children, descendants, environment, parent, stat_fields
from token2wav_server.launcher import reaper

# time for the reaper of another test's ending server to remove a backend folder of that server
_OTHERS_SECONDS = 30.0


@dataclass(frozen=True)
class Traces:
    """Processes, shared memory and private folder of one server.

    Attributes:
        processes: ids of the reaper, of tritonserver, of its stubs and all their children, and of
            the engine. The native front has no stub.
        engines: id of the process with the model; empty if the server has none at the moment.
        shm_prefix: prefix of the names of the server's segments in /dev/shm.
        folders: temporary folder of the server, and folders of Python backends unless another
            server may have made them.
    """

    processes: tuple[int, ...]
    shm_prefix: str
    folders: tuple[Path, ...]
    engines: tuple[int, ...]

    @property
    def engine(self) -> int:
        """Returns the id of the process with the model.

        Raises:
            ProcessLookupError: the server had none.
        """
        if not self.engines:
            raise ProcessLookupError("the server has no engine at the moment")
        return self.engines[0]

    @classmethod
    def of(cls, server: int) -> Traces:
        """Reads the traces of the tritonserver with this process id."""
        command = Path(f"/proc/{server}/cmdline").read_text().replace("\0", "\n")
        folder = Path(_only(r"--backend-directory=(.+)/backends", command))
        backends = [] if reaper.running_servers() - {server} else Path("/tmp").glob("python_env_*")
        reaper_process = parent(server)
        # The engine is the other child of the launcher that knows the private folder.
        engines = tuple(
            child
            for child in children(parent(reaper_process))
            if child != reaper_process and bytes(folder) in environment(child)
        )
        return cls(
            processes=(reaper_process, server, *descendants(server), *engines),
            shm_prefix=_only(r"shm-region-prefix-name=(.+)", command),
            folders=(folder, *backends),
            engines=engines,
        )

    def remaining(self) -> list[str]:
        """Names all resources that still exist."""
        running = [f"process {process}" for process in self.processes if _runs(process)]
        segments = [str(path) for path in Path("/dev/shm").glob(f"{self.shm_prefix}*")]
        deadline = time.monotonic() + _OTHERS_SECONDS
        while folders := [str(folder) for folder in self.folders if self._is_left(folder)]:
            if running or str(self.folders[0]) in folders or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        return running + segments + folders

    def _is_left(self, folder: Path) -> bool:
        """Returns whether a folder remains that only this server can have made.

        A folder that another running server may have made stays for that server.
        """
        other_servers = reaper.running_servers() - set(self.processes)
        return folder.exists() and not ("python_env_" in folder.name and other_servers)

    def remaining_after(self, seconds: float) -> list[str]:
        """Returns `remaining` after waiting up to `seconds` for all resources to go."""
        deadline = time.monotonic() + seconds
        while (remaining := self.remaining()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return remaining


def _runs(process: int) -> bool:
    try:
        return stat_fields(process)[0] != "Z"  # a zombie only waits for its parent
    except (FileNotFoundError, ProcessLookupError):
        return False


def _only(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    assert match, f"{pattern} not in {text}"
    return match[1]

"""Reaper of a server: it runs tritonserver as its child, outlives it and the launcher, and cleans
up after either.

A launcher that is killed cannot clean up, and a parent-death signal alone would leave the server's
shared memory behind (and follows a thread, not the process). So this small process stands in
between. It is started by path with ``python -I -S``: only the standard library, no project imports.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PARENT_POLL_S = 0.25
_STUB_NAME = "(triton_python_b"  # as far as the kernel keeps it
STOP_AT_ONCE = signal.SIGINT
_STOP_SIGNALS = {signal.SIGTERM, signal.SIGHUP, STOP_AT_ONCE}
_KILL_S = 5.0
_KILL_POLL_S = 0.02
MESSAGE = "reaper: "


def remove_leftovers(folder: Path, shm_prefix: str) -> None:
    """Removes a server's processes, private folder, shared-memory segments and backend folder; fine
    to call twice.
    """
    _kill_processes_of(folder)
    shutil.rmtree(folder, ignore_errors=True)
    for segment in Path("/dev/shm").glob(f"{shm_prefix}*"):
        segment.unlink(missing_ok=True)
    # A killed Python backend leaves an empty folder in /tmp, whatever TMPDIR says. Nothing tells
    # whose it is, and a server that misses its own aborts when it stops. So the last server of a
    # machine removes all of its user's.
    if not running_servers():
        for empty in Path("/tmp").glob("python_env_*"):
            with contextlib.suppress(OSError):
                if empty.stat().st_uid == os.getuid():
                    empty.rmdir()


def children(pid: int) -> list[int]:
    """Returns the ids of a process's children, none if the process has ended."""
    found: list[int] = []
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread that ends meanwhile
            found += map(int, listed.read_text().split())
    return found


def _kill_processes_of(folder: Path) -> None:
    """Kills all processes of the server with this private folder, and waits until they have ended.

    A model process outlives a reaper that was killed: the server dies with the reaper, but its
    children do not. All of them have the folder in their environment, which no process of another
    server has.
    """
    mark, deadline = os.fsencode(folder) + b"/", time.monotonic() + _KILL_S
    while time.monotonic() < deadline:
        found = False
        for environment in Path("/proc").glob("[0-9]*/environ"):
            pid = int(environment.parent.name)
            # a process of another user, or one that has just ended
            with contextlib.suppress(OSError):
                if pid != os.getpid() and mark in environment.read_bytes():
                    os.kill(pid, signal.SIGKILL)
                    found = True
        if not found:
            return
        time.sleep(_KILL_POLL_S)


def running_servers() -> set[int]:
    """Returns the process ids of all tritonservers on this machine."""
    running = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            name, _, fields = stat.read_text().rpartition(")")
            if name.endswith("(tritonserver") and fields.split()[0] != "Z":
                running.add(int(stat.parent.name))
    return running


def run(
    launcher_pid: int, folder: Path, shm_prefix: str, grace_s: float, command: list[str]
) -> int:
    """Runs ``command`` until it ends, loses a model process, this process is told to stop, or the
    launcher is gone.

    The server may take ``grace_s`` after SIGTERM before it is killed.

    Returns:
        Its exit status, 128 + n if signal n ended it.
    """
    # Blocked before the server exists, so that a signal at any later moment is seen by
    # sigtimedwait.
    inherited_mask = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS | {signal.SIGCHLD})
    prctl = ctypes.CDLL(None).prctl
    # model processes that died before their server come to us, who ask why
    prctl(_PR_SET_CHILD_SUBREAPER, 1)

    def in_child() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_SETMASK, inherited_mask)

    try:
        server = subprocess.Popen(command, start_new_session=True, preexec_fn=in_child)
        try:
            if _told_to_stop(server, launcher_pid):
                server.terminate()
                _wait_for_end(server, grace_s)
        finally:
            # Whatever is left of its process group: the server itself, or stubs that it left
            # behind.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)
            status = server.wait()
    finally:
        remove_leftovers(folder, shm_prefix)
    return status if status >= 0 else 128 - status


def _told_to_stop(server: subprocess.Popen[bytes], launcher_pid: int) -> bool:
    """Waits, and says whether the server should end in good order: not if it has ended, or nobody
    needs it any more.
    """
    dead: dict[int, int] = {}
    while server.poll() is None:
        if os.getppid() != launcher_pid:
            return False
        # Twice in a row, because Triton itself may kill one whose model fails to load, and takes a
        # moment to bury it.
        dead_before, dead = dead, _dead_stubs(server.pid)
        if lost := dead_before.keys() & dead.keys():
            _tell(dead[min(lost)])
            return False
        received = signal.sigtimedwait(_STOP_SIGNALS | {signal.SIGCHLD}, _PARENT_POLL_S)
        if received is not None and received.si_signo in _STOP_SIGNALS:
            return received.si_signo != STOP_AT_ONCE
    if dead := _dead_stubs(os.getpid()):  # of which the server died, too, before they were seen
        _tell(dead[min(dead)])
    return False


def _wait_for_end(server: subprocess.Popen[bytes], grace_s: float) -> None:
    """Waits for a server that is stopping, until the grace is over or it should end at once."""
    deadline = time.monotonic() + grace_s
    while server.poll() is None and (left_s := deadline - time.monotonic()) > 0:
        received = signal.sigtimedwait({STOP_AT_ONCE, signal.SIGCHLD}, left_s)
        if received is not None and received.si_signo == STOP_AT_ONCE:
            return


def _dead_stubs(parent_pid: int) -> dict[int, int]:
    """Returns the wait status, by process id, of Python models that died under their server, which
    never notices.

    It says that it is ready, and fails requests one by one after a second each, or not at all. A
    stub that Triton ends itself is waited for, so that it is no zombie for long, and has status 0.
    """
    dead = {}
    with contextlib.suppress(OSError):  # whatever ends while it is looked at
        for child in children(parent_pid):
            name, _, fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")
            state, *_, status = fields.split()
            if _STUB_NAME in name and state == "Z" and int(status):
                dead[child] = int(status)
    return dead


def _tell(status: int) -> None:
    """Prints how a model process ended that left a wait status."""
    code = os.waitstatus_to_exitcode(status)
    how = (
        f"was killed by signal {signal.Signals(-code).name}"
        if code < 0
        else f"ended with status {code}"
    )
    print(f"{MESSAGE}the model process {how}", flush=True)


if __name__ == "__main__":
    _launcher_pid, _folder, _shm_prefix, _grace_s, *_command = sys.argv[1:]
    sys.exit(run(int(_launcher_pid), Path(_folder), _shm_prefix, float(_grace_s), _command))

"""Reaper of a server: a small process that runs tritonserver as its child, and cleans up after it.

A launcher that is killed cannot clean up. A parent-death signal alone would end the server, but
leave its shared memory behind. Besides, the kernel sends the signal when the thread that started
the child ends, even if the parent process continues. So the reaper runs between launcher and
server, and outlives both.

The launcher starts this file by its path with ``python -I -S``. So it uses only the standard
library, and imports nothing of the project.
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
_STUB_NAME = "(triton_python_b"  # the kernel stores the first 15 characters of a name
STOP_AT_ONCE = signal.SIGINT
_STOP_SIGNALS = {signal.SIGTERM, signal.SIGHUP, STOP_AT_ONCE}
_KILL_S = 5.0
_KILL_POLL_S = 0.02
MESSAGE = "reaper: "


def remove_leftovers(folder: Path, shm_prefix: str) -> None:
    """Removes everything that a server leaves behind; may be called twice.

    It ends the server's processes, and removes its private folder, its segments of shared memory
    and the empty folders of its Python backend.
    """
    _kill_processes_of(folder)
    shutil.rmtree(folder, ignore_errors=True)
    for segment in Path("/dev/shm").glob(f"{shm_prefix}*"):
        segment.unlink(missing_ok=True)
    # A Python backend that was killed leaves an empty folder in /tmp, even if TMPDIR is set. The
    # name of the folder does not identify the server, and a running server whose folder is missing
    # aborts when it stops. So the folders are removed when the last server on a machine ends: all
    # folders of its user.
    if not running_servers():
        for leftover in Path("/tmp").glob("python_env_*"):
            with contextlib.suppress(OSError):
                if leftover.stat().st_uid == os.getuid():
                    leftover.rmdir()


def children(pid: int) -> list[int]:
    """Returns the process ids of a process's children; an empty list if the process has ended."""
    pids: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread that has just ended
            pids += map(int, file.read_text().split())
    return pids


def _kill_processes_of(folder: Path) -> None:
    """Kills all processes of the server with this private folder, and waits until they have ended.

    If the reaper is killed, the server ends with it, but the server's children, the model
    processes, continue. The processes are found by their environment variables: only processes of
    this server have the folder there.
    """
    mark, deadline = os.fsencode(folder) + b"/", time.monotonic() + _KILL_S
    while time.monotonic() < deadline:
        kills = 0
        for environment in Path("/proc").glob("[0-9]*/environ"):
            pid = int(environment.parent.name)
            # An error means that the process belongs to another user, or has just ended.
            with contextlib.suppress(OSError):
                if pid != os.getpid() and mark in environment.read_bytes():
                    os.kill(pid, signal.SIGKILL)
                    kills += 1
        if not kills:
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
    """Runs the server until it ends or has to be stopped, and cleans up after it.

    The server is stopped when one of its model processes dies, when this process receives a stop
    signal, or when the launcher has ended.

    Args:
        shm_prefix: name prefix of the server's shared memory segments.
        grace_s: seconds that the server may take after SIGTERM before it is killed.

    Returns:
        The exit status of the server; 128 + n if signal n ended it.
    """
    # The signals are blocked before the server exists. So `sigtimedwait` receives every signal that
    # arrives later.
    inherited_mask = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS | {signal.SIGCHLD})
    prctl = ctypes.CDLL(None).prctl
    # A model process whose server has ended becomes a child of this process. So this process can
    # read its exit status.
    prctl(_PR_SET_CHILD_SUBREAPER, 1)

    def in_child() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_SETMASK, inherited_mask)

    try:
        server = subprocess.Popen(command, start_new_session=True, preexec_fn=in_child)
        try:
            if _stop_requested(server, launcher_pid):
                server.terminate()
                _wait_for_end(server, grace_s)
        finally:
            # Ends the processes that are left in the group of the server: the server itself, or
            # model processes that have outlived it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)
            status = server.wait()
    finally:
        remove_leftovers(folder, shm_prefix)
    return status if status >= 0 else 128 - status


def _stop_requested(server: subprocess.Popen[bytes], launcher_pid: int) -> bool:
    """Waits until the server ends or has to be stopped.

    Returns:
        True if the server should be stopped with SIGTERM and a grace period. False if it has ended,
        or should be killed at once: the launcher has ended, a model process has died, or the stop
        signal was STOP_AT_ONCE.
    """
    dead: dict[int, int] = {}
    while not _has_ended(server.pid):
        if os.getppid() != launcher_pid:
            return False
        # A dead model process counts only if it is found twice in a row. Triton itself may kill a
        # model process whose model fails to load, and takes a moment to read its exit status.
        dead_before, dead = dead, _dead_stubs(server.pid)
        if lost := dead_before.keys() & dead.keys():
            _print_end(dead[min(lost)])
            return False
        arrival = signal.sigtimedwait(_STOP_SIGNALS | {signal.SIGCHLD}, _PARENT_POLL_S)
        if arrival is not None and arrival.si_signo in _STOP_SIGNALS:
            return arrival.si_signo != STOP_AT_ONCE
    # The server has ended. Model processes that died before are children of this process now, and
    # explain why.
    if dead := _dead_stubs(os.getpid()):
        _print_end(dead[min(dead)])
    return False


def _has_ended(pid: int) -> bool:
    """Returns whether a child process has ended, without reading its exit status.

    Until its status is read, the child is a zombie, which `kill` still finds. A model process looks
    for its server by `kill` every 0.3 s, and ends with status 1 when it finds none. So the end of
    the server ends no model process before the status of the server is read.
    """
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _wait_for_end(server: subprocess.Popen[bytes], grace_s: float) -> None:
    """Waits until a stopping server ends, the grace period is over or STOP_AT_ONCE is received."""
    deadline = time.monotonic() + grace_s
    while server.poll() is None and (left_s := deadline - time.monotonic()) > 0:
        arrival = signal.sigtimedwait({STOP_AT_ONCE, signal.SIGCHLD}, left_s)
        if arrival is not None and arrival.si_signo == STOP_AT_ONCE:
            return


def _dead_stubs(parent_pid: int) -> dict[int, int]:
    """Returns the wait status, by process id, of model processes that died while their server runs.

    Triton never notices their death. It still reports that it is ready, and fails each request
    after a second, or never answers. If Triton itself ends a model process, it also reads the
    exit status. Such a process is a zombie for a short time only, and its status is 0.
    """
    dead = {}
    with contextlib.suppress(OSError):  # a process that has just ended
        for child in children(parent_pid):
            name, _, fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")
            state, *_, status = fields.split()
            if _STUB_NAME in name and state == "Z" and int(status):
                dead[child] = int(status)
    return dead


def _print_end(status: int) -> None:
    """Prints a message about the end of a model process, given its wait status."""
    code = os.waitstatus_to_exitcode(status)
    end = (
        f"was killed by signal {signal.Signals(-code).name}"
        if code < 0
        else f"ended with status {code}"
    )
    print(f"{MESSAGE}the model process {end}", flush=True)


if __name__ == "__main__":
    _launcher_pid, _folder, _shm_prefix, _grace_s, *_command = sys.argv[1:]
    sys.exit(run(int(_launcher_pid), Path(_folder), _shm_prefix, float(_grace_s), _command))

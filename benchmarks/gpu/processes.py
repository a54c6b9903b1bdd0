"""A section in a process of its own: what kills it does not take the others along."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import time
import traceback
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from benchmarks.gpu.device import describe_device
from benchmarks.gpu.records import UNFINISHED, Record, read_records, write_json
from benchmarks.gpu.sections import SECTIONS
from benchmarks.gpu.settings import Settings

_GRACE_S = 60.0  # for a server to drain
_POLL_S = 0.05


def run_section(name: str, folder: Path, settings: Settings, facts: dict[str, Any]) -> str | None:
    """Runs one to its end; what it measured is in its record whatever happens. Returns why it ended early, or None.

    Args:
        name: of the section.
        folder: of the model.
        settings: what to measure.
        facts: of host and run.
    """
    # Its children come of a process that has imported everything and touched no device.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.gpu.sections"])
    began = time.monotonic()
    process = context.Process(target=_work, args=(name, folder, settings, facts))
    path = settings.out / f"{name}.json"
    path.unlink(missing_ok=True)
    process.start()
    problem = None
    try:
        process.join(60 * settings.minutes)
    finally:  # also when this process is told to end
        late = process.is_alive()
        if late:
            _end(process, path)
    if late:
        problem = f"ended after {settings.minutes:g} minutes; what it had measured by then is here"
    elif process.exitcode:
        problem = _ending(process.exitcode)
    content = read_records(settings.out, [name]).get(name, {**facts, "problem": UNFINISHED})
    if content["problem"] == UNFINISHED and problem:
        content["problem"] = problem
    content["took_s"] = round(time.monotonic() - began, 1)
    write_json(path, content)
    return content["problem"]


def _end(process: BaseProcess, path: Path) -> None:
    """Interrupts it, so that it ends what it started, a server for one; then kills it and all of its group."""
    assert process.pid is not None
    deadline = time.monotonic() + _GRACE_S
    while not path.exists() and process.is_alive() and time.monotonic() < deadline:
        time.sleep(_POLL_S)  # a process that has only begun does not hear it
    with contextlib.suppress(ProcessLookupError):  # it may end by itself at any moment
        os.kill(process.pid, signal.SIGINT)
    process.join(max(0.0, deadline - time.monotonic()))
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()  # where it has not come to make a group of its own
    process.join()


def _work(name: str, folder: Path, settings: Settings, facts: dict[str, Any]) -> None:
    """What the process does; it ends with 1 where an error has been written down."""
    os.setsid()
    record = Record(settings.out / f"{name}.json", facts)
    signal.signal(signal.SIGINT, record.interrupt)
    try:
        record.facts(describe_device(settings.device))
        SECTIONS[name](folder, settings, record)
        record.finish()
    except Exception as error:
        traceback.print_exc()
        record.finish(f"{type(error).__name__}: {' '.join(str(error).split())[:500]}")
        sys.exit(1)


def _ending(code: int) -> str:
    return f"its process ended with {code}" if code > 0 else f"its process was ended by {signal.Signals(-code).name}"

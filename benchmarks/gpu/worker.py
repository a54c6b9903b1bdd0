"""Runs every section of the report in its own process, so that an error that makes the device
unusable ends one row. Another process goes on with the next row.
"""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing
import os
import re
import signal
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from importlib import import_module
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.settings import SECTIONS, LeftOut, Row, Rows, Settings

LOG = "log.txt"  # output of all processes, in the folder of the results
_GRACE_S = 10.0  # for a server to drain


class Results:
    """Facts of host and run, sections and rows of a slice; the file is written after every row.

    `problem` of a row says why the row failed. `left_out` says why it was not measured.
    """

    def __init__(self, path: Path, facts: Mapping[str, Any]) -> None:
        self._path = path
        self.content: dict[str, Any] = {"facts": dict(facts), "sections": [], "rows": []}

    def add(self, section: str, key: str, row: Row) -> None:
        self.content["rows"].append(
            {"section": section, "key": key, "problem": None, "left_out": None} | row
        )
        shown = {
            name: value
            for name, value in row.items()
            if not isinstance(value, list | dict) or len(value) < 5
        }
        self.write(
            f"{section}: {key}: {', '.join(f'{name} {value}' for name, value in shown.items())}"
        )

    def end(self, section: str, problem: str | None, took_s: float) -> None:
        self.content["sections"].append(
            {"section": section, "problem": problem, "took_s": round(took_s, 1)}
        )
        self.write(f"== {section}: {problem or 'done'} after {took_s:.0f} s")

    def write(self, line: str) -> None:
        write_json(self._path, self.content)
        print(line, flush=True)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a JSON file atomically: a reader never sees an incomplete file."""
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    temporary.replace(path)


def run_section(
    name: str, folder: Path, settings: Settings, results: Results, seconds: float
) -> None:
    """Runs a section until it ends or its time is over.

    Rows measured before an error or the end of the time are in the results. If an error ends the
    process after some rows, another process goes on with the next row. The section reports the
    errors of all its processes, except those that a row reports.

    Args:
        name: name of the section in `SECTIONS`.
        results: receives the rows.
        seconds: time limit. All processes that the section started have ended when this function
            returns.
    """
    # Not forked: modules of torch ask for the GPU when they are imported, and a process that is
    # forked after that cannot use the GPU.
    context = multiprocessing.get_context("spawn")
    began, done, goes_on, problems = time.monotonic(), dict[str, Row](), True, list[str]()
    while goes_on:
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(name, folder, settings, done, sender))
        before, ended, running = len(done), False, ""
        problem: str | None = "the section exceeded its time; the results before that are kept"
        goes_on = False
        process.start()
        sender.close()
        try:
            while not ended and receiver.poll(max(0.0, began + seconds - time.monotonic())):
                kind, key, value = receiver.recv()
                if kind == "facts":
                    results.content["facts"] |= value
                elif kind == "begin":
                    running = key
                elif kind == "row":
                    running, done[key] = "", value
                    results.add(name, key, value)
                else:
                    ended, problem = True, value
                    goes_on = problem is not None and len(done) > before
        except (EOFError, OSError):
            process.join(_GRACE_S)
            code = process.exitcode or 0
            problem = f"the process ended with {signal.Signals(-code).name if code < 0 else code}"
            if running:
                done[running] = {"problem": problem}
                results.add(name, running, done[running])
                problem = None
            goes_on = len(done) > before
        finally:
            _end(process, _GRACE_S if ended else 0.0)
            receiver.close()
        problems += [] if problem is None else [problem]
    results.end(name, "; ".join(dict.fromkeys(problems)) or None, time.monotonic() - began)


def _end(process: BaseProcess, patience_s: float) -> None:
    """Interrupts the process, then kills its process group until no process of the group is left.

    The interrupt lets the process end the processes that it has started.
    """
    process.join(patience_s)
    pid, deadline = process.pid or 0, time.monotonic() + 2 * _GRACE_S
    with contextlib.suppress(ProcessLookupError):
        if process.is_alive():
            os.kill(pid, signal.SIGINT)
            process.join(_GRACE_S)
        while time.monotonic() < deadline:
            os.killpg(pid, signal.SIGKILL)
            process.join(0.05)
    process.kill()  # in case it has not created its own group yet
    process.join()


def _work(
    name: str, folder: Path, settings: Settings, done: dict[str, Row], messages: Connection
) -> None:
    """Measures the rows that are not in `done`, in its own process group that ends with the parent
    process.
    """
    os.setsid()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    log = os.open(settings.out / LOG, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o644)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    problem = None
    try:
        messages.send(("facts", "", _device_facts(settings)))
        rows = _section(name)(folder, settings)
        key, measure = next(rows)
        while True:
            if key not in done:
                messages.send(("begin", key, None))
                began = time.monotonic()
                done[key] = _measured(measure) | {"took_s": round(time.monotonic() - began, 1)}
                messages.send(("row", key, done[key]))
                gc.collect()
                if settings.on_gpu:  # after a device error, every further call on the device fails
                    torch.cuda.synchronize(settings.device)
                    torch.cuda.empty_cache()
            key, measure = rows.send(done[key])
    except StopIteration:
        pass
    except LeftOut as reason:
        messages.send(("row", "all of it", {"left_out": _text(reason)}))
    except Exception as error:
        problem = _text(error)
    messages.send(("end", "", problem))


def _section(name: str) -> Callable[[Path, Settings], Rows]:
    """Imports a section.

    Raises:
        LeftOut: a package is missing; the message names the first one.
    """
    try:
        section: Callable[[Path, Settings], Rows] = getattr(import_module(SECTIONS[name]), name)
    except ModuleNotFoundError as error:
        raise LeftOut(f"not installed: {error.name}") from None
    return section


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.killpg(0, signal.SIGKILL)


def _measured(measure: Callable[[], Row]) -> Row:
    try:
        return measure()
    except (LeftOut, torch.OutOfMemoryError) as reason:
        return {"left_out": _text(reason)}
    except Exception as error:
        return {"problem": _text(error)}


def _text(error: Exception) -> str:
    if not isinstance(error, LeftOut):
        traceback.print_exc()
    name = "" if isinstance(error, LeftOut) else f"{type(error).__name__}: "
    return without_folders(f"{name}{' '.join(str(error).split())}")[:600]


def without_folders(text: str) -> str:
    """Shortens absolute paths to their last names, because results are published."""
    return re.sub(r"(?<![\w./:-])/(?:[^\s/:'\"]+/)+", "", text)


def _device_facts(settings: Settings) -> Row:
    """Makes the GPU of the settings the current device, and describes it as torch reports it.

    `gpu` is None on a CPU.
    """
    if not settings.on_gpu:
        return {"gpu": None}
    torch.cuda.set_device(torch.device(settings.device).index or 0)
    device = torch.cuda.get_device_properties(settings.device)
    return {"gpu": device.name, "memory_mib": device.total_memory >> 20, "cuda": torch.version.cuda}

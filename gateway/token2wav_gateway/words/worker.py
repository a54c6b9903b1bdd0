"""Process of a plugin: it runs functions one after the other, and is replaced if it hangs or ends.

A plugin works on texts of clients. It may hang, crash, print texts, take all memory, or start
processes of its own, and speech must go on.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import math
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from typing import Any, NamedTuple

import anyio

log = logging.getLogger(__name__)

_LOAD_S = 60.0  # for a plugin to load its model
_PAUSE_S = 30.0  # after a plugin could not be loaded
_NICE = 10  # audio goes first
_PR_SET_PDEATHSIG = 1
# Libraries of linear algebra would start a thread for each core.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class WorkerError(Exception):
    """Error of a plugin or of its process. The message has no words of a text."""


class Process(NamedTuple):
    """Process of a plugin, alone in a pool.

    Attributes:
        number: id of the process and of its group; 0 before it is known.
        ended: set when the process has ended. Another process may then get its id.
    """

    pool: ProcessPoolExecutor
    number: int
    ended: threading.Event

    def kill(self) -> None:
        """Ends the process, and the processes that its plugin has started."""
        if self.number and not self.ended.is_set():
            with suppress(ProcessLookupError):
                os.killpg(self.number, signal.SIGKILL)
        # Functions that wait fail with the process. If they were cancelled, so were their callers.
        self.pool.shutdown(wait=False)


class Worker:
    """Process of a plugin.

    Create it in the event loop that uses it.

    Args:
        plugin: kind and name of the plugin, for the log.
        load: loads the plugin. It is the first function that the process runs.
        work_s: seconds for a function, after which the process is replaced.
        memory_mib: most memory of the process, in MiB of addresses; None for no bound.
    """

    def __init__(
        self,
        plugin: str,
        load: Callable[[], object],
        work_s: float,
        memory_mib: int | None = None,
    ) -> None:
        self._plugin = plugin
        self._load_plugin = load
        self._work_s = work_s
        self._memory_mib = memory_mib
        self._free = asyncio.Lock()
        self._loading: asyncio.Task[Process | None] | None = None
        self._pause_until = -math.inf
        self._closed = False

    @property
    def loaded(self) -> bool:
        """Whether the process need not be waited for."""
        return self._loading is not None and self._loading.done()

    def start(self) -> None:
        """Starts the process, unless it is there, or its plugin has just failed to load."""
        if self._loading is None and not self._closed and time.monotonic() >= self._pause_until:
            self._loading = asyncio.create_task(self._load())

    async def started(self) -> Process | None:
        """Starts the process, and returns it when its plugin is loaded; None after a failure."""
        self.start()
        if (loading := self._loading) is None:
            return None
        await asyncio.wait({loading})
        return None if loading.cancelled() else loading.result()

    async def ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Runs a function in the process, after the functions of earlier callers.

        A function that has begun goes on if its caller is cancelled.

        Raises:
            WorkerError: the function has raised it, or another exception; or the process has ended,
                or could not load its plugin.
            TimeoutError: the function took too long.
        """
        await self._free.acquire()
        exchange = asyncio.create_task(self._exchange(function, arguments))
        exchange.add_done_callback(self._end_exchange)
        return await asyncio.shield(exchange)

    async def close(self) -> None:
        """Ends the process. Callers that wait for it get a WorkerError."""
        self._closed = True
        if self._loading is not None:
            self._loading.cancel()
            if (process := await self.started()) is not None:
                process.kill()
            self._loading = None
        async with self._free:  # the last function has ended
            pass

    async def _exchange(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        if (process := await self.started()) is None:
            raise WorkerError("it could not be loaded")
        try:
            job = process.pool.submit(_run, function, arguments)
        except RuntimeError:  # the process has ended since its last function
            process.kill()
            self._loading = None
            return await self._exchange(function, arguments)
        answered = False
        try:
            with anyio.fail_after(self._work_s):
                answer, problem = await asyncio.wrap_future(job)
            answered = True
        except BrokenProcessPool:
            raise WorkerError("its process has crashed") from None
        except TimeoutError:
            raise
        except Exception as error:  # such as an answer that cannot be pickled
            raise WorkerError(f"its process has failed ({type(error).__name__})") from None
        finally:
            if not answered:
                process.kill()
                self._loading = None
                self.start()
        if problem:
            raise WorkerError(problem)
        return answer

    def _end_exchange(self, exchange: asyncio.Task[Any]) -> None:
        self._free.release()
        if not exchange.cancelled():
            exchange.exception()  # of which a caller that was cancelled learns nothing

    async def _load(self) -> Process | None:
        """Starts a process, and returns it when its plugin is loaded; None after a failure."""
        process, problem = None, "its process has crashed while it loaded"
        try:
            pool = ProcessPoolExecutor(
                1,
                multiprocessing.get_context("spawn"),
                initializer=_end_with,
                initargs=(os.getpid(),),
            )
            process = Process(pool, 0, threading.Event())
            with anyio.move_on_after(_LOAD_S) as waiting, suppress(BrokenProcessPool):
                job = pool.submit(_prepare, self._memory_mib)
                process = process._replace(number=await asyncio.wrap_future(job))
                if sys.platform == "linux":
                    threading.Thread(target=_watch, args=(process,), daemon=True).start()
                load = pool.submit(_run, _load_plugin, (self._load_plugin,))
                _, problem = await asyncio.wrap_future(load)
            if waiting.cancelled_caught:
                problem = f"it was not loaded within {_LOAD_S:g} s"
        except Exception as error:  # such as a limit of descriptors, threads or memory
            problem = f"its process cannot be started: {type(error).__name__}: {error}"
            children = {} if process is None else process.pool._processes or {}
            for child in list(children.values()):  # the pool may not wait for it
                child.kill()
        finally:
            if problem and process is not None:
                process.kill()
        if not problem:
            return process
        log.error("%s: %s", self._plugin, problem)
        self._pause_until = time.monotonic() + _PAUSE_S
        self._loading = None
        return None


def _watch(process: Process) -> None:
    """Waits for the end of a process, and ends its group.

    The pool notices the end by pipes. A process that the plugin has forked keeps them open.
    """
    with suppress(ChildProcessError):  # the pool was faster
        os.waitid(os.P_PID, process.number, os.WEXITED | os.WNOWAIT)
    with suppress(ProcessLookupError):
        os.killpg(process.number, signal.SIGKILL)
    process.ended.set()


# The following functions run in the process.


def _end_with(gateway: int) -> None:
    """Lets the process end with the gateway, even if a plugin hangs, before it waits for work.

    Args:
        gateway: id of the process of the gateway.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != gateway:  # it ended earlier, and no signal comes
        os._exit(1)


def _prepare(memory_mib: int | None) -> int:
    """Bounds the process before it loads anything. Returns its id."""
    os.setsid()  # a group of its own, which can be killed, and which gets no Ctrl-C
    os.nice(_NICE)
    os.environ.update(_ONE_THREAD)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_mib is not None:
        resource.setrlimit(resource.RLIMIT_AS, (memory_mib << 20, memory_mib << 20))
    nowhere = os.open(os.devnull, os.O_WRONLY)  # a plugin may print texts
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    return os.getpid()


def _load_plugin(load: Callable[[], object]) -> None:
    try:
        load()
    except Exception as error:
        raise WorkerError(f"{type(error).__name__}: {error}"[:500]) from None


def _run(function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[Any, str]:
    """Runs a function. Returns its result, and its problem; empty for none."""
    process, answer, problem = os.getpid(), None, ""
    try:
        answer = function(*arguments)
    except WorkerError as error:
        problem = str(error)
    except BaseException as error:  # also SystemExit, which the gateway would raise again
        problem = f"a text failed ({type(error).__name__})"  # the message may repeat the text
    if os.getpid() != process:  # the plugin has forked, and its parent answers
        os._exit(0)
    return answer, problem

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
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from typing import Any, TypeAlias

import anyio

log = logging.getLogger(__name__)

_LOAD_S = 60.0  # for a plugin to load its model
_PAUSE_S = 30.0  # after a plugin could not be loaded
_NICE = 10  # audio goes first
_PR_SET_PDEATHSIG = 1
# Libraries of linear algebra would start a thread for each core.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

# A pool with one process, and the id of this process.
_Loaded: TypeAlias = tuple[ProcessPoolExecutor, int]


class WorkerError(Exception):
    """Error of a plugin or of its process. The message has no words of a text."""


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
        self._loading: asyncio.Task[_Loaded | None] | None = None
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

    async def started(self) -> None:
        """Starts the process, and waits until its plugin is loaded or has failed."""
        self.start()
        if self._loading is not None:
            await asyncio.wait({self._loading})

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
        loading, self._loading = self._loading, None
        if loading is not None:
            loading.cancel()
            await asyncio.wait({loading})
            if not loading.cancelled() and (loaded := loading.result()) is not None:
                _kill(*loaded)
        async with self._free:  # the last function has ended
            pass

    async def _exchange(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        await self.started()
        loading, loaded = self._loading, None
        if loading is not None and not loading.cancelled():
            loaded = loading.result()
        if loaded is None:
            raise WorkerError("it could not be loaded")
        pool, process = loaded
        answered = False
        try:
            with anyio.fail_after(self._work_s):
                job = pool.submit(_run, function, arguments)
                answer, problem = await asyncio.wrap_future(job)
            answered = True
        except BrokenProcessPool:
            raise WorkerError("its process has crashed") from None
        finally:
            if not answered:
                _kill(pool, process)
                self._loading = None
                self.start()
        if problem:
            raise WorkerError(problem)
        return answer

    def _end_exchange(self, exchange: asyncio.Task[Any]) -> None:
        self._free.release()
        if not exchange.cancelled():
            exchange.exception()  # of which a caller that was cancelled learns nothing

    async def _load(self) -> _Loaded | None:
        """Starts a process, and returns it when its plugin is loaded; None after a failure."""
        pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        process, problem = 0, "its process has crashed while it loaded"
        try:
            with anyio.move_on_after(_LOAD_S) as waiting, suppress(BrokenProcessPool):
                process = await asyncio.wrap_future(pool.submit(_prepare, self._memory_mib))
                job = pool.submit(_run, _loaded, (self._load_plugin,))
                _, problem = await asyncio.wrap_future(job)
            if waiting.cancelled_caught:
                problem = f"it was not loaded within {_LOAD_S:g} s"
        except OSError as error:
            problem = f"its process cannot be started: {error}"
        finally:
            if problem:
                _kill(pool, process)
        if not problem:
            return pool, process
        log.error("%s: %s", self._plugin, problem)
        self._pause_until = time.monotonic() + _PAUSE_S
        self._loading = None
        return None


def _kill(pool: ProcessPoolExecutor, process: int) -> None:
    """Ends a process, and the processes that its plugin has started."""
    if process:
        with suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)
    pool.shutdown(wait=False, cancel_futures=True)


# The following functions run in the process.


def _prepare(memory_mib: int | None) -> int:
    """Bounds the process before it loads anything. Returns its id."""
    os.setsid()  # a group of its own, which can be killed, and which gets no Ctrl-C
    os.nice(_NICE)
    if sys.platform == "linux":  # a plugin that hangs ends with the gateway too
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ.update(_ONE_THREAD)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_mib is not None:
        resource.setrlimit(resource.RLIMIT_AS, (memory_mib << 20, memory_mib << 20))
    nowhere = os.open(os.devnull, os.O_WRONLY)  # a plugin may print texts
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    return os.getpid()


def _loaded(load: Callable[[], object]) -> None:
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

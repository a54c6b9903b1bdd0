"""Plugin of pytest that compiles the kernels of each test for a GPU that need not be there.

    TRITON_INTERPRET=0 pytest -p testkit.compile_only tests/kernels

Nothing is launched, so all results are wrong. A test fails only if a kernel cannot be compiled with
the shapes of the test.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any
from unittest.mock import patch

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

_CAPABILITY = 90
_failures: list[Exception] = []


class AbsentGPU:
    """Driver of an absent GPU of some compute capability, sufficient for compiling."""

    def __init__(self, capability: int) -> None:
        self._capability = capability
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return self._capability  # kernels keep their binaries by device

    def get_current_stream(self, device: int) -> int:
        return 0


def compiling(by_hash: dict[str, Any]) -> Any:
    """Patch of the Triton language: launches compile their kernels, and fill `by_hash`."""

    def with_grid(kernel: JITFunction[Any], grid: object) -> Callable[..., None]:
        def launch(*arguments: Any, **options: Any) -> None:
            binary = kernel.run(*arguments, grid=grid, warmup=True, **options)
            by_hash[binary.hash] = binary

        return launch

    return patch.object(triton.KernelInterface, "__getitem__", with_grid)


def pytest_configure(config: pytest.Config) -> None:
    run = JITFunction.run

    def run_or_note(*arguments: Any, **options: Any) -> Any:
        try:
            return run(*arguments, **options)
        except Exception as error:
            _failures.append(error)
            raise

    JITFunction.run = run_or_note
    driver.set_active(AbsentGPU(_CAPABILITY))
    compiling({}).start()


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Generator[None, Any, Any]:
    try:
        return (yield)
    except Exception:
        if _failures:
            raise _failures.pop() from None
        return True

"""Plugin of pytest that compiles the kernels of each test for a GPU that need not be there.

    TRITON_INTERPRET=0 pytest -p tests.support.compile_only tests/kernels

Nothing is launched, so all results are wrong. A test fails only if a kernel cannot be compiled with
the shapes of the test.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tests.kernels.compile_kernels import AbsentGPU, compiling

_CAPABILITY = 90
_failures: list[Exception] = []


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

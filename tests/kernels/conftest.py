from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.stages.conftest import parts
from token2wav import assembly
from token2wav.execution.cuda_graphs import GraphSummary
from token2wav.execution.device import keep_arithmetic_exact

__all__ = ["parts"]

# Before triton is imported: without a GPU its kernels are interpreted.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Adds the tests of kernels to those that a GPU must pass, where there is one."""
    if torch.cuda.is_available():
        item.add_marker(pytest.mark.gpu)


@pytest.fixture(autouse=True)
def _exact_references() -> None:
    """Computes the reference of every kernel in exact float32, without TF32, on a GPU too, and
    draws the same numbers in every run.
    """
    torch.manual_seed(0)
    keep_arithmetic_exact(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


@pytest.fixture(autouse=True)
def _float8_is_there(request: pytest.FixtureRequest) -> None:
    """Skips tests of float8 on a GPU for which Triton cannot convert it."""
    parameters = getattr(request.node, "callspec", None)
    if parameters is None or parameters.params.get("storage") != "float8":
        return
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("float8 needs compute capability 8.9")


@pytest.fixture(scope="session", autouse=True)
def _no_unused_overflow_checks() -> Iterator[None]:
    """Switches off the overflow checks of the interpreter, which take half of its time.

    Without the option `debug`, the interpreter of Triton 3.7 computes the condition of each check,
    and ignores it.
    """
    from triton.runtime.interpreter import interpreter_builder

    options = dataclasses.replace(interpreter_builder.options, sanitize_overflow=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter_builder, "options", options)
        yield


@pytest.fixture(autouse=True)
def _exact_float8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds to float8 in the interpreter as a GPU does, with torch.

    The interpreter of Triton 3.7 halves numbers that round up to a power of two, because it drops
    the carry into the exponent.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def rounded(values: NDArray[Any], source: Any, target: Any, mode: Any) -> NDArray[Any]:
        if target != tl.float8e4nv or source != tl.float32:
            return convert(values, source, target, mode)
        exact = torch.from_numpy(np.ascontiguousarray(values).view(np.float32))
        return exact.to(torch.float8_e4m3fn).view(torch.uint8).numpy().reshape(values.shape)

    monkeypatch.setattr(interpreter, "_convert_float", rounded)


@pytest.fixture
def fused_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Does not round a product in the interpreter before a sum, if it is the first operand or the
    other one is no product, as the compiler of a GPU fuses both operations into one.

    From `a * b - c * d` a GPU rounds only the second product. Of equal products of large numbers
    the difference is then not 0.
    """
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    multiply = InterpreterBuilder.create_fmul

    def multiplied(builder: Any, a: Any, b: Any) -> Any:
        product = multiply(builder, a, b)
        if product.dtype == tl.float32:
            product.attr["exact"] = np.multiply(a.data, b.data, dtype=np.float64)
        return product

    def kept(change: Any) -> Any:
        """Lets a change of the shape keep the exact product."""

        def changed(builder: Any, value: Any, *shape: Any) -> Any:
            result = change(builder, value, *shape)
            if (exact := value.attr.get("exact")) is not None:
                result.attr["exact"] = change(builder, TensorHandle(exact, tl.float64), *shape).data
            return result

        return changed

    def fused(combine: Any) -> Any:
        def combined(builder: Any, a: Any, b: Any) -> Any:
            left, right = (value.attr.get("exact") for value in (a, b))
            if left is not None:
                result = combine(left, b.data)
            elif right is not None:
                result = combine(a.data, right)
            else:
                return builder.binary_op(a, b, combine)
            return TensorHandle(result.astype(np.float32), tl.float32)

        return combined

    for name, replacement in {
        "create_fmul": multiplied,
        "create_fadd": fused(np.add),
        "create_fsub": fused(np.subtract),
        **{
            name: kept(getattr(InterpreterBuilder, name))
            for name in ("create_expand_dims", "create_broadcast")
        },
    }.items():
        monkeypatch.setattr(InterpreterBuilder, name, replacement)


@pytest.fixture
def nan_in_new_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fills new signals with NaN."""
    from token2wav.kernels.signals import PieceTensors, Signal, SignalLayout

    make = Signal.empty

    def empty(layout: SignalLayout, batch: PieceTensors) -> Signal:
        signal = make(layout, batch)
        signal.data.fill_(torch.nan)
        return signal

    monkeypatch.setattr(Signal, "empty", empty)


def on_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a CPU load models as a GPU does, where each length is a CUDA graph."""
    if not torch.cuda.is_available():
        no_graphs = SimpleNamespace(
            capture=lambda function, **_: function, summary=GraphSummary(), lock=nullcontext()
        )
        monkeypatch.setattr(assembly, "graphs_enabled", lambda device: True)
        monkeypatch.setattr(assembly, "GraphPool", lambda device: no_graphs)
        monkeypatch.setattr(assembly, "gpu_runs_kernels", lambda device: True)

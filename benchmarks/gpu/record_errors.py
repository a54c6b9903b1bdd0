"""Pytest plugin that prints the measured error of every comparison of a test run, passed or failed.

Bounds that were set on a CPU may be too tight for a GPU. The printed errors show the right bounds
without a second run. Use it with `-p benchmarks.gpu.record_errors -o
enable_assertion_pass_hook=true`. The plugin records assertions of the form `error <= bound`, and
calls of `torch.testing.assert_close`. For each line of a test it prints the comparison that is
closest to its bound, or farthest beyond it:

    measured: tests/kernels/test_kernels.py:54 test_norms: 2.4e-07 of 2.0e-06
"""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest
import torch

from benchmarks.gpu.pytest_rows import MEASURED

_NUMBER = r"(?:np\.\w+\()?(?:tensor\()?(-?[\d.]+(?:e[-+]?\d+)?|nan|inf)\)*"
_COMPARISON = re.compile(rf"^(?:assert )?\(?{_NUMBER} <=? {_NUMBER}")

# (file, line, test) and its largest share of the bound, with error and bound
_measured: dict[tuple[str, int, str], tuple[float, float, float]] = {}


def record(location: tuple[str, int, str], error: float, bound: float) -> None:
    """Records an error if it is the largest share of its bound there. NaN is largest.

    Args:
        location: file, line and test.
    """
    share = error / bound if bound else error
    share = float("inf") if share != share else share
    if share >= _measured.get(location, (-1.0, 0.0, 0.0))[0]:
        _measured[location] = share, error, bound


def _record_text(item: pytest.Item, line: int, text: str) -> None:
    if match := _COMPARISON.match(text):
        record((item.location[0], line, item.name.partition("[")[0]), *map(float, match.groups()))


def pytest_assertion_pass(item: pytest.Item, lineno: int, orig: str, expl: str) -> None:
    _record_text(item, lineno, expl)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    yield
    if call.excinfo is not None and call.excinfo.errisinstance(AssertionError):
        _record_text(item, call.excinfo.traceback[-1].lineno + 1, str(call.excinfo.value))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Any:
    """Replaces `assert_close` while a test runs, by one that records the error first."""
    compare = torch.testing.assert_close

    def recording(actual: Any, expected: Any, **options: Any) -> None:
        line = sys._getframe(1).f_lineno
        if torch.is_tensor(actual) and actual.shape == expected.shape and actual.numel():
            result, reference = actual.detach().cpu().double(), expected.detach().cpu().double()
            both_nan = result.isnan() & reference.isnan()  # equal, where a test allows it
            difference = (result - reference).abs().masked_fill(both_nan, 0.0)
            bound = options.get("atol", 0.0) + options.get("rtol", 0.0) * reference.abs()
            bound = bound.masked_fill(both_nan, 1.0)
            worst = int((difference / bound.clamp(min=1e-30)).argmax())
            location = item.location[0], line, item.name.partition("[")[0]
            record(location, float(difference.flatten()[worst]), float(bound.flatten()[worst]))
        compare(actual, expected, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.testing, "assert_close", recording)
        yield


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for (file, line, test), (_, error, bound) in sorted(_measured.items()):
        terminalreporter.write_line(f"{MEASURED}{file}:{line} {test}: {error:.1e} of {bound:.1e}")

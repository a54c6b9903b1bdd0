"""The two tables of `docs/models.md` are those that `benchmarks.family_table` makes."""

from __future__ import annotations

import pytest

from benchmarks.family_table import configs, names, row
from tests.docs.markdown import ROOT

PAGE = (ROOT / "docs/models.md").read_text(encoding="utf-8")


def test_names() -> None:
    assert "\n".join(["", *names(), ""]) in PAGE


@pytest.mark.slow  # it runs a stream of every flow without arithmetic
def test_families() -> None:
    assert "\n".join([*(row(name, config) for name, config in configs()), ""]) in PAGE

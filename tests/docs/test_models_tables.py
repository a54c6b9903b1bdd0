"""The table of `docs/models.md` is the one that `scripts.family_table` makes."""

from __future__ import annotations

import pytest

from scripts.family_table import configs, row
from tests.docs.markdown import ROOT

PAGE = (ROOT / "docs/models.md").read_text(encoding="utf-8")


@pytest.mark.slow  # it runs a stream of every flow without arithmetic
def test_families() -> None:
    assert "\n".join([*(row(name, config) for name, config in configs()), ""]) in PAGE

"""Script that runs the pages' commands, on pages that fail.

`make docs-check` shows that the real pages succeed.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from scripts.run_docs import ROOT, STAMPED, blocks, run_page

PAGE = """\
<!-- runnable -->

    test -f Makefile && test -f out/demo_voice.safetensors && \
.venv/bin/token2wav plan --help && touch left-behind

<!-- runnable -->

    echo before; false; echo not reached

<!-- runnable -->

    token2wav plan --help  # no reader has it on PATH

<!-- not runnable: it would fail -->

    false

<!-- runnable -->

    sleep 600

<!-- runnable: server -->

    echo cannot start; exit 3

<!-- runnable -->

```python
from pathlib import Path

assert Path("left-behind").exists()  # blocks of a page share a copy
```
"""


def test_failures_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    assert run_page(blocks(page), Path(sys.prefix), limit_s=20.0) == 4
    out = capsys.readouterr().out
    results = [line.split()[0] for line in out.splitlines() if not line.startswith(" ")]
    assert results == ["ok", "FAILED", "FAILED", "FAILED", "FAILED", "ok"]
    assert "exit status 1\n    before\n" in out
    assert "not reached" not in out.replace("echo not reached", "")
    assert "still running after 20 s" in out
    assert not (ROOT / "left-behind").exists()


def test_set_up_finds_the_environment_up_to_date() -> None:
    """Otherwise, `make` would install the copy into the environment that all copies share."""
    script = (ROOT / "scripts" / "setup.sh").read_text(encoding="utf-8")
    assert f"cat {' '.join(STAMPED)} |" in " ".join(script.replace("\\\n", "").split())

"""Windows of attention in the MOSS Audio Tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.families.test_published_sizes import DOCUMENTS
from token2wav.published.registry import read_config


def test_published_windows(tmp_path: Path) -> None:
    """Version 2 has windows of its own for some transformers."""
    for name, windows in (
        ("MOSS with null", {0: 125, 2: 250, 4: 500, 6: 1000}),
        ("MOSS 2", {0: 125, 2: 250, 4: 400, 6: 400, 8: 400, 10: 400}),
    ):
        (tmp_path / "config.json").write_text(json.dumps(DOCUMENTS[name]))
        config: Any = read_config(tmp_path)
        assert dict(config.sizes.windows()) == windows

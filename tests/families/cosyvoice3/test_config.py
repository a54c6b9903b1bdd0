"""cosyvoice3.yaml: entries that no golden model has, and nothing in it is executed."""

from __future__ import annotations

from pathlib import Path

import pytest

from testkit.models.tiny_model import TINY
from token2wav.families.cosyvoice3 import CosyVoice3Config


@pytest.mark.parametrize(("value", "expected"), [("True", True), ("False", None)])
def test_a_long_skip_connection(value: str, expected: bool | None, tmp_path: Path) -> None:
    text = (TINY / "cosyvoice3.yaml").read_text()
    key = f"            long_skip_connection: {value}\n            depth: 2"
    (tmp_path / "cosyvoice3.yaml").write_text(text.replace("            depth: 2", key))
    assert CosyVoice3Config.read(tmp_path).flow.estimator.long_skip_connection is expected


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("!apply:random.seed [1986]", '!apply:os.system ["touch {bait}"]'),
        ("generator: !ref <hift>", 'generator: !new:subprocess.Popen [["touch", "{bait}"]]'),
        ("generator: !ref <hift>", "generator: !ref <nowhere>"),
        ("output_type: 'mel'", "output_type: !apply:os.system ['touch {bait}']"),
        ("depth: 2", "depth: 2.0"),
        ("inference_cfg_rate: 0.7", "inference_cfg_rate: 7e-1"),
        ("cosyvoice.flow.DiT.dit.DiT", "another.home.of.DiT"),
    ],
)
def test_unused_entries_may_be_anything_and_are_not_executed(
    tmp_path: Path, old: str, new: str
) -> None:
    bait = tmp_path / "executed"
    text = (TINY / "cosyvoice3.yaml").read_text(encoding="utf-8")
    assert old in text
    (tmp_path / "cosyvoice3.yaml").write_text(
        text.replace(old, new.format(bait=bait)), encoding="utf-8"
    )
    assert CosyVoice3Config.read(tmp_path) == CosyVoice3Config.read(TINY)
    assert not bait.exists()

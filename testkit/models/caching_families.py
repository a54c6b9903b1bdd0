"""Tiny models of the families with a caching flow, other than CosyVoice3."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from testkit.models import chatterbox_model, cosyvoice2_model, stepaudio2_model
from testkit.models.family_golden import FamilyGolden
from token2wav import RuntimeConfig

CPU = RuntimeConfig(device="cpu", cache_mib=400)
WRITERS: dict[str, Callable[[Path, FamilyGolden], Path]] = {
    "cosyvoice2": cosyvoice2_model.write_model,
    "moss_speech": cosyvoice2_model.write_moss_speech,
    "stepaudio2": stepaudio2_model.write_model,
    "chatterbox": chatterbox_model.write_model,
    "turbo": partial(chatterbox_model.write_model, mean_flow=True),
}


def write_family(name: str, folder: Path) -> Path:
    """Writes the tiny model of a family with golden weights, and returns its folder."""
    return WRITERS[name](folder, FamilyGolden(name.replace("turbo", "chatterbox"), "tiny"))

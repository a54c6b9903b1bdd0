"""Small model folders of every family. Most have the sizes and the weights of golden data."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from testkit.models import (
    bigvgan_model,
    chatterbox_model,
    codebook_model,
    cosyvoice1_model,
    cosyvoice2_model,
    few_convolutions,
    qwen25_omni_model,
    stepaudio2_model,
    streamflow_model,
    tiny_model,
)
from testkit.models.codec_models import CODECS, FORMATS
from testkit.models.family_golden import FamilyGolden
from token2wav import RuntimeConfig

CPU = RuntimeConfig(device="cpu", cache_mib=400)
# Families with a caching flow, other than CosyVoice3.
CACHING = ("cosyvoice2", "moss_speech", "stepaudio2", "chatterbox", "turbo")
# Codecs and further formats that have golden data of their own.
GOLDEN_CODECS = (*CODECS, *(name for name, codec in FORMATS.items() if not codec.golden))
_GOLDEN_FLOWS: dict[str, Callable[[Path, FamilyGolden], Path]] = {
    "chatterbox": chatterbox_model.write_model,
    "cosyvoice1": cosyvoice1_model.write_model,
    "cosyvoice2": cosyvoice2_model.write_model,
    "glm4_voice": cosyvoice1_model.write_glm4_voice,
    "moss_speech": cosyvoice2_model.write_moss_speech,
    "qwen25_omni": qwen25_omni_model.write_model,
    "stepaudio2": stepaudio2_model.write_model,
    "turbo": partial(chatterbox_model.write_model, mean_flow=True),
}
_OTHER_FLOWS: dict[str, Callable[[Path], Path]] = {
    "bigvgan": bigvgan_model.write_model,
    "codebooks": codebook_model.write_model,
    "joined_codebooks": partial(codebook_model.write_model, merge="concat"),
    "cosyvoice3": tiny_model.tiny_copy,
    "few_convolutions": few_convolutions.a_tiny_model,
    "streamflow": streamflow_model.write_model,
}


def golden_of(name: str, size: str = "tiny") -> FamilyGolden:
    """Returns the golden data of a folder."""
    if name in FORMATS:
        return FamilyGolden(FORMATS[name].golden or name, size)
    return FamilyGolden("chatterbox" if name == "turbo" else name, size)


def write_folder(name: str, folder: Path, size: str = "tiny") -> Path:
    """Writes a model into a folder, and returns the folder of the model."""
    if name in _OTHER_FLOWS:
        return _OTHER_FLOWS[name](folder)
    golden = golden_of(name, size)
    if name in _GOLDEN_FLOWS:
        return _GOLDEN_FLOWS[name](folder, golden)
    return (CODECS | FORMATS)[name].write(folder, golden.sizes)

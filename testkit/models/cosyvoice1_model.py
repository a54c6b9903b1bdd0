"""Folders of CosyVoice1 and GLM-4-Voice models as they are published, at the sizes of golden sets
and with their weights.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch

from testkit.models.family_golden import FamilyGolden
from testkit.models.random_weights import fill
from testkit.models.yaml_edits import edit_text, published_text
from testkit.utterances import Audio, Tokens
from token2wav import Token2Wav, Voice
from token2wav.families.cosyvoice1 import CosyVoice1Config, read
from token2wav.families.cosyvoice1.network import CosyVoice1
from token2wav.stages.stage import FrameChunk


def write_yaml(folder: Path, golden: FamilyGolden) -> Path:
    """Writes the model file for the sizes of a golden set."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "cosyvoice.yaml"
    path.write_text(published_text("cosyvoice1.yaml", golden))
    return path


def write_glm4_voice_yaml(folder: Path, golden: FamilyGolden) -> Path:
    """Writes the model file of GLM-4-Voice for the sizes of a golden set."""
    return edit_text(
        write_yaml(folder, golden),
        ("vocab_size: 4096", "vocab_size: 16384"),
        ("input_frame_rate: 50", "input_frame_rate: 12.5"),
        ("encoder.ConformerEncoder", "encoder.BlockConformerEncoder"),
        ("'rel_selfattn'", "'block_rel_selfattn'\n        block_size: 2"),
        name="config.yaml",
    )


def published_config() -> CosyVoice1Config:
    """Makes the configuration of the published sizes of CosyVoice1."""
    sizes: dict[str, Any] = {"encoder": 512, "encoder_heads": 8, "encoder_units": 2048}
    sizes |= {"encoder_layers": [6], "channels": 256, "heads": 8, "dim_head": 64}
    sizes |= {"layers": [12, 4], "vocoder": [512, 512]}
    golden: Any = SimpleNamespace(sizes=sizes)
    with TemporaryDirectory() as folder:
        return read(write_yaml(Path(folder), golden).parent)


def spoken(model: Token2Wav, tokens: Tokens, voice: Voice | None) -> tuple[Audio, torch.Tensor]:
    """Synthesizes an utterance. Returns the audio, and the mel (bands, frames) of its vocoder."""
    [decoder] = model.pipeline.stages.values()
    vocoder: Any = decoder._vocoder  # type: ignore[attr-defined]
    mels: list[torch.Tensor] = []
    advance = vocoder.advance

    def recorded(batch: list[tuple[int, FrameChunk]]) -> list[torch.Tensor]:
        mels.extend(chunk.frames for _, chunk in batch)
        audio: list[torch.Tensor] = advance(batch)
        return audio

    vocoder.advance = recorded
    try:
        audio = model.synthesize(tokens, voice)
    finally:
        del vocoder.advance
    return audio, torch.cat(mels, dim=1)


def write_glm4_voice(folder: Path, golden: FamilyGolden) -> Path:
    """Writes a model of GLM-4-Voice with the weights of a golden set, and returns its folder."""
    return write_model(folder, golden, write_glm4_voice_yaml)


def write_model(
    folder: Path,
    golden: FamilyGolden,
    write_file: Callable[[Path, FamilyGolden], Path] = write_yaml,
) -> Path:
    """Writes a model with the weights of a golden set, and returns its folder."""
    network = CosyVoice1(read(write_file(folder, golden).parent).sizes)
    torch.save(fill(network.flow).state_dict(), folder / "flow.pt")
    torch.save(fill(network.hift).state_dict(), folder / "hift.pt")
    return folder

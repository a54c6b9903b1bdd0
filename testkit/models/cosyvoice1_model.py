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

from testkit.models.cosyvoice2_model import CFM_YAML, HIFT_22_KHZ, HIFT_YAML
from testkit.models.family_golden import FamilyGolden
from testkit.models.random_weights import fill
from testkit.models.yaml_edits import edit_text
from testkit.utterances import Audio, Tokens
from token2wav import Token2Wav, Voice
from token2wav.families.cosyvoice1 import CosyVoice1Config, read
from token2wav.families.cosyvoice1.network import CosyVoice1
from token2wav.stages.stage import FrameChunk

_YAML = (
    """\
__set_seed1: !apply:random.seed [1986]

sample_rate: 22050
text_encoder_input_size: 512
llm_input_size: 1024
spk_embed_dim: 192

llm: !new:cosyvoice.llm.llm.TransformerLM
    llm_input_size: !ref <llm_input_size>

flow: !new:cosyvoice.flow.flow.MaskedDiffWithXvec
    input_size: {encoder}
    output_size: 80
    spk_embed_dim: !ref <spk_embed_dim>
    output_type: 'mel'
    vocab_size: 4096
    input_frame_rate: 50
    only_mask_loss: True
    encoder: !new:cosyvoice.transformer.encoder.ConformerEncoder
        output_size: {encoder}
        attention_heads: {encoder_heads}
        linear_units: {encoder_units}
        num_blocks: {encoder_layers[0]}
        dropout_rate: 0.1
        positional_dropout_rate: 0.1
        attention_dropout_rate: 0.1
        normalize_before: True
        input_layer: 'linear'
        pos_enc_layer_type: 'rel_pos_espnet'
        selfattention_layer_type: 'rel_selfattn'
        input_size: {encoder}
        use_cnn_module: False
        macaron_style: False
    length_regulator: !new:cosyvoice.flow.length_regulator.InterpolateRegulator
        channels: 80
        sampling_ratios: [1, 1, 1, 1]
"""
    + CFM_YAML
    + """\
        estimator: !new:cosyvoice.flow.decoder.ConditionalDecoder
            in_channels: 320
            out_channels: 80
            channels: [{channels}, {channels}]
            dropout: 0.0
            attention_head_dim: {dim_head}
            n_blocks: {layers[1]}
            num_mid_blocks: {layers[0]}
            num_heads: {heads}
            act_fn: 'gelu'
"""
    + HIFT_YAML
)


def write_yaml(folder: Path, golden: FamilyGolden) -> Path:
    """Writes the model file for the sizes of a golden set."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "cosyvoice.yaml"
    path.write_text(_YAML.format(cfm="ConditionalCFM", **HIFT_22_KHZ, **golden.sizes))
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

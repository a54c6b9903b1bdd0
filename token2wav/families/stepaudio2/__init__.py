"""Step-Audio2 mini and MiniCPM-o 4.5: their folder. The flow is a conformer and a DiT; the vocoder
is HiFT with centred convolutions.

Their configuration is read from `flow.yaml` as data.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from token2wav.config.block_grid import BlockGrid
from token2wav.config.values import check_bounds, prefixed
from token2wav.errors import ConfigError
from token2wav.families.cosyvoice2 import RATIO, CosyVoice2Config, FlowConfig
from token2wav.published import bounded
from token2wav.published.flow_config import ENCODER_UNUSED, conformer_from, hift_from
from token2wav.published.hyperyaml import HyperYaml, ModelNode
from token2wav.published.sizes import HiFTConfig

FILES = ("flow.yaml",)
DOWNLOADS = (*FILES, "flow.safetensors|flow.pt", "hift.safetensors|hift.pt")
SILENCE = 4218  # token of silence, which serves as look-ahead at the end of a prompt

# Fixed in the public code:
_TOKEN_RATE = 25
_WINDOW_BLOCKS = 2
_FF_MULT = 4.0


@dataclass(frozen=True)
class DiTConfig:
    """Configuration of the DiT estimator. Fields have the names of `flow.yaml`."""

    hidden_size: bounded.Width
    num_heads: bounded.Heads
    head_dim: bounded.Width
    depth: bounded.Layers

    def __post_init__(self) -> None:
        check_bounds(self, "flow.decoder.estimator")


@dataclass(frozen=True, kw_only=True)
class StepAudio2Config(CosyVoice2Config):
    """Configuration of a model in the format of Step-Audio2."""

    left_blocks: int = _WINDOW_BLOCKS
    flow: FlowConfig[DiTConfig]

    def grid(self, prompt_tokens: int, left_blocks: int = -1) -> BlockGrid:
        """Returns the block grid of a stream. Blocks start at the end of the prompt, and all frames
        of the prompt attend to the whole prompt.
        """
        return BlockGrid(
            self.block_tokens,
            prompt=prompt_tokens,
            prefix=prompt_tokens,
            prompt_padding=-prompt_tokens % self.block_tokens,
            full_prompt_attention=True,
            left_blocks=left_blocks,
        )


def read(folder: Path) -> StepAudio2Config:
    """Reads `flow.yaml` of a folder. The file may have a section `hift` in the format of
    CosyVoice2. Without the section HiFT has its published sizes, the defaults of `HiFTConfig`.
    """
    path = folder / FILES[0]
    document = HyperYaml.read(path)
    with prefixed(f"{path}: "):
        hift = hift_from(document, causal=False) if "hift" in document else HiFTConfig()
        return StepAudio2Config.of(_flow_from(document), hift, _TOKEN_RATE)


def _flow_from(document: HyperYaml) -> FlowConfig[DiTConfig]:
    flow = ModelNode.of(document.resolve("flow"), "flow", "CausalMaskedDiffWithXvec")
    encoder = flow.child("encoder", "UpsampleConformerEncoderV2")
    decoder = flow.child("decoder", "CausalConditionalCFM")
    estimator = decoder.child("estimator", "DiT")
    bands = flow.get("output_size", bounded.Width)
    encoder.only({"up_stride": RATIO, "up_scale_factor": float(RATIO)})
    estimator.only({"in_channels": 4 * bands, "out_channels": bands, "mlp_ratio": _FF_MULT})
    config = FlowConfig(
        **flow.fields(FlowConfig, "vocab_size", "spk_embed_dim"),
        mel_bands=bands,
        pre_lookahead_len=encoder.get("pre_lookahead_len", bounded.Tokens),
        inference_cfg_rate=decoder.get("inference_cfg_rate", bounded.Guidance),
        encoder=conformer_from(
            flow, encoder, encoder.get("num_up_blocks", bounded.Layers), omitted=True
        ),
        estimator=DiTConfig(**estimator.fields(DiTConfig)),
    )
    if config.vocab_size <= SILENCE:
        raise ConfigError(
            f"flow.vocab_size: {config.vocab_size} is not above {SILENCE}, the token of silence"
        )
    flow.check_used("output_type")
    # The public encoder takes any key, and ignores the attention block.
    encoder.check_used(*ENCODER_UNUSED, "static_chunk_size", "use_dynamic_chunk")
    for section in (decoder, estimator):
        section.check_used()
    return config

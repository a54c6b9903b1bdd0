"""The causal DAC of Fish Audio and Audio8: residual codebooks, a causal transformer with a sliding
window, and the decoder of DAC with causal convolutions.

Its configuration is a part of the `config.json` of the whole model.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from token2wav.config.token_format import TokenFormat
from token2wav.config.values import Bounds, prefixed, shown
from token2wav.errors import ConfigError
from token2wav.published import bounded
from token2wav.published.codec_config import CodecConfig
from token2wav.published.codec_sizes import CodecSizes, SymmetricSizes
from token2wav.published.formats import Format
from token2wav.published.relations import Divides, Equals, Halves
from token2wav.published.transformers_json import CONFIG_JSON, read_json
from token2wav.published.weight_names import Codebooks, WeightNames

FILES = ("codec.pth",)
MODEL_TYPES = ("dual_ar", "fish_qwen3_omni", "arktts")  # Fish Audio's S1 and S2-Pro, Audio8
FORMAT = Format()
AUDIO8 = Format(
    defaults={"codec_post_n_local_heads": 8, "codec_post_intermediate_size": 1216},
)
_PARTS = ("semantic_quantizer", "quantizer", "post_module", "upsample")
DOWNLOADS = ("config.json", *FILES)
DECODER = "token2wav.families.causal_dac.network:CausalDac"
WEIGHTS = WeightNames(
    parts=tuple(
        f"{wrapper}{part}."
        for wrapper in ("", "generator.")
        for part in ("decoder", *(f"quantizer.{part}" for part in _PARTS))
    ),
    # Projections that make codes, and tables that only files of Fish Audio have
    unused=r"\.in_proj\.|\.freqs_cis$|\.causal_mask$",
    renamed=(
        (r"^generator\.", ""),
        (rf"^quantizer\.(?={'|'.join(_PARTS)})", ""),
        (r"\.conv\.", "."),  # wrapper
        (r"^post_module\.norm\.", "norm."),
        (r"\.attention\.wqkv\.", ".self_attn.in_proj."),
        (r"\.attention\.wo\.", ".self_attn.o_proj."),
        (r"\.feed_forward\.", ".mlp."),
        (r"\.attention_norm\.", ".input_layernorm."),
        (r"\.ffn_norm\.", ".post_attention_layernorm."),
        (r"\.attention_layer_scale\.gamma$", ".self_attn_layer_scale.scale"),
        (r"\.ffn_layer_scale\.gamma$", ".mlp_layer_scale.scale"),
    ),
    codebooks=tuple(Codebooks(rf"{part}\.quantizers\.(\d{{1,3}})\.", part) for part in _PARTS[:2]),
    wrappers=("state_dict", "generator"),
)


@dataclass(frozen=True)
class CausalDacSizes(CodecSizes):
    """Sizes of the decoder. Fields have the names of `config.json`, and defaults are those of Fish
    Audio. Published files have at most the fields up to `codec_post_intermediate_size`; the public
    code fixes the others.

    Attributes:
        num_codebooks: a semantic codebook and residual ones.
        codebook_size: entries of the semantic codebook.
        codec_post_n_head, codec_post_n_local_heads: heads of its queries, and of its keys.
        codec_window_size: positions that a position of the transformer attends to.
        codec_latent_dim: channels of the transformer, and of the upsampling before the decoder.
        codec_downsample_factor: factors of the encoder; this upsampling has them in reverse order.
        codec_decoder_dim: channels before the first upsampling of the decoder, which all halve
            them.
    """

    RATE = "codec_sample_rate"
    FRAME = ("codec_downsample_factor", "codec_decoder_rates")

    num_codebooks: Annotated[int, Bounds(2, 64)] = 10
    codebook_size: bounded.CodebookSize = 4096
    codec_filename: Literal["codec.pth"] = "codec.pth"
    codec_sample_rate: bounded.SampleRate = 44_100
    codec_frame_size: Annotated[
        int | None, Equals("frame_samples", "codec_downsample_factor and codec_decoder_rates")
    ] = None
    codec_post_n_layer: bounded.Layers = 8
    codec_post_n_head: bounded.Heads = 16
    codec_post_n_local_heads: Annotated[bounded.Heads, Divides("codec_post_n_head")] = 16
    codec_post_intermediate_size: bounded.Width = 3072
    codec_head_dim: bounded.HeadWidth = 64
    codec_window_size: bounded.Window = 128
    codec_residual_codebook_size: bounded.CodebookSize = 1024
    codec_codebook_dim: bounded.Width = 8
    codec_latent_dim: bounded.Width = 1024
    codec_downsample_factor: bounded.Rates = (2, 2)
    codec_decoder_dim: Annotated[bounded.Width, Halves("codec_decoder_rates")] = 1536
    codec_decoder_rates: bounded.SomeRates = (8, 8, 4, 2)

    @property
    def tokens(self) -> TokenFormat:
        residual = (self.codec_residual_codebook_size,) * (self.num_codebooks - 1)
        return TokenFormat.uneven_codes((self.codebook_size, *residual))

    @property
    def decoder(self) -> SymmetricSizes:
        return SymmetricSizes.of_decoder(
            self.codec_decoder_rates, self.codec_decoder_dim, self.codec_latent_dim
        )


def read(folder: Path) -> CodecConfig:
    """Reads the configuration of a folder, which is that of Fish Audio if there is no
    `config.json`.
    """
    path = folder / CONFIG_JSON
    document = read_json(path) if path.is_file() else {}
    with prefixed(f"{path}: "):
        kind = document.get("model_type", MODEL_TYPES[0])
        if kind not in MODEL_TYPES:
            names = ", ".join(MODEL_TYPES)
            raise ConfigError(
                f"model_type: {shown(kind)} is not supported; expected one of {names}"
            )
        if isinstance(section := document.get("text_config"), dict):  # of S2-Pro
            document = {**section, **document}
        # The other keys belong to the language model.
        document = {
            key: value
            for key, value in document.items()
            if key in ("num_codebooks", "codebook_size") or key.startswith("codec_")
        }
        format_ = AUDIO8 if kind == "arktts" else FORMAT
        return CodecConfig.of(
            format_.read(CausalDacSizes, document),
            weights=FILES,
            hop_blocks=(1, 32),  # the longest hop has 1.5 s
        )

"""Golden tensors of the causal DAC: results of `vllm-omni`'s code for Audio8 and for Fish Audio
with random weights at two small sizes. `golden_codecs.py` describes the environment, which needs
one package more:

    public/bin/pip install --no-deps vllm-omni==0.30.0
    public/bin/python -m lab.golden.golden_causal_dac tests/data/families
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import torch
from torch import nn

from lab.golden.golden_codecs import Families, Golden, codes_of, write_families
from lab.golden.public_packages import bare_package, module_of, package_folder
from testkit.models.random_weights import fill_dac

_FRAMES = 24
_FISH_CODE = ("model_executor", "models", "fish_speech", "dac_modules")


def audio8(sizes: dict[str, Any]) -> Golden:
    """Computes the audio of codes by the code for Audio8."""
    quantizer, decoder = audio8_modules(sizes)
    codes = _codes(sizes)
    return {"codes": codes, "audio": decoder(quantizer.decode(codes.T[None]))[0, 0]}


def audio8_modules(sizes: dict[str, Any]) -> tuple[Any, Any]:
    """Makes the quantizer and the decoder for Audio8 with random weights. Their constructors have
    fixed sizes, so this function makes their parts.
    """
    path = package_folder("vllm_omni") / "model_executor/models/audio8_tts/codec.py"
    public = module_of("audio8_codec", path)
    width, dim = sizes["codec_latent_dim"], sizes["codec_codebook_dim"]
    quantizer, decoder = (
        kind.__new__(kind) for kind in (public.ArkttsDownsampleQuantizer, public.ArkttsDecoder)
    )
    for module in (quantizer, decoder):
        nn.Module.__init__(module)
    quantizer.semantic_quantizer, quantizer.quantizer = (
        public.ArkttsResidualQuantizer(width, count, size, dim)
        for count, size in (
            (1, sizes["codebook_size"]),
            (sizes["num_codebooks"] - 1, sizes["codec_residual_codebook_size"]),
        )
    )
    config = public.ArkttsCodecTransformerConfig(
        sizes["codec_post_n_layer"],
        sizes["codec_post_n_head"],
        width,
        sizes["codec_post_intermediate_size"],
        sizes["codec_post_n_local_heads"],
        sizes["codec_head_dim"],
    )
    quantizer.post_module = public.ArkttsCodecWindowTransformer(
        config, width, sizes["codec_window_size"]
    )
    quantizer.upsample = nn.Sequential(
        *(
            nn.Sequential(
                public.ArkttsCausalConvTranspose1d(width, width, factor, factor),
                public.ArkttsConvNeXtBlock(width),
            )
            for factor in reversed(sizes["codec_downsample_factor"])
        )
    )
    channels = sizes["codec_decoder_dim"]
    layers = [public._causal_wn_conv(width, channels, kernel_size=7)]
    for rate in sizes["codec_decoder_rates"]:
        layers.append(public.ArkttsDecoderBlock(channels, channels // 2, rate))
        channels //= 2
    last = public._causal_wn_conv(channels, 1, kernel_size=7)
    decoder.model = nn.Sequential(*layers, public.ArkttsSnake1d(channels), last, nn.Tanh())
    # The weights have the names of the complete codec.
    codec = nn.ModuleDict({"quantizer": quantizer, "decoder": decoder}).eval()
    fill_dac(dict(codec.named_parameters()))
    return quantizer, decoder


def fish(sizes: dict[str, Any]) -> Golden:
    """Computes the audio of codes by the code for Fish Audio."""
    codes = _codes(sizes)
    audio, _ = fish_codec(sizes).decode(codes.T[None], torch.tensor([len(codes)]))
    return {"codes": codes, "audio": audio[0, 0]}


def fish_codec(sizes: dict[str, Any]) -> Any:
    """Makes the codec for Fish Audio with random weights."""
    # Bare packages, because the real ones import much that decoding does not need.
    if "vllm_omni" not in sys.modules:
        root, name = package_folder("vllm_omni"), "vllm_omni"
        bare_package(name, root)
        for part in _FISH_CODE:
            name, root = f"{name}.{part}", root / part
            bare_package(name, root)
    codec, rvq, transformer = (
        import_module(".".join(("vllm_omni", *_FISH_CODE, module)))
        for module in ("codec", "rvq", "transformer")
    )
    width = sizes["codec_latent_dim"]
    post_module = transformer.WindowLimitedTransformer(
        transformer.ModelArgs(
            block_size=64,
            n_layer=sizes["codec_post_n_layer"],
            n_head=sizes["codec_post_n_head"],
            dim=width,
            intermediate_size=sizes["codec_post_intermediate_size"],
            head_dim=sizes["codec_head_dim"],
        ),
        width,
        sizes["codec_window_size"],
    )
    quantizer = rvq.DownsampleResidualVectorQuantize(
        width,
        sizes["num_codebooks"] - 1,
        sizes["codec_codebook_dim"],
        codebook_size=sizes["codec_residual_codebook_size"],
        semantic_codebook_size=sizes["codebook_size"],
        downsample_factor=sizes["codec_downsample_factor"],
        post_module=post_module,
    )
    rates = sizes["codec_decoder_rates"]
    model = codec.DAC(
        encoder_dim=2,
        encoder_rates=rates[::-1],
        latent_dim=width,
        decoder_dim=sizes["codec_decoder_dim"],
        decoder_rates=rates,
        quantizer=quantizer,
        encoder_transformer_layers=[0] * len(rates),
        decoder_transformer_layers=[0] * len(rates),
    )
    fill_dac(dict(model.eval().named_parameters()))
    return model


def _codes(sizes: dict[str, Any]) -> torch.Tensor:
    """Draws codes (frames, codebooks)."""
    codes = codes_of(_FRAMES, sizes["num_codebooks"], sizes["codec_residual_codebook_size"])
    codes[:, :1] = codes_of(_FRAMES, 1, sizes["codebook_size"])
    return codes


FAMILIES: Families = {"causal_dac": audio8, "causal_dac_of_fish": fish}

if __name__ == "__main__":
    write_families(FAMILIES, __doc__)

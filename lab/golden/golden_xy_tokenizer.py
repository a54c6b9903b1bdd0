"""Golden tensors of XY-Tokenizer: results of the authors' code with random weights at two small
sizes. They need no package besides those of `make setup`:

    git clone https://github.com/OpenMOSS/MOSS-TTSD
    PYTHONPATH=MOSS-TTSD/legacy/v0.7/XY_Tokenizer \\
        .venv/bin/python -m lab.golden.golden_xy_tokenizer tests/data/families
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from lab.golden.golden_codecs import Families, Golden, codes_of, write_families
from lab.golden.public_packages import EmptyModule, bare_package, module_of, package_folder
from testkit.models.random_weights import fill_state

_FRAMES = 40  # four parts of the whole decode, the last one incomplete
_CONVOLUTIONS = {"stride_size": 2, "kernel_size": 3, "max_audio_seconds": 30}
# The sections have the names of the published configuration. 30 s are 15 frames of codes, and 18.
_SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        "sample_rate": 104,
        "quantizer_kwargs": {
            "input_dim": 32,
            "rvq_dim": 6,
            "output_dim": 32,
            "num_quantizers": 3,
            "codebook_size": 16,
            "codebook_dim": 6,
            "quantizer_dropout": 0.0,
            "commitment": 1,
        },
        "post_rvq_adapter_kwargs": {
            "input_dim": 32,
            "output_dim": 32,
            "d_model": 8,
            "max_source_positions": 15,
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 12,
        },
        "upsample_kwargs": {"d_model": 8, "stride": 4},
        "acoustic_decoder_kwargs": {
            **_CONVOLUTIONS,
            "num_mel_bins": 5,
            "sampling_rate": 104,
            "hop_length": 26,
            "d_model": 8,
            "scale_embedding": False,
            "decoder_layers": 2,
            "decoder_attention_heads": 2,
            "decoder_ffn_dim": 12,
            "activation_function": "gelu",
        },
        "vocos_kwargs": {
            "input_channels": 5,
            "dim": 8,
            "intermediate_dim": 12,
            "num_layers": 3,
            "n_fft": 64,
            "hop_size": 26,
            "padding": "same",
        },
    },
    "small": {
        "input_sample_rate": 36,
        "output_sample_rate": 120,
        "encoder_downsample_rate": 60,
        "decoder_upsample_rate": 200,
        "quantizer_kwargs": {
            "input_dim": 24,
            "rvq_dim": 10,
            "output_dim": 24,
            "num_quantizers": 8,
            "codebook_size": 32,
            "codebook_dim": 10,
        },
        "post_rvq_adapter_kwargs": {
            "input_dim": 24,
            "output_dim": 24,
            "d_model": 12,
            "max_source_positions": 18,
            "encoder_layers": 1,
            "encoder_attention_heads": 3,
            "encoder_ffn_dim": 20,
        },
        "upsample_kwargs": {"d_model": 12, "stride": 2},
        "acoustic_decoder_kwargs": {
            **_CONVOLUTIONS,
            "num_mel_bins": 6,
            "sampling_rate": 36,
            "hop_length": 15,
            "d_model": 12,
            "decoder_layers": 3,
            "decoder_attention_heads": 4,
            "decoder_ffn_dim": 20,
        },
        "vocos_kwargs": {
            "input_channels": 6,
            "dim": 10,
            "intermediate_dim": 24,
            "num_layers": 2,
            "n_fft": 120,
            "hop_size": 50,
        },
    },
}


def xy_tokenizer(sizes: dict[str, Any]) -> Golden:
    """Computes the audio of codes."""
    quantizer = sizes["quantizer_kwargs"]
    codes = codes_of(_FRAMES, quantizer["num_quantizers"], quantizer["codebook_size"])
    model = public_decoder(sizes)
    return {"codes": codes, "audio": model.decode([codes.T])["syn_wav_list"][0]}


def public_decoder(sizes: dict[str, Any]) -> Any:
    """Makes the decoder of the public code with random weights, in a model without encoder."""
    public, modules, quantizer = public_modules()
    model = public.XY_Tokenizer.__new__(public.XY_Tokenizer)
    torch.nn.Module.__init__(model)
    model.nq = sizes["quantizer_kwargs"]["num_quantizers"]
    model.quantizer = quantizer.ResidualVQ(**sizes["quantizer_kwargs"])
    model.post_rvq_adapter = modules.Transformer(**sizes["post_rvq_adapter_kwargs"])
    model.upsample = modules.UpConv(**sizes["upsample_kwargs"])
    model.acoustic_decoder = modules.OmniAudioDecoder(**sizes["acoustic_decoder_kwargs"])
    model.enhanced_vocos = modules.Vocos(**sizes["vocos_kwargs"])
    fixed = ("positional_embedding", "istft.window")
    fill_state(
        {name: value for name, value in model.state_dict().items() if not name.endswith(fixed)}
    )
    acoustic = sizes["acoustic_decoder_kwargs"]
    up = sizes["upsample_kwargs"]["stride"] * acoustic["stride_size"]
    model.input_sample_rate = acoustic["sampling_rate"]
    model.encoder_downsample_rate = up * acoustic["hop_length"]
    model.decoder_upsample_rate = up * sizes["vocos_kwargs"]["hop_size"]
    return model.eval()


@cache
def public_modules() -> tuple[Any, Any, Any]:
    """Loads the modules of the public code: the model, its layers and its quantiser. Their imports
    that decoding does not need are replaced.
    """
    folder = package_folder("xy_tokenizer")
    for name in (
        *("librosa", "torchaudio", "torchaudio.functional", "torchaudio.functional.functional"),
        *("transformers", "transformers.activations", "transformers.modeling_outputs", "einops"),
        "scipy",
    ):
        sys.modules[name] = EmptyModule(name)
    activations: Any = sys.modules["transformers.activations"]
    activations.ACT2FN = {"gelu": F.gelu, "silu": F.silu}
    bare_package("xy_tokenizer", folder)
    bare_package("xy_tokenizer.nn", folder / "nn")
    sys.modules["xy_tokenizer.nn.feature_extractor"] = EmptyModule("feature_extractor")
    names = ("nn.modules", "nn.quantizer", "model")
    modules, quantizer, model = (
        module_of(f"xy_tokenizer.{name}", folder / f"{name.replace('.', '/')}.py") for name in names
    )
    return model, modules, quantizer


FAMILIES: Families = {"xy_tokenizer": (xy_tokenizer, _SIZES)}

if __name__ == "__main__":
    write_families(FAMILIES, __doc__)

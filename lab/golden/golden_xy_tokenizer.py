"""Golden tensors of XY-Tokenizer: results of the authors' code with random weights at two small
sizes. `make setup` installs all packages for this program:

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


FAMILIES: Families = {"xy_tokenizer": xy_tokenizer}

if __name__ == "__main__":
    write_families(FAMILIES, __doc__)

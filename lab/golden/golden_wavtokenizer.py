"""Golden tensors of WavTokenizer: results of the authors' code with random weights at two small
sizes. `make setup` installs all packages for this program:

    git clone https://github.com/jishengpeng/WavTokenizer
    PYTHONPATH=WavTokenizer .venv/bin/python -m lab.golden.golden_wavtokenizer tests/data/families
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import torch
from torch import nn

from lab.golden.golden_codecs import Families, Golden, codes_of, write_families
from lab.golden.public_packages import EmptyModule, bare_package, module_of, package_folder
from testkit.models.random_weights import fill_state

_FRAMES = 24


def wavtokenizer(sizes: dict[str, Any]) -> Golden:
    """Computes the audio of codes."""
    encoder = sizes["feature_extractor"]["init_args"]
    codes = codes_of(_FRAMES, encoder["num_quantizers"], encoder["vq_bins"])
    model = public_decoder(sizes)
    audio = model.decode(model.codes_to_features(codes.T), bandwidth_id=torch.tensor([0]))
    return {"codes": codes, "audio": audio[0]}


def public_decoder(sizes: dict[str, Any]) -> Any:
    """Makes the decoder of the public code with random weights. Of its encoder it has only the
    codebooks, because the code fixes the sizes of the rest.
    """
    quantization, models, heads, pretrained = public_modules()
    features, encoder = nn.Module(), sizes["feature_extractor"]["init_args"]
    features.encodec = codec = nn.Module()
    codec.quantizer = quantizer = nn.Module()
    quantizer.bins = encoder["vq_bins"]
    quantizer.vq = quantization.LanguageVectorQuantization(
        num_quantizers=encoder["num_quantizers"],
        dim=sizes["backbone"]["init_args"]["input_channels"],
        codebook_size=encoder["vq_bins"],
    )
    backbone, head = sizes["backbone"]["init_args"], sizes["head"]["init_args"]
    model = pretrained.WavTokenizer(
        features, models.VocosBackbone(**backbone), heads.ISTFTHead(**head)
    )
    fill_state(
        {name: value for name, value in model.state_dict().items() if not name.endswith("window")}
    )
    return model.eval()


@cache
def public_modules() -> tuple[Any, Any, Any, Any]:
    """Loads the modules of the public code: quantiser, Vocos, its head, and the whole model. Their
    imports that decoding does not need are replaced.
    """
    root = package_folder("decoder").parent
    for name in (
        *("torchaudio", "torchaudio.functional", "torchaudio.functional.functional", "scipy"),
        *("huggingface_hub", "einops", "encoder.distrib", "decoder.feature_extractors"),
    ):
        sys.modules[name] = EmptyModule(name)
    for name in ("decoder", "encoder", "encoder.quantization"):
        bare_package(name, root / name.replace(".", "/"))
    names = ("encoder.quantization.core_vq", "decoder.models", "decoder.heads")
    quantization, models, heads = (
        module_of(name, root / f"{name.replace('.', '/')}.py") for name in names
    )
    pretrained = module_of("decoder.pretrained", root / "decoder/pretrained.py")
    pretrained.EncodecFeatures = nn.Module  # which `codes_to_features` asks for
    return quantization, models, heads, pretrained


FAMILIES: Families = {"wavtokenizer": wavtokenizer}

if __name__ == "__main__":
    write_families(FAMILIES, __doc__)

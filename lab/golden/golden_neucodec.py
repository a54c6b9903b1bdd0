"""Golden tensors of NeuCodec and X-Codec 2: results of `transformers` with random weights at two
small sizes. `golden_codecs.py` describes the environment, which needs `transformers==5.24.0`:

    public/bin/python -m lab.golden.golden_neucodec tests/data/families
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.models.neucodec import configuration_neucodec, modeling_neucodec
from transformers.models.xcodec2 import configuration_xcodec2, modeling_xcodec2

from lab.golden.golden_codecs import Families, Golden, codes_of, write_families
from testkit.models.random_weights import fill_state

_FRAMES = 24
_CLASSES = {
    "neucodec": (
        configuration_neucodec.NeuCodecConfig,
        modeling_neucodec.NeuCodecQuantizer,
        modeling_neucodec.NeuCodecDecoder,
    ),
    "xcodec2": (
        configuration_xcodec2.Xcodec2Config,
        modeling_xcodec2.Xcodec2Quantizer,
        modeling_xcodec2.Xcodec2Decoder,
    ),
}


def neucodec(sizes: dict[str, Any]) -> Golden:
    """Computes the audio of codes."""
    codes = codes_of(_FRAMES, 1, int(torch.tensor(sizes["quantization_levels"]).prod()))
    model = public_decoder(sizes)
    audio = model.acoustic_decoder(model.quantizer.from_codes(codes[None]), attention_mask=None)
    return {"codes": codes, "audio": audio[0, 0]}


def public_decoder(sizes: dict[str, Any]) -> Any:
    """Makes the quantiser and the decoder of the public code with random weights."""
    kind, quantizer, decoder = _CLASSES[sizes["model_type"]]
    semantic = {
        "model_type": "wav2vec2-bert",
        "hidden_size": sizes["quantization_dim"] - sizes["hidden_size"],
    }
    values = {name: value for name, value in sizes.items() if name != "model_type"}
    config = kind(**values, semantic_model_config=semantic)
    config._attn_implementation = "eager"
    model = nn.Module()
    model.quantizer, model.acoustic_decoder = quantizer(config), decoder(config)
    fill_state(model.state_dict())
    return model.eval()


FAMILIES: Families = {"neucodec": neucodec}

if __name__ == "__main__":
    write_families(FAMILIES, __doc__)

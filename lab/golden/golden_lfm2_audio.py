"""Golden tensors of LFM2-Audio's detokenizer: results of the package `liquid-audio` with random
weights at two small sizes. `golden_codecs.py` describes the environment, which needs Python 3.12
for `pip install --no-deps liquid-audio==1.3.0`:

    public/bin/python -m lab.golden.golden_lfm2_audio tests/data/families
"""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import nn
from transformers import Lfm2Config

from lab.golden.golden_codecs import Families, Golden, codes_of, write_families
from lab.golden.public_packages import module_of, package_folder
from testkit.models.random_weights import fill_state

_FRAMES = 24
# The sizes of the LFM2 have the names of the published configuration. The public code has constants
# in place of the sizes of embedding and inverse STFT.
_SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "block_multiple_of": 8,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "layer_types": ["conv", "sliding_attention", "conv", "sliding_attention"],
        "sliding_window": 7,
        "rope_theta": 10000.0,
        "num_codebooks": 3,
        "codebook_size": 16,
        "n_fft": 16,
        "hop_length": 4,
        "sample_rate": 2400,
    },
    "small": {
        "hidden_size": 48,
        "block_ff_dim": 64,
        "block_auto_adjust_ff_dim": False,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "layer_types": ["conv", "full_attention", "conv"],
        "conv_bias": True,
        "conv_L_cache": 4,
        "num_codebooks": 8,
        "codebook_size": 32,
        "n_fft": 40,
        "hop_length": 10,
        "sample_rate": 4500,
    },
}
_OWN = ("num_codebooks", "codebook_size", "n_fft", "hop_length", "sample_rate")


def lfm2_audio(sizes: dict[str, Any]) -> Golden:
    """Computes the audio of codes."""
    codes = codes_of(_FRAMES, sizes["num_codebooks"], sizes["codebook_size"])
    return {"codes": codes, "audio": detokenizer(sizes)(codes.T[None])[0]}


def detokenizer(sizes: dict[str, Any]) -> Any:
    """Makes the detokenizer of `liquid-audio` with random weights."""
    public = public_module()
    values = {name: value for name, value in sizes.items() if name not in _OWN}
    # the names of layers that the package gives to `transformers`; the embedding of text is unused
    kinds = [kind.replace("sliding", "full") for kind in sizes["layer_types"]]
    config = Lfm2Config(**values | {"layer_types": kinds, "vocab_size": 8})
    model = public.LFM2AudioDetokenizer.__new__(public.LFM2AudioDetokenizer)
    nn.Module.__init__(model)
    width, n_fft = config.hidden_size, sizes["n_fft"]
    model.emb = public.FusedEmbedding(width, sizes["num_codebooks"], sizes["codebook_size"])
    model.lfm = public.Lfm2Model(config)
    model.lin = nn.Linear(width, n_fft + 2)
    model.istft = public.ISTFT(n_fft, sizes["hop_length"], n_fft)
    model.sliding_window_size = sizes.get("sliding_window", 30)
    model.eval()
    fill_state({name: value for name, value in model.state_dict().items() if "istft" not in name})
    return model


@cache
def public_module() -> Any:
    """Loads the module of the detokenizer alone."""
    return module_of("public_detokenizer", package_folder("liquid_audio") / "detokenizer.py")


FAMILIES: Families = {"lfm2_audio": (lfm2_audio, _SIZES)}

if __name__ == "__main__":
    write_families(FAMILIES, __doc__)

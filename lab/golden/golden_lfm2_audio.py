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


FAMILIES: Families = {"lfm2_audio": lfm2_audio}

if __name__ == "__main__":
    write_families(FAMILIES, __doc__)

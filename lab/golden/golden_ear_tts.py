"""Golden tensors of EAR-TTS's codec: results of NeMo's code with random weights at two small sizes.
`golden_codecs.py` describes the environment:

    public/bin/pip install --no-deps nemo-toolkit==3.0.0
    public/bin/python -m lab.golden.golden_ear_tts tests/data/families
"""

from __future__ import annotations

import sys
from functools import cache
from types import SimpleNamespace
from typing import Any

from lab.golden.golden_codecs import Families, Golden, codes_of, write_families
from lab.golden.public_packages import EmptyModule, module_of, package_folder
from testkit.models.random_weights import fill_state

_FRAMES = 24


def ear_tts(sizes: dict[str, Any]) -> Golden:
    """Computes the audio of codes."""
    codes = codes_of(_FRAMES, sizes["num_quantizers"], sizes["codebook_size"])
    audio, _ = codec(sizes).decode(codes[None])
    return {"codes": codes, "audio": audio[0, 0]}


def codec(sizes: dict[str, Any]) -> Any:
    """Makes NeMo's codec with random weights."""
    model = public_module().RVQVAEModel(SimpleNamespace(**sizes)).eval()
    fill_state({name: value for name, value in model.state_dict().items() if value.dim()})
    return model


@cache
def public_module() -> Any:
    """Loads the module of NeMo. Two imports that decoding never calls are empty."""
    for name in ("librosa", "omegaconf"):
        sys.modules.setdefault(name, EmptyModule(name))
    folder = package_folder("nemo") / "collections" / "speechlm2" / "modules"
    return module_of("public_ear_tts", folder / "ear_tts_vae_codec.py")


FAMILIES: Families = {"ear_tts": ear_tts}

if __name__ == "__main__":
    write_families(FAMILIES, __doc__)

"""Golden tensors of Audex's speech decoder: results of its authors' code, which `vllm-omni`
contains, with random weights at two small sizes. `golden_codecs.py` describes the environment,
which needs `pip install --no-deps vllm-omni==0.30.0`:

    public/bin/python -m lab.golden.golden_audex tests/data/families
"""

from __future__ import annotations

from importlib import import_module
from math import prod
from typing import Any

import torch

from lab.golden.golden_codecs import Families, Golden, codes_of, write_families
from lab.golden.public_packages import bare_package, package_folder
from testkit.models.random_weights import fill_state

_FRAMES, _CHUNK = 24, 5


def audex(sizes: dict[str, Any]) -> Golden:
    """Computes the audio of codes, by a session of the public code that gets chunks."""
    codes = codes_of(_FRAMES, 1, prod(sizes["codebook_levels"]))
    session = public_decoder(sizes).create_session(chunk_frames=_CHUNK, return_numpy=False)
    chunks = [*session.push(codes.tolist()), *session.flush()]
    return {"codes": codes, "audio": torch.cat([audio for _, audio in chunks])}


def public_decoder(sizes: dict[str, Any]) -> Any:
    """Makes the decoder of the public code with random weights."""
    folder = package_folder("vllm_omni") / "model_executor/models/audex/speech_decoder"
    bare_package("public_audex", folder)
    public = import_module("public_audex.modeling_audex_causal_speech_decoder")
    model = public.AudexCausalSpeechDecoderModel(public.AudexCausalSpeechDecoderConfig(**sizes))
    fill_state(model.state_dict())
    return model.eval()


FAMILIES: Families = {"audex": audex}

if __name__ == "__main__":
    write_families(FAMILIES, __doc__)

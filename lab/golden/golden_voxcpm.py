"""Golden tensors of VoxCPM's AudioVAE: results of the package `voxcpm` with random weights at two
small sizes. `golden_codecs.py` describes the environment, which also needs pydantic and
`pip install --no-deps voxcpm==2.0.3`:

    public/bin/python -m lab.golden.golden_voxcpm tests/data/families
"""

from __future__ import annotations

from typing import Any

import torch

from lab.golden.golden_codecs import Families, Golden, write_families
from lab.golden.public_packages import module_of, package_folder
from testkit.models.random_weights import SEED, fill_dac

_FRAMES = 24


def voxcpm(sizes: dict[str, Any]) -> Golden:
    """Computes the audio of latents."""
    latents = torch.randn(
        _FRAMES, sizes["latent_dim"], generator=torch.Generator().manual_seed(SEED)
    )
    return {"latents": latents, "audio": audio_vae(sizes).decode(latents.T[None])[0, 0]}


def audio_vae(sizes: dict[str, Any]) -> Any:
    """Makes the AudioVAE of `voxcpm` with random weights: of VoxCPM2 if there is an
    `out_sample_rate`, else the older one.
    """
    file = "audio_vae_v2.py" if "out_sample_rate" in sizes else "audio_vae.py"
    public = module_of("public_vae", package_folder("voxcpm") / "modules" / "audiovae" / file)
    model = public.AudioVAE(public.AudioVAEConfig(**sizes)).eval()
    fill_dac(model.state_dict())
    return model


FAMILIES: Families = {"voxcpm": voxcpm}

if __name__ == "__main__":
    write_families(FAMILIES, __doc__)

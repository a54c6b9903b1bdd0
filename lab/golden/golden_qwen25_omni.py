"""Golden tensors of the decoder of Qwen2.5-Omni: results of `transformers` with random weights at
two small sizes. `golden_codecs.py` describes the environment:

    public/bin/python -m lab.golden.golden_qwen25_omni tests/data/families
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch

from lab.golden.golden_codecs import Families, Golden, write_families
from lab.golden.public_packages import refilled
from testkit.models.random_weights import SEED, fill_omni

_TIME = 0.3  # ODE time of the single evaluation
_CODES = {"tiny": 31, "small": 50}
_MEL_FRAMES = 23  # of the reference mel of the voice


def flow_noise(bands: int, frames: int) -> torch.Tensor:
    """The noise that our streams start from, (1, frames, bands)."""
    noise = torch.randn(1, bands, 15000, generator=torch.Generator().manual_seed(0))
    return noise[:, :, :frames].transpose(1, 2).contiguous()


def qwen25_omni(sizes: dict[str, Any]) -> Golden:
    """Computes ECAPA-TDNN, one evaluation of the estimator, mel and audio of a whole utterance."""
    model, dit = token2wav(sizes), sizes["dit_config"]
    generator = torch.Generator().manual_seed(SEED)
    count = _CODES["tiny" if dit["num_embeds"] == 40 else "small"]
    codes = torch.randint(0, dit["num_embeds"], (1, count), generator=generator)
    cond = torch.randn(1, dit["enc_emb_dim"], generator=generator)
    ref_mel = torch.randn(1, _MEL_FRAMES, dit["mel_dim"], generator=generator)
    frames = count * dit.get("repeats", 2)
    noise = flow_noise(dit["mel_dim"], frames)
    velocity = model.code2wav_dit_model(
        hidden_states=noise,
        condition_vector=ref_mel,
        speaker_embedding=cond[:, None].expand(-1, frames, -1),
        quantized_code=codes,
        time_step=torch.tensor(_TIME),
    )
    with patch("torch.randn", lambda *_, **__: noise):
        mel = model.code2wav_dit_model.sample(cond, ref_mel, codes)
        audio = model(codes, conditioning=cond, reference_mel=ref_mel)
    return {
        "codes": codes[0],
        "cond": cond,
        "ref_mel": ref_mel,
        "ecapa": model.code2wav_dit_model.input_embed.spk_encoder(ref_mel)[0],
        "velocity": velocity.transpose(1, 2),
        "mel": mel[0],
        "audio": audio,
    }


def token2wav(sizes: dict[str, Any]) -> Any:
    """Makes the decoder of `transformers` with random weights."""
    from transformers import Qwen2_5OmniToken2WavConfig, Qwen2_5OmniToken2WavModel

    config = Qwen2_5OmniToken2WavConfig(**sizes)
    return refilled(Qwen2_5OmniToken2WavModel, config, fill_omni)


FAMILIES: Families = {"qwen25_omni": qwen25_omni}

if __name__ == "__main__":
    write_families(FAMILIES, __doc__)

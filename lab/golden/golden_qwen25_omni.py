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
# The sizes have the names of the published configuration.
_SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        "dit_config": {
            "hidden_size": 32,
            "num_hidden_layers": 4,
            "num_attention_heads": 2,
            "head_dim": 16,
            "emb_dim": 12,
            "block_size": 6,
            "look_ahead_layers": [2],
            "look_backward_layers": [0, 3],
            "num_embeds": 40,
            "mel_dim": 10,
            "enc_emb_dim": 7,
            "enc_dim": 5,
            "enc_channels": [8, 8, 8, 8, 24],
            "enc_attention_channels": 6,
            "enc_se_channels": 4,
        },
        "bigvgan_config": {
            "mel_dim": 10,
            "upsample_initial_channel": 16,
            "resblock_kernel_sizes": [3],
            "resblock_dilation_sizes": [[1, 3, 5]],
            "upsample_rates": [5, 2],
            "upsample_kernel_sizes": [11, 4],
        },
    },
    "small": {
        "dit_config": {
            "hidden_size": 48,
            "num_hidden_layers": 6,
            "num_attention_heads": 3,
            "head_dim": 12,
            "ff_mult": 3,
            "emb_dim": 20,
            "block_size": 12,
            "look_ahead_layers": [3],
            "look_backward_layers": [0, 5],
            "repeats": 3,
            "num_embeds": 60,
            "mel_dim": 16,
            "enc_emb_dim": 9,
            "enc_dim": 6,
            "enc_channels": [12, 12, 12, 24],
            "enc_kernel_sizes": [5, 3, 5, 1],
            "enc_dilations": [1, 2, 3, 1],
            "enc_attention_channels": 8,
            "enc_res2net_scale": 3,
            "enc_se_channels": 5,
        },
        "bigvgan_config": {
            "mel_dim": 16,
            "upsample_initial_channel": 32,
            "resblock_kernel_sizes": [3, 7],
            "resblock_dilation_sizes": [[1, 3, 5], [1, 2, 3]],
            "upsample_rates": [4, 2, 2],
            "upsample_kernel_sizes": [8, 4, 4],
        },
    },
}


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


FAMILIES: Families = {"qwen25_omni": (qwen25_omni, _SIZES)}

if __name__ == "__main__":
    write_families(FAMILIES, __doc__)

"""Golden tensors of VibeVoice's acoustic decoder: results of `transformers` with random weights at
two small sizes. `golden_codecs.py` describes the environment:

    public/bin/python -m lab.golden.golden_vibevoice tests/data/families
"""

from __future__ import annotations

from typing import Any

import torch

from lab.golden.golden_codecs import Families, Golden, write_families
from lab.golden.public_packages import refilled
from testkit.models.random_weights import SEED, fill_state

_FRAMES = 24


def vibevoice(sizes: dict[str, Any]) -> Golden:
    """Computes the audio of latents."""
    latents = torch.randn(
        _FRAMES, sizes["hidden_size"], generator=torch.Generator().manual_seed(SEED)
    )
    return {"latents": latents, "audio": tokenizer(sizes).decode(latents[None]).audio[0, 0]}


def tokenizer(sizes: dict[str, Any]) -> Any:
    """Makes the acoustic tokenizer of `transformers` with random weights."""
    from transformers import VibeVoiceAcousticTokenizerConfig, VibeVoiceAcousticTokenizerModel

    config = VibeVoiceAcousticTokenizerConfig(**sizes)
    return refilled(VibeVoiceAcousticTokenizerModel, config, fill_state)


def padding_cache() -> Any:
    """Makes the state of a batch of streams."""
    from transformers.models.vibevoice_acoustic_tokenizer import (
        modeling_vibevoice_acoustic_tokenizer as public,
    )

    return public.VibeVoiceAcousticTokenizerConv1dPaddingCache()


FAMILIES: Families = {"vibevoice": vibevoice}

if __name__ == "__main__":
    write_families(FAMILIES, __doc__)

"""Writers of the folders of all codecs, in the sizes of the golden data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from tests.support import (
    dac_model,
    mimi_model,
    moss_model,
    nanocodec_model,
    pocket_model,
    qwen3_model,
    snac_model,
)
from tests.support.batches import Tokens
from tests.support.family_golden import FamilyGolden
from token2wav.model_config import ModelConfig

# By the name of the golden data.
WRITERS: dict[str, Callable[[Path, FamilyGolden], Path]] = {
    "dac": dac_model.write_dac,
    "higgs": dac_model.write_higgs,
    "mimi": mimi_model.write_model,
    "moss": moss_model.write_model,
    "moss_stereo": moss_model.write_model,
    "nanocodec": nanocodec_model.write_model,
    "pocket_tts": pocket_model.write_model,
    "qwen3_tts": qwen3_model.write_model,
    "qwen3_omni": qwen3_model.write_model,
    "snac": snac_model.write_snac,
    "snac_attention": snac_model.write_snac,
}


def drawn_tokens(config: ModelConfig, count: int) -> Tokens:
    """Draws `count` tokens of a codec: codes or latents."""
    random, shape = np.random.default_rng(count), (count, *config.token_shape)
    if config.takes_latents:
        return random.standard_normal(shape).astype(np.float32)
    return random.integers(0, config.vocab_size, shape).astype(np.int32)

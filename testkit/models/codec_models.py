"""Table of all codecs. `tests/families/test_codec_contract.py` tests each row.

A new codec needs a writer of model folders (`testkit/NAME_model.py`), one row here, and
golden data of its public code in `tests/data/families/NAME` (`family_golden.py` describes them).
The golden data say what the codec takes: latents or codes, and whether a stream may have fewer
codebooks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from testkit.batches import Tokens
from testkit.models import (
    causal_dac_model,
    dac_model,
    ear_tts_model,
    lfm2_audio_model,
    mimi_model,
    moshi_model,
    moss_model,
    nanocodec_model,
    pocket_model,
    qwen3_model,
    snac_model,
    vibevoice_model,
    voxcpm_model,
    xy_tokenizer_model,
)
from testkit.models.family_golden import FamilyGolden
from token2wav.config.model_config import ModelConfig

Writer = Callable[[Path, FamilyGolden], Path]


@dataclass(frozen=True)
class Codec:
    """Row of the table.

    Attributes:
        write: writes a model folder in the sizes of golden data, and returns the folder.
        other_format: whether another row has the same codec in its usual folder format. Tests that
            do not depend on the format leave the row out.
        windows: whether the decoder is not causal. Its whole utterances are tested as those of any
            codec, and its windows in `test_window_contract.py`.
    """

    write: Writer
    other_format: bool = False
    windows: bool = False
    sizes: tuple[str, ...] = ("tiny", "small")


# By the name of the golden data.
CODECS: dict[str, Codec] = {
    "causal_dac": Codec(causal_dac_model.write_audio8),
    "causal_dac_of_fish": Codec(causal_dac_model.write_fish, other_format=True),
    "dac": Codec(dac_model.write_dac),
    "dac_of_descript": Codec(dac_model.write_descript, other_format=True),
    "ear_tts": Codec(ear_tts_model.write_model),
    "higgs": Codec(dac_model.write_higgs),
    "higgs_first_release": Codec(
        dac_model.write_higgs_first_release, other_format=True, sizes=("tiny",)
    ),
    "lfm2_audio": Codec(lfm2_audio_model.write_model),
    "mimi": Codec(mimi_model.write_model),
    "mimi_of_moshi": Codec(moshi_model.write_model, other_format=True),
    "moss": Codec(moss_model.write_model),
    "moss_stereo": Codec(moss_model.write_model),
    "nanocodec": Codec(nanocodec_model.write_model),
    "pocket_tts": Codec(pocket_model.write_model),
    "qwen3_tts": Codec(qwen3_model.write_model),
    "qwen3_omni": Codec(qwen3_model.write_model),
    "snac": Codec(snac_model.write_snac),
    "snac_attention": Codec(snac_model.write_snac),
    "vibevoice": Codec(vibevoice_model.write_tokenizer),
    "voxcpm": Codec(voxcpm_model.write_model),
    "xy_tokenizer": Codec(xy_tokenizer_model.write_model, windows=True),
}
WRITERS: dict[str, Writer] = {
    name: codec.write for name, codec in CODECS.items() if not codec.other_format
}


def _mimi_pickle(folder: Path, golden: FamilyGolden) -> Path:
    mimi_model.write_model(folder, golden)
    (folder / "model.safetensors").unlink()
    torch.save(mimi_model.published_weights(golden), folder / "pytorch_model.bin")
    return folder


# Writers of further formats, and the golden data for which they write.
OTHER_FORMATS: dict[str, tuple[str, Writer]] = {
    "fish_s1": ("causal_dac_of_fish", causal_dac_model.write_fish_s1),
    "mimi_pickle": ("mimi", _mimi_pickle),
    "moshi_older_names": ("mimi_of_moshi", moshi_model.write_older_names),
    "nanocodec_compressed": ("nanocodec", partial(nanocodec_model.write_model, compressed=True)),
    "nanocodec_unpacked": ("nanocodec", nanocodec_model.write_unpacked),
    "nanocodec_unpacked_pickle": (
        "nanocodec",
        partial(nanocodec_model.write_unpacked, weights="model_weights.ckpt"),
    ),
    "qwen3_omni_in_files": ("qwen3_omni", partial(qwen3_model.write_model, files=3)),
    "vibevoice_of_microsoft": ("vibevoice", vibevoice_model.write_microsoft),
    "vibevoice_of_transformers": ("vibevoice", vibevoice_model.write_transformers),
    "voxcpm_bare": ("voxcpm", voxcpm_model.write_bare),
    "voxcpm_safetensors": ("voxcpm", voxcpm_model.write_safetensors),
    "xy_tokenizer_of_its_authors": ("xy_tokenizer", xy_tokenizer_model.write_authors),
    "xy_tokenizer_of_moss_ttsd": (
        "xy_tokenizer",
        partial(xy_tokenizer_model.write_authors, vocos="enhanced_vocos."),
    ),
}


def drawn_tokens(config: ModelConfig, count: int) -> Tokens:
    """Draws `count` tokens of a codec: codes or latents."""
    return config.tokens.draw(count, np.random.default_rng(count))

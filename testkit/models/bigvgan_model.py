"""Small fast model with a BigVGAN vocoder at rates unlike CosyVoice3's: 16 kHz, 33 1/3 tokens/s."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

from safetensors.torch import save_file

from testkit.models.bigvgan import changed, random_bigvgan
from testkit.models.sized import SIZES, fill_randomly, resized_yaml
from token2wav.published.sizes import BigVGANConfig

BANDS, RATIO = 20, 3
VOCODER = changed(
    upsample_rates=(16, 10),
    upsample_kernel_sizes=(32, 20),
    resblock_kernel_sizes=(3,),
    resblock_dilation_sizes=((2,),),
    num_mels=BANDS,
    hop_size=160,
    sampling_rate=16_000,
)
SAMPLES_PER_TOKEN = RATIO * 160


def write_model(folder: Path) -> Path:
    """Writes the model and returns its folder.

    The audio is neither silent nor at its limits.
    """
    write_folder(folder, VOCODER, RATIO)
    save_file(random_bigvgan(VOCODER).state_dict(), folder / "bigvgan" / "generator.safetensors")
    return folder


def write_folder(folder: Path, vocoder: BigVGANConfig, ratio: int) -> Path:
    """Writes a random BigVGAN and a random flow that fits it; returns the folder.

    A token has `ratio` mel frames.
    """
    text = resized_yaml(SIZES["tiny"]).partition("\nhift:")[0]
    text = re.sub(r"(?m): 80$", f": {vocoder.num_mels}", text)
    frame_rate = f"!ref <sample_rate> / {ratio * vocoder.hop_size}"
    for key, value in (("sample_rate", vocoder.sampling_rate), ("token_mel_ratio", ratio)):
        text = re.sub(rf"(?m)^{key}: .*", f"{key}: {value}", text)
    text = re.sub(r"(?m)^token_frame_rate: .*", f"token_frame_rate: {frame_rate}", text)
    (folder / "bigvgan").mkdir(parents=True)
    (folder / "cosyvoice3.yaml").write_text(
        f"{text}\nvocoder:\n    type: bigvgan\n    folder: bigvgan\n"
    )
    (folder / "bigvgan" / "config.json").write_text(json.dumps(dataclasses.asdict(vocoder)))
    return fill_randomly(folder)

"""The causal DAC in the folders of Audio8 and Fish Audio, and folders that are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from testkit.models.causal_dac_model import AUDIO8, write_audio8, write_fish, write_fish_s1
from testkit.models.family_golden import FamilyGolden
from testkit.utterances import off
from token2wav import CheckpointError, ConfigError, InputError, RuntimeConfig, Token2Wav
from token2wav.assembly import check_folder
from token2wav.config.token_format import TokenFormat
from token2wav.families.registry import read_config

# Of the spread of the audio. Sums are in another order than in the public code. Without the
# rounding of rotary positions, the error would be 2e-4 or more.
PARITY = 1e-5
GOLDEN, FISH = FamilyGolden("causal_dac", "tiny"), FamilyGolden("causal_dac_of_fish", "small")


def published(folder: Path, document: dict[str, Any] | None) -> Any:
    """Reads the configuration of a folder with the `config.json` of a published model."""
    (folder / "codec.pth").touch()
    if document is not None:
        (folder / "config.json").write_text(json.dumps(document))
    return read_config(folder)


@pytest.mark.parametrize("write", [write_fish, write_fish_s1])
def test_both_formats_of_fish_audio_give_the_public_audio(
    write: Callable[[Path, FamilyGolden], Path], tmp_path: Path
) -> None:
    model = Token2Wav.load(write(tmp_path, FISH), runtime=RuntimeConfig(device="cpu"))
    golden = FISH["audio"].numpy()
    assert off(model.synthesize(FISH["codes"].numpy()), golden) <= PARITY * golden.std()


@pytest.mark.parametrize(
    ("document", "key_heads", "inner"),
    [
        ({"model_type": "arktts", **AUDIO8, "dim": 896}, 8, 1216),
        ({"model_type": "arktts"}, 8, 1216),
        ({"model_type": "dual_ar", "codebook_size": 4096, "num_codebooks": 10}, 16, 3072),
        (
            {"model_type": "fish_qwen3_omni", "text_config": {"dim": 2560, "num_codebooks": 10}},
            16,
            3072,
        ),
        (None, 16, 3072),
    ],
    ids=["Audio8", "Audio8 without sizes", "S1", "S2-Pro", "no config.json"],
)
def test_published_sizes(
    document: dict[str, Any] | None, key_heads: int, inner: int, tmp_path: Path
) -> None:
    config = published(tmp_path, document)
    assert config.token_frame_rate == pytest.approx(21.533, abs=1e-3)
    assert (config.samples_per_token, config.sample_rate) == (2048, 44_100)
    assert config.tokens == TokenFormat.uneven_codes((4096,) + 9 * (1024,))
    sizes = config.sizes
    assert (sizes.codec_post_n_local_heads, sizes.codec_post_intermediate_size) == (
        key_heads,
        inner,
    )


def test_codes_are_bounded_by_their_codebook(tmp_path: Path) -> None:
    """The public code replaces a code above 1023 in the residual codebooks by 1023."""
    config = published(tmp_path, {"model_type": "arktts"})
    largest = np.array([[4095] + 9 * [1023]])
    np.testing.assert_array_equal(config.tokens.checked(largest), largest)
    for codebook, bound in ((0, 4095), (1, 1023), (9, 1023)):
        codes = largest.copy()
        codes[0, codebook] += 1
        message = (
            f"^tokens: {bound + 1} at index 0, codebook {codebook}, is outside the "
            f"vocabulary 0 to {bound}$"
        )
        with pytest.raises(InputError, match=message):
            config.tokens.checked(codes)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model_type", "llama", "'llama' is not supported; expected one of dual_ar, fish_qwen3"),
        ("codec_filename", "other.pth", "codec_filename: .*'other.pth'"),
        ("num_codebooks", 1, "num_codebooks: 1 is not between 2 and 64"),
        ("codec_frame_size", 512, "512, but codec_downsample_factor and .* give 12"),
        ("codec_post_n_local_heads", 3, "3 does not divide codec_post_n_head, 4"),
        ("codec_head_dim", 7, "codec_head_dim: 7 is odd"),
        ("codec_decoder_rates", [], "codec_decoder_rates: empty"),
        ("codec_decoder_dim", 6, "codec_decoder_dim: 6 cannot be halved 2 times"),
        ("codec_post_n_layer", 10**6, "codec_post_n_layer: 1000000 is not between"),
    ],
)
def test_values_that_are_refused(key: str, value: object, message: str, tmp_path: Path) -> None:
    path = write_audio8(tmp_path, GOLDEN) / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(ConfigError, match=f"config.json: .*{message}"):
        read_config(tmp_path)


def test_weights_that_are_refused(tmp_path: Path) -> None:
    path = write_audio8(tmp_path, GOLDEN) / "codec.pth"
    weights = torch.load(path, weights_only=True)
    layer = "quantizer.post_module.layers.0"
    for name, value, message in (
        ("decoder.model.0.conv.bias", None, "1 missing: decoder.conv1.bias"),
        ("quantizer.upsample.7.0.conv.bias", torch.ones(3), "1 unexpected: upsample.7.0.bias"),
        ("quantizer.upsample.0.1.gamma", torch.ones(3), "upsample.0.1.gamma .3,. instead of"),
        (f"{layer}.ffn_norm.weight", torch.full((12,), torch.nan), "NaN or infinite values in"),
        # As many rows as if all heads had keys of their own.
        (f"{layer}.attention.wqkv.weight", torch.ones(96, 12), "q_proj.weight .48, 12. instead"),
        (
            "quantizer.quantizer.quantizers.1.codebook.weight",
            torch.ones(7, 3),
            "codebook.weight has different shapes in the codebooks",
        ),
        ("quantizer.semantic_quantizer.quantizers.0.out_proj.bias", None, "codebook 0 lacks"),
        ("decoder.model.0.conv.bias", "text", "is a str, not a tensor"),
    ):
        changed = {**weights, name: value}
        if value is None:
            del changed[name]
        torch.save(changed, path)
        with pytest.raises(CheckpointError, match=message):
            check_folder(tmp_path)

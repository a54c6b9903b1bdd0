"""MOSS Audio Tokenizer in the library: published sizes, weights in several files, and folders that
are refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from testkit.models.family_golden import FamilyGolden
from testkit.models.moss_model import document, published_weights, write_model
from token2wav import CheckpointError, ConfigError, RuntimeConfig, StreamConfig
from token2wav.assembly import check_folder, family_for
from token2wav.config.token_format import TokenFormat
from token2wav.families.registry import read_config

# Of the spread of the audio. Sums are in another order than in the public code.
PARITY = 1e-5
CPU = RuntimeConfig(device="cpu")


@pytest.mark.parametrize("explicit", [False, True])
def test_published_sizes(explicit: bool, tmp_path: Path) -> None:
    """A folder may leave out all sizes, or give them as null."""
    names = ("number_channels", "decoder_kwargs", "quantizer_kwargs") if explicit else ()
    content = {"model_type": "moss-audio-tokenizer", **dict.fromkeys(names)}
    (tmp_path / "config.json").write_text(json.dumps(content))
    config: Any = read_config(tmp_path)
    with torch.device("meta"):
        network: Any = family_for(config).network(config, "decoder")
    assert (config.token_frame_rate, config.tokens) == (
        12.5,
        TokenFormat.codes(32, 1024, fewer=True),
    )
    assert config.samples_per_token == network.frame_samples == 1920
    assert config.hops(StreamConfig()) == (1, 16)
    assert dict(config.sizes.windows()) == {0: 125, 2: 250, 4: 500, 6: 1000}
    assert 0.8e9 < sum(weight.numel() for weight in network.parameters()) < 0.9e9


def patches(size: int) -> dict[str, Any]:
    return {"module_type": "PatchedPretransform", "patch_size": size}


def transformer_part(
    inputs: int, outputs: int, width: int, layers: int, heads: int
) -> dict[str, Any]:
    return {
        "module_type": "Transformer",
        "input_dimension": inputs,
        "output_dimension": outputs,
        "d_model": width,
        "num_heads": heads,
        "num_layers": layers,
        "dim_feedforward": 4 * width,
        "layer_scale": 0.01,
    }


def test_published_sizes_of_the_nano(tmp_path: Path) -> None:
    """The decoder begins with patches. It has as many parameters as its page says."""
    ends = [(192, 768), (384, 768), (384, 768), (384, 240)]
    parts = [patches(4)]
    for before, after in ends:
        parts += [transformer_part(before, after, 256, 3, 4), patches(240 if after == 240 else 2)]
    content = {"model_type": "moss-audio-tokenizer", "sample_rate": 48_000, "number_channels": 2}
    content |= {"downsample_rate": 3840, "decoder_kwargs": parts}
    content |= {"quantizer_kwargs": {"num_quantizers": 16}}
    (tmp_path / "config.json").write_text(json.dumps(content))
    config: Any = read_config(tmp_path)
    with torch.device("meta"):
        network: Any = family_for(config).network(config, "decoder")
    assert (config.channels, config.sample_rate, config.tokens.shape) == (2, 48_000, (16,))
    assert (config.samples_per_token, network.frame_samples) == (3840, 7680)
    assert sum(weight.numel() for weight in network.decoder.parameters()) == 10_450_944


def test_published_sizes_of_version_2(tmp_path: Path) -> None:
    """The patches make the samples of both channels. A transformer may have its own window."""
    outputs = [1280, 768, 768, 768, 768, 240]
    inputs = [768, *(before // 2 for before in outputs[:-1])]
    seconds = [None, None, 8, 4.0, 2, 1]
    parts: list[dict[str, Any]] = []
    for count, (before, after, window) in enumerate(zip(inputs, outputs, seconds, strict=True)):
        width, heads, layers = (768, 12, 12) if count else (1280, 20, 32)
        part = transformer_part(before, after, width, layers, heads)
        parts += [part | {"context_duration": window}, patches(240 if after == 240 else 2)]
    content = {"model_type": "moss-audio-tokenizer", "sample_rate": 48_000, "number_channels": 2}
    content |= {"downsample_rate": 3840, "decoder_kwargs": parts}
    (tmp_path / "config.json").write_text(json.dumps(content))
    config: Any = read_config(tmp_path)
    with torch.device("meta"):
        network: Any = family_for(config).network(config, "decoder")
    assert (config.channels, config.sample_rate, config.token_frame_rate) == (2, 48_000, 12.5)
    assert (config.samples_per_token, network.frame_samples) == (3840, 7680)
    windows = {0: 125, 2: 250, 4: 400, 6: 400, 8: 400, 10: 400}
    assert dict(config.sizes.windows()) == windows
    assert 1.0e9 < sum(weight.numel() for weight in network.parameters()) < 1.1e9


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("number_channels", 0, "number_channels: 0 is not between 1 and 2"),
        ("number_channels", 3, "number_channels: 3 is not between 1 and 2"),
        ("number_channels", "2", "number_channels: expected int, got '2'"),
        ("number_channels", 2, "downsample_rate: 1920, but the patches have 960 samples of each"),
        ("downsample_rate", 960, "downsample_rate: 960, but the patches have 1920 samples of each"),
        ("downsample_rate", 0, "downsample_rate: 0 is not between 1 and"),
        ("sampling_rate", 10**9, "sampling_rate: 1000000000 is not between"),
        ("causal_transformer_context_duration", 0.05, r"\[0\]: a window of 1 positions"),
        ("causal_transformer_context_duration", 10**4, "a window of 125000 positions; 2 to 65536"),
        ("decoder_kwargs", {}, "decoder_kwargs: expected a list of 1 to 64"),
        ("decoder_kwargs", [3], r"decoder_kwargs\[0\]: expected an object, got int"),
        ("decoder_kwargs", [{"module_type": "Flow"}], "'Flow' is neither Transformer nor Patched"),
        ("quantizer_kwargs", [1], "quantizer_kwargs: expected an object, got list"),
        ("quantizer_kwargs.codebook_size", 0, "quantizer_kwargs.codebook_size: 0 is not between"),
        ("quantizer_kwargs.num_quantizers", 65, "num_quantizers: 65 is not between 1 and 64"),
        ("quantizer_kwargs.output_dim", 9, r"input_dimension: 8, but the part before it has 9"),
        ("decoder_kwargs.0.d_model", 15, r"decoder_kwargs\[0\]\.d_model: 15 is no multiple of 4"),
        ("decoder_kwargs.0.num_layers", 10**6, r"\[0\]\.num_layers: 1000000 is not between"),
        ("decoder_kwargs.0.causal", False, r"decoder_kwargs\[0\]\.causal: False is not"),
        ("decoder_kwargs.0.norm", "rms_norm", r"decoder_kwargs\[0\]\.norm: .*layer_norm"),
        ("decoder_kwargs.0.context_duration", 0, "context_duration: 0.0 is not between 0.001 and"),
        ("decoder_kwargs.0.layer_scale", None, r"decoder_kwargs\[0\]\.layer_scale: expected"),
        ("decoder_kwargs.1.patch_size", 5, "patch_size: 5 does not divide 24 channels"),
        ("decoder_kwargs.3.patch_size", 480, "the last part has 2 channels, expected 1"),
    ],
)
def test_values_that_are_refused(key: str, value: object, message: str, tmp_path: Path) -> None:
    content = document(FamilyGolden("moss", "tiny").sizes)
    target: Any = content
    *path, last = key.split(".")
    for name in path:
        target = target[int(name) if isinstance(target, list) else name]
    target[last] = value
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=f"config.json: .*{message}"):
        read_config(tmp_path)


def test_channels_that_are_not_in_turn_are_refused(tmp_path: Path) -> None:
    content = document(FamilyGolden("moss_stereo", "tiny").sizes)
    content["enable_channel_interleave"] = False
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"config.json: enable_channel_interleave: expected true"):
        read_config(tmp_path)


def test_weights_that_are_refused(tmp_path: Path) -> None:
    write_model(tmp_path, FamilyGolden("moss", "tiny"))
    path = tmp_path / "model.safetensors"
    weights = published_weights(json.loads((tmp_path / "config.json").read_text()))
    layer = "decoder.0.transformer.layers.1"
    for name, value, message in (
        ("quantizer.quantizers.1.out_proj.bias", None, "codebook 1 lacks out_proj.bias"),
        ("quantizer.output_proj.bias", None, "missing: output_proj.bias"),
        (f"{layer}.norm1.bias", torch.tensor([torch.nan] * 16), "NaN .* in decoder.0"),
        (f"{layer}.self_attn.in_projs.0.weight", torch.ones(47, 16), "missing: .*q_proj"),
        ("decoder.1.input_proj.weight", torch.ones(1), "unexpected: decoder.1.input_proj"),
        (f"decoder.{'9' * 5000}.bias", torch.ones(1), "1 unexpected: decoder.99"),
    ):
        changed = {other: tensor for other, tensor in weights.items() if other != name}
        save_file(changed if value is None else changed | {name: value}, path)
        with pytest.raises(CheckpointError, match=message):
            check_folder(tmp_path)

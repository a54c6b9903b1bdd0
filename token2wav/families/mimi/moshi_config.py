"""Sizes of Mimi in the folders that Kyutai publishes for its package `moshi`.

Such a folder contains the weights of Mimi and of a language model:

    config.json                                  the language model, and names of files
    tokenizer-e351c8d8-checkpoint125.safetensors Mimi
    model.safetensors                            the language model, not read

The sizes of Mimi are constants of the package, unless `mimi_config_name` in `config.json` names a
file with other ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from token2wav.config.values import Bounds, from_mapping, known_fields, prefixed, shown
from token2wav.errors import ConfigError
from token2wav.published.sizes import (
    CodebookCount,
    CodebookSize,
    Heads,
    Kernel,
    Layers,
    Rate,
    Rates,
    Width,
)
from token2wav.published.transformers_json import CONFIG_JSON, read_json

WEIGHTS_PATTERN = "tokenizer-*-checkpoint*.safetensors"


@dataclass(frozen=True)
class SeaNetSection:
    """Section `seanet` of a file of sizes: the convolutions."""

    dimension: Width = 512
    n_filters: Width = 64
    n_residual_layers: Layers = 1
    ratios: Rates = (8, 6, 5, 4)
    kernel_size: Kernel = 7
    last_kernel_size: Kernel = 3
    residual_kernel_size: Kernel = 3
    dilation_base: Rate = 2
    compress: Rate = 2
    causal: bool = True
    true_skip: bool = True
    channels: Annotated[int, Bounds(1, 1)] = 1
    activation: Literal["ELU"] = "ELU"
    norm: Literal["none"] = "none"
    pad_mode: Literal["constant"] = "constant"
    trim_right_ratio: Annotated[float, Bounds(1, 1)] = 1.0


@dataclass(frozen=True)
class QuantizerSection:
    """Section `quantizer` of a file of sizes: the codebooks."""

    dimension: Width = 256
    n_q: CodebookCount = 32
    bins: CodebookSize = 2048
    n_q_semantic: CodebookCount = 1


@dataclass(frozen=True)
class TransformerSection:
    """Section `transformer` of a file of sizes."""

    d_model: Width = 512
    num_heads: Heads = 8
    num_layers: Layers = 8
    dim_feedforward: Width = 2048
    context: Annotated[int, Bounds(2, 1 << 16)] = 250
    max_period: Annotated[float, Bounds(1, 1e9)] = 10000.0
    gating: Literal["none"] = "none"
    norm: Literal["layer_norm"] = "layer_norm"
    positional_embedding: Literal["rope"] = "rope"
    causal: bool = True


def moshi_weights_file(folder: Path) -> Path | None:
    """Returns the file with Mimi's weights in a folder of `moshi`; None in any other folder.

    Raises:
        ConfigError: `mimi_name` in `config.json` names no file of the folder, or there are several
            files of weights and no `mimi_name`.
    """
    files = sorted(folder.glob(WEIGHTS_PATTERN))
    if not files:
        return None
    path = _named_file(folder, "mimi_name")
    if path is None and len(files) > 1:
        raise ConfigError(
            f"{folder}: {len(files)} files match {WEIGHTS_PATTERN}; set mimi_name in {CONFIG_JSON}"
        )
    return path or files[0]


def read_moshi_sizes(folder: Path) -> dict[str, Any]:
    """Reads the sizes of Mimi in a folder of `moshi`.

    Returns:
        Values by the names of the fields of `MimiSizes`.

    Raises:
        ConfigError: a value is of another type, out of range, or of an unsupported variant.
    """
    path = _named_file(folder, "mimi_config_name")
    if path is None:
        return sizes_of({})
    with prefixed(f"{path}: "):
        return sizes_of(read_json(path))


def sizes_of(document: Mapping[str, Any]) -> dict[str, Any]:
    """Converts the content of a file of sizes. A size that it lacks is the published one.

    Returns, raises: as `read_moshi_sizes`.
    """
    seanet, quantizer, transformer = (
        _section(cls, document, name)
        for cls, name in (
            (SeaNetSection, "seanet"),
            (QuantizerSection, "quantizer"),
            (TransformerSection, "transformer"),
        )
    )
    if transformer.d_model != seanet.dimension:
        raise ConfigError(
            f"transformer.d_model: {transformer.d_model}, but seanet.dimension is "
            f"{seanet.dimension}; they must be equal"
        )
    if not transformer.causal:
        raise ConfigError("transformer.causal: False is not supported; expected True")
    return {
        "sampling_rate": document.get("sample_rate", 24000),
        "frame_rate": document.get("frame_rate", 12.5),
        "hidden_size": seanet.dimension,
        "num_filters": seanet.n_filters,
        "num_residual_layers": seanet.n_residual_layers,
        "upsampling_ratios": list(seanet.ratios),
        "kernel_size": seanet.kernel_size,
        "last_kernel_size": seanet.last_kernel_size,
        "residual_kernel_size": seanet.residual_kernel_size,
        "dilation_growth_rate": seanet.dilation_base,
        "compress": seanet.compress,
        "use_causal_conv": seanet.causal,
        "use_conv_shortcut": not seanet.true_skip,
        "codebook_size": quantizer.bins,
        "codebook_dim": quantizer.dimension,
        "vector_quantization_hidden_dimension": quantizer.dimension,
        "num_quantizers": quantizer.n_q,
        "num_semantic_quantizers": quantizer.n_q_semantic,
        "upsample_groups": seanet.dimension,
        "num_hidden_layers": transformer.num_layers,
        "intermediate_size": transformer.dim_feedforward,
        "num_attention_heads": transformer.num_heads,
        "num_key_value_heads": transformer.num_heads,
        "sliding_window": transformer.context,
        "rope_theta": transformer.max_period,
    }


def _section(cls: type, document: Mapping[str, Any], name: str) -> Any:
    """Reads the section `name`. Keys that only the encoder or the training needs are skipped."""
    section = document.get(name, {})
    if not isinstance(section, dict):
        raise ConfigError(f"{name}: expected a mapping, got {type(section).__name__}")
    return from_mapping(cls, known_fields(cls, section), name)


def _named_file(folder: Path, key: str) -> Path | None:
    """Returns the file of the folder that a key of `config.json` names; None without the key."""
    config = folder / CONFIG_JSON
    name = read_json(config).get(key) if config.is_file() else None
    if name is None:
        return None
    if not isinstance(name, str) or Path(name).name != name or not (folder / name).is_file():
        raise ConfigError(f"{config}: {key}: {shown(name)} is no file of the folder")
    return folder / name

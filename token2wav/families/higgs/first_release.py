"""Folders of the first release of the Higgs Audio tokenizer, which the package `boson-multimodal`
reads: `config.json` has the arguments of the public class, and `model.pth` is a pickle of weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from token2wav.config.values import check_bounds, from_mapping, known_fields
from token2wav.errors import ConfigError
from token2wav.published.codec_sizes import SymmetricSizes
from token2wav.published.sizes import CodebookCount, CodebookSize, Rates, SampleRate, Width

CONFIG_KEYS = ("n_q", "bins", "ratios")
WEIGHTS = ("model.pth",)

_DECODER_WIDTH = 1024  # channels of the decoder before its first upsampling, fixed in the package
_SEMANTIC_WIDTH = 768  # channels of all semantic models of the package


@dataclass(frozen=True)
class Arguments:
    """Sizes in `config.json`, with the names and defaults of the package.

    Attributes:
        codebook_dim: length of the entries of a codebook. It has no default here, because codebooks
            without projections are not supported.
        D: channels of the latents.
        ratios: factor of each upsampling.
        sample_rate: samples per second.
        bins: entries of a codebook.
        n_q: codebooks.
        vq_scale: factor by which the codebooks have fewer channels than the encoders.
    """

    codebook_dim: Width
    D: Width = 128
    ratios: Rates = (8, 5, 4, 2)
    sample_rate: SampleRate = 16000
    bins: CodebookSize = 1024
    n_q: CodebookCount = 8
    vq_scale: Width = 1

    def __post_init__(self) -> None:
        check_bounds(self, "")
        if not self.quantizer_width:
            raise ConfigError(
                f"vq_scale: {self.vq_scale} leaves no channel of {self.D + _SEMANTIC_WIDTH}"
            )

    @property
    def quantizer_width(self) -> int:
        """Channels of the sum of the codebooks."""
        return (self.D + _SEMANTIC_WIDTH) // self.vq_scale

    @property
    def decoder(self) -> SymmetricSizes:
        """Sizes of the decoder."""
        return SymmetricSizes(
            downsampling_ratios=self.ratios,
            upsampling_ratios=self.ratios,
            decoder_hidden_size=_DECODER_WIDTH,
            hidden_size=self.D,
        )


def read_arguments(document: Mapping[str, Any]) -> Arguments:
    """Reads the content of `config.json`. Arguments of the encoders are skipped.

    Raises:
        ConfigError: a value is of another type, out of range, or does not fit another one.
    """
    fields = known_fields(Arguments, document)
    if fields.get("codebook_dim") is None:
        raise ConfigError("codebook_dim: missing; codebooks need projections")
    return from_mapping(Arguments, fields, "")

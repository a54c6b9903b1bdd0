"""Files `weights.pth` of the package `descript-audio-codec`.

The file is a pickle of the weights and of the arguments that made the model:

    state_dict           weights
    metadata.kwargs      sizes, under the names of the arguments
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from token2wav.config.values import Bounds, check_bounds, from_mapping, known_fields, prefixed
from token2wav.errors import ConfigError
from token2wav.published.checkpoint_files import weights_file
from token2wav.published.sizes import CodebookCount, CodebookSize, Rates, SampleRate, Width

# The second pattern has the names that the package downloads and saves.
WEIGHTS_PATTERNS = ("weights.pth", "weights_*khz*.pth")
_METADATA, _ARGUMENTS = "metadata", "kwargs"


@dataclass(frozen=True)
class Arguments:
    """Sizes in `metadata.kwargs`. Names and defaults equal those of the package.

    Attributes:
        encoder_dim, encoder_rates, latent_dim, decoder_dim, decoder_rates: see `SymmetricSizes`.
        n_codebooks, codebook_size, codebook_dim, sample_rate: see `DacSizes`.
    """

    encoder_dim: Width = 64
    encoder_rates: Rates = (2, 4, 8, 8)
    latent_dim: Annotated[int | None, Bounds(1, 1 << 16)] = None
    decoder_dim: Width = 1536
    decoder_rates: Rates = (8, 8, 4, 2)
    n_codebooks: CodebookCount = 9
    codebook_size: CodebookSize = 1024
    codebook_dim: Width = 8
    sample_rate: SampleRate = 44100

    def __post_init__(self) -> None:
        check_bounds(self, f"{_METADATA}.{_ARGUMENTS}")


def descript_weights_file(folder: Path) -> Path:
    """Returns the file of the package in a folder.

    Raises:
        ConfigError: the folder has several.
        CheckpointError: the folder has none.
    """
    paths = sorted(path for pattern in WEIGHTS_PATTERNS for path in folder.glob(pattern))
    if len(paths) > 1:
        names = ", ".join(path.name for path in paths[:4])
        raise ConfigError(f"{folder}: {len(paths)} files of weights, expected one: {names}")
    return paths[0] if paths else weights_file(folder, WEIGHTS_PATTERNS[:1])


def read_descript(path: Path) -> dict[str, Any]:
    """Reads the sizes in a file of the package.

    Returns:
        Values by the names of the fields of `DacSizes`.

    Raises:
        ConfigError: the sizes are missing, of another type, or out of range.
        CheckpointError: the file cannot be read.
    """
    # Imported here, because it imports torch. Folders of `transformers` can be read without torch.
    from token2wav.networks.weights import read_state

    metadata = read_state(path).get(_METADATA)
    with prefixed(f"{path}: "):
        kwargs = metadata.get(_ARGUMENTS) if isinstance(metadata, dict) else None
        if not isinstance(kwargs, dict):
            raise ConfigError(f"{_METADATA}.{_ARGUMENTS}: expected a mapping of sizes")
        fields = known_fields(Arguments, kwargs)
        sizes = from_mapping(Arguments, fields, f"{_METADATA}.{_ARGUMENTS}")
    return {
        "encoder_hidden_size": sizes.encoder_dim,
        "downsampling_ratios": list(sizes.encoder_rates),
        "hidden_size": sizes.latent_dim,
        "decoder_hidden_size": sizes.decoder_dim,
        "upsampling_ratios": list(sizes.decoder_rates),
        "n_codebooks": sizes.n_codebooks,
        "codebook_size": sizes.codebook_size,
        "codebook_dim": sizes.codebook_dim,
        "sampling_rate": sizes.sample_rate,
    }

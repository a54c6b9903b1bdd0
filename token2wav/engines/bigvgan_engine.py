"""The incremental BigVGAN engine, and how it comes from a folder."""

from __future__ import annotations

from pathlib import Path

import torch

from token2wav.bigvgan_config import BigVGANConfig, MelSettings, check_mel
from token2wav.engines.incremental_vocoder import IncrementalVocoderEngine
from token2wav.vocoder.bigvgan import BigVGAN, load_bigvgan
from token2wav.vocoder.bigvgan_incremental import BigVGANNetwork, BigVGANState, IncrementalBigVGAN


class BigVGANEngine(IncrementalVocoderEngine[BigVGANState]):
    """Incremental BigVGAN. The result is that of the whole mel at once up to float rounding.

    Args:
        bigvgan: on the device that is to be used.
        network: runs `BigVGAN.forward` on another engine than torch.
    """

    def __init__(self, bigvgan: BigVGAN, network: BigVGANNetwork | None = None) -> None:
        super().__init__(IncrementalBigVGAN(bigvgan, network), bigvgan.device)


def bigvgan_engine(folder: Path, mel: MelSettings, device: torch.device) -> BigVGANEngine:
    """The engine of a BigVGAN folder, see `load_bigvgan`.

    Args:
        folder: with configuration and weights.
        mel: what the flow makes.
        device: that is to be used.

    Raises:
        ConfigError: the configuration cannot be used, or is for other mels than the flow's.
        CheckpointError: the weights cannot be used.
    """
    check_mel(BigVGANConfig.read(folder), mel)  # before any weights are read
    return BigVGANEngine(load_bigvgan(folder).to(device))

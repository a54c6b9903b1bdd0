"""The AudioVAE of VoxCPM: the decoder of DAC with causal convolutions, for continuous latents."""

from token2wav.families.voxcpm.config import CONFIG_KEYS, FILES, read

__all__ = ["CONFIG_KEYS", "DOWNLOADS", "FILES", "read"]

DOWNLOADS = ("config.json", "|".join(FILES))

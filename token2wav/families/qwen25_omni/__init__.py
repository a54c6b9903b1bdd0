"""Qwen2.5-Omni: codes to mel by a flow under guided attention, and BigVGAN on a rescaled mel."""

from token2wav.families.qwen25_omni.config import FILES, MODEL_TYPES, read

__all__ = ["DOWNLOADS", "FILES", "MODEL_TYPES", "WEIGHT_PREFIXES", "read"]

DOWNLOADS = ("config.json", "model.safetensors", "spk_dict.pt")
WEIGHT_PREFIXES = ("token2wav.",)

"""CosyVoice3: its folder, the flow on a DiT, and HiFT."""

from token2wav.families.cosyvoice3.config import CosyVoice3Config

FILES = (CosyVoice3Config.FILE,)
read = CosyVoice3Config.read
DOWNLOADS = (
    *FILES,
    "flow.safetensors|flow.pt",
    "hift.safetensors|hift.pt",
    "noise.safetensors",
    "bigvgan/*",
)

"""CosyVoice3: its folder, the flow on a DiT, and HiFT."""

from token2wav.families.cosyvoice3.config import CosyVoice3Config

FILES = (CosyVoice3Config.FILE,)
read = CosyVoice3Config.read

"""CosyVoice3: its folder, the flow on a DiT, and HiFT."""

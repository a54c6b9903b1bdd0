"""BigVGAN, a vocoder that other families use: its folder and weights."""

FILES: tuple[str, ...] = ()  # its folder is named by the model files of other families

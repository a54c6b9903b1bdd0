"""BigVGAN, the vocoder of other families: its folder and weights."""

FILES: tuple[str, ...] = ()  # model files of other families name its folder

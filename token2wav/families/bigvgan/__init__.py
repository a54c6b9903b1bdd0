"""BigVGAN, the vocoder of other families: its folder and weights."""

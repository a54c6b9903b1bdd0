"""Where the parts of the recipe lie in its data folder, and what every model folder that it makes begins as."""

from __future__ import annotations

from pathlib import Path

CORPUS, FRONT_END, TRAINING = "corpus", "front_end", "training"
FLOW_MELS = "flow_mels.npy"
TEMPLATE = Path(__file__).with_name("template")

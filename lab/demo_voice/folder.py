"""Folders of the recipe: parts of its data folder, and the template of a model folder."""

from __future__ import annotations

from pathlib import Path

CORPUS, FRONT_END, TRAINING = "corpus", "front_end", "training"
FLOW_MELS = "flow_mels.npy"
TEMPLATE = Path(__file__).with_name("template")
MODEL = Path(__file__).parents[2] / "examples" / "demo_voice" / "model"

"""Where the parts of the recipe lie in its data folder, and the configuration of the model that they make."""

from __future__ import annotations

import re
from pathlib import Path

from examples.demo_voice import front_end
from token2wav.model_config import MODEL_FILE, ModelConfig

CORPUS, FRONT_END, TRAINING = "corpus", "front_end", "training"
TEMPLATE = Path(__file__).with_name("template")


def write_config(data: Path, folder: Path) -> ModelConfig:
    """Writes `cosyvoice3.yaml` into a folder, with the vocabulary of the tokenizer in the data folder."""
    size = front_end.vocabulary(data / FRONT_END)
    text = re.sub(r"vocab_size: \d+", f"vocab_size: {size}", (TEMPLATE / MODEL_FILE).read_text(encoding="utf-8"))
    (folder / MODEL_FILE).write_text(text, encoding="utf-8")
    return ModelConfig.read(folder)

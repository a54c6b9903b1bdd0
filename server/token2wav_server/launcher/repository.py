"""Model repository of Triton: it is given the input shapes of the model that is served.

Triton compares every request with the shapes in a model's `config.pbtxt`. Those in the checkout are CosyVoice3's; for
another model a copy of the repository is made whose numbers are that model's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_CONFIG = "config.pbtxt"


@dataclass(frozen=True)
class InputShapes:
    """Sizes of a model that show in the shapes of its inputs.

    Attributes:
        mel_bands: bands of the prompt's mel.
        speaker_size: length of the speaker embedding.
        codebooks: number of codes per token; 0 where a token is a number.
    """

    mel_bands: int = 80
    speaker_size: int = 192
    codebooks: int = 0

    @classmethod
    def of(cls, model: Path) -> InputShapes:
        """Reads the shapes of a model folder; CosyVoice3's if it cannot be read, which the model process will say."""
        from token2wav.errors import ConfigError
        from token2wav.families import read_config

        try:
            config = read_config(model)
        except ConfigError:
            return cls()
        return cls(config.mel_bands, config.speaker_size, *config.token_shape)


def fitted(repository: Path, shapes: InputShapes, folder: Path) -> Path:
    """Returns a repository for such shapes: the given one where it fits, else a copy of it below `folder`."""
    if shapes == InputShapes():
        return repository
    copy = folder / "model_repository"
    for config in sorted(repository.glob(f"*/{_CONFIG}")):
        model = copy / config.parent.name
        model.mkdir(parents=True)
        (model / _CONFIG).write_text(_with_shapes(config.read_text(encoding="utf-8"), shapes), encoding="utf-8")
        for item in config.parent.iterdir():
            if item.name != _CONFIG:
                (model / item.name).symlink_to(item.resolve())
    return copy


def _with_shapes(text: str, shapes: InputShapes) -> str:
    for name, usual, size in (
        ("prompt_mel", InputShapes.mel_bands, shapes.mel_bands),
        ("mel", InputShapes.mel_bands, shapes.mel_bands),
        ("speaker_embedding", InputShapes.speaker_size, shapes.speaker_size),
    ):
        text = re.sub(rf'(name: "{name}"[^}}]*?dims: \[[^\]]*?\b){usual}\b', rf"\g<1>{size}", text)
    if shapes.codebooks:
        for name in ("tokens", "prompt_tokens", "window"):
            text = re.sub(rf'(name: "{name}"[^}}]*?dims: \[[^\]]*?-1)', rf"\g<1>, {shapes.codebooks}", text)
    return text

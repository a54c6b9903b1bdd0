"""Model repository of Triton: its models, and their shapes for the model folder that is served.

Triton compares every request with the shapes in a model's `config.pbtxt`. The files of this package
have the shapes and the vocabulary of CosyVoice3. For another model the launcher copies the
repository, and replaces both in the copy.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from token2wav.config.token_format import LATENTS_FP16, TokenFormat
from token2wav.errors import ConfigError
from token2wav.published.registry import read_config
from token2wav_server.front.build import LIBRARY

_CONFIG = "config.pbtxt"
# Sizes in the files of this package. A token is a number there.
_BANDS, _SPEAKER_SIZE, _VOCABULARY = 80, 192, 6561


_USUAL = "token2wav"
_FRONT = "token2wav_server.front"  # package that this model imports
_OF_TOKENS = f"tokens|latents|{LATENTS_FP16}|prompt_tokens|chunk_tokens"  # a row for each token
# Triton accepts one type for each input, so latents of half precision are an input of their own.
_TOKENS = re.compile(r'  \{\n    name: "tokens"[^\n]*\n    data_type: TYPE_INT32\n[^}]*\}')
_LATENTS = ",\n".join(
    f"""  {{
    name: "{name}"
    data_type: {data_type}
    dims: [ -1 ]
    optional: true
  }}"""
    for name, data_type in (("latents", "TYPE_FP32"), (LATENTS_FP16, "TYPE_FP16"))
)


def models_in(repository: Path) -> tuple[str, ...]:
    """Returns the names of the models in a repository."""
    return tuple(sorted(file.parent.name for file in repository.glob(f"*/{_CONFIG}")))


def usual_models(repository: Path) -> tuple[str, ...]:
    """Returns the models that are loaded by default: `token2wav`, or all if it is not there."""
    names = models_in(repository)
    return (_USUAL,) if _USUAL in names else names


def chosen(repository: Path, names: Sequence[str], folder: Path) -> Path:
    """Returns a model repository with some models of another one, and the stages of ensembles.

    Triton could also load single models, but then the admin key could unload them.

    Args:
        folder: folder for links to the models.
    """
    selection = set(names)
    for name in names:
        file = repository / name / _CONFIG
        content = file.read_text(encoding="utf-8") if file.is_file() else ""
        selection |= set(re.findall(r'model_name: "(\w+)"', content))
    if selection >= set(models_in(repository)):
        return repository
    links = folder / "chosen_models"
    links.mkdir()
    for name in sorted(selection):
        (links / name).symlink_to(repository / name)
    return links


def has_front(repository: Path) -> bool:
    """Returns whether a repository has the model `token2wav`, which needs an engine."""
    file = repository / _USUAL / "1" / "model.py"
    return file.is_file() and _FRONT in file.read_text(encoding="utf-8")


def with_native_front(repository: Path, library: Path, folder: Path) -> Path:
    """Returns a copy of a repository whose model `token2wav` is the native front.

    Args:
        library: library of the native front.
        folder: folder for the copy.
    """
    copy = folder / "native_models"
    copy.mkdir()
    for entry in repository.iterdir():
        if entry.name != _USUAL:
            (copy / entry.name).symlink_to(entry.resolve())
    model = copy / _USUAL
    (model / "1").mkdir(parents=True)
    text = (repository / _USUAL / _CONFIG).read_text(encoding="utf-8")
    (model / _CONFIG).write_text(
        text.replace('backend: "python"', f'backend: "{_USUAL}"'), encoding="utf-8"
    )
    # Triton looks for the library of a backend in the folder of the model first.
    (model / LIBRARY).symlink_to(library)
    return copy


def fitted(repository: Path, model: Path, folder: Path) -> Path:
    """Returns a model repository with the shapes and the vocabulary of a model folder.

    Args:
        folder: folder for an adapted copy.

    Returns:
        `repository` itself if it fits, else an adapted copy in `folder`.
    """
    try:
        config = read_config(model)
    except ConfigError:  # the model process reports this error
        return repository
    # A model without voices accepts a voice of any size, and answers that it takes none. By these
    # sizes a client sees that it must send no voice.
    sizes = {
        "prompt_mel": config.mel_bands if config.takes_voice else -1,
        "mel": config.mel_bands,
        "speaker_embedding": config.speaker_size or -1,
    }
    is_usual = (config.mel_bands, config.speaker_size) == (_BANDS, _SPEAKER_SIZE)
    is_usual &= config.tokens == TokenFormat.numbers(_VOCABULARY)
    if is_usual and config.channels == 1:
        return repository
    vocabulary = ",".join(map(str, config.tokens.codebook_sizes))
    copy = folder / "model_repository"
    for file in sorted(repository.glob(f"*/{_CONFIG}")):
        text = file.read_text(encoding="utf-8")
        for name, size in sizes.items():
            text = re.sub(
                rf'(name: "{name}"[^}}]*?dims: \[[^\]]*?\b)({_BANDS}|{_SPEAKER_SIZE})\b',
                rf"\g<1>{size}",
                text,
            )
        text = re.sub(
            rf'(key: "vocabulary" value {{ string_value: "){_VOCABULARY}"',
            rf'\g<1>{vocabulary}"',
            text,
        )
        if config.tokens.are_latents:
            text = _TOKENS.sub(_LATENTS, text)
        for size in config.tokens.shape:
            text = re.sub(
                rf'(name: "(?:{_OF_TOKENS})"[^}}]*?dims: \[[^\]]*?-1)',
                rf"\g<1>, {-1 if config.tokens.fewer_codebooks else size}",
                text,
            )
        if config.channels > 1:
            text = re.sub(r'(name: "audio"[^}]*?dims: \[ -1)', rf"\1, {config.channels}", text)
        target = copy / file.parent.name
        target.mkdir(parents=True)
        (target / _CONFIG).write_text(text, encoding="utf-8")
        for entry in file.parent.iterdir():
            if entry.name != _CONFIG:
                (target / entry.name).symlink_to(entry.resolve())
    return copy

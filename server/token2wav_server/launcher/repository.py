"""Model repository of Triton: its models, and their shapes for the model folder that is served.

Triton compares every request with the shapes in a model's `config.pbtxt`. The files of this package
have the shapes and the vocabulary of CosyVoice3. The launcher copies the files, and replaces both
for another model.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from token2wav.config.model_config import ModelConfig
from token2wav.config.token_format import LATENTS_FP16
from token2wav.errors import ConfigError
from token2wav.published.registry import read_config
from token2wav_server.front.build import LIBRARY

_CONFIG = "config.pbtxt"
# Sizes in the files of this package. A token is a number there.
_BANDS, _SPEAKER_SIZE, _VOCABULARY = 80, 192, 6561


_USUAL = "token2wav"
_FRONT = "token2wav_server.front"  # package that this model imports
_OF_TOKENS = f"tokens|latents|{LATENTS_FP16}|prompt_tokens"  # a row for each token
# Triton accepts one type for each input, so latents of half precision are an input of their own.
_TOKENS = re.compile(r'  \{\n    name: "tokens"[^\n]*\n    data_type: TYPE_INT32\n[^}]*\}')
_PYTHON_BACKEND = re.compile(r"""^[^#\n]*\bbackend\s*:\s*["']python["']""", re.MULTILINE)
_STAGES = re.compile(r'key:\s*"stages"\s*value:?\s*{\s*string_value:\s*"([^"]+)"')
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


def selected(repository: Path, names: Sequence[str]) -> list[str]:
    """Returns the names of some models of a repository, and of the models that these call: steps of
    ensembles of Triton, and the stages that the parameter `stages` of our ensemble names.
    """
    selection = set(names)
    for name in names:
        file = repository / name / _CONFIG
        content = file.read_text(encoding="utf-8") if file.is_file() else ""
        selection |= set(re.findall(r'model_name: "(\w+)"', content))
        for stages in _STAGES.findall(content):
            selection |= {stage.strip() for stage in stages.split(",")}
    return sorted(name for name in selection if (repository / name).is_dir())


def has_front(repository: Path, names: Sequence[str]) -> bool:
    """Returns whether one of some models is the model `token2wav`, which needs an engine."""
    if _USUAL not in names:
        return False
    file = repository / _USUAL / "1" / "model.py"
    return file.is_file() and _FRONT in file.read_text(encoding="utf-8")


def has_python_models(repository: Path) -> bool:
    """Returns whether one of the models in a repository runs in Triton's Python backend."""
    configs = (file.read_text(encoding="utf-8") for file in repository.glob(f"*/{_CONFIG}"))
    return any(_PYTHON_BACKEND.search(text) for text in configs)


def prepare(
    repository: Path,
    names: Sequence[str],
    model: Path,
    target: Path,
    library: Path | None = None,
) -> None:
    """Makes a model repository for a model folder, with some models of another repository, and with
    the files that lie beside the models there.

    Triton could also load single models, but then the admin key could unload them.

    Args:
        target: folder of the new repository.
        library: library of the native front, which is then the backend of the model `token2wav`,
            unless the folder of this model has a file of the same name.
    """
    try:
        config = read_config(model)
    except ConfigError:  # the model process reports this error
        config = None
    target.mkdir(parents=True, exist_ok=True)
    _link(target, (entry for entry in repository.iterdir() if entry.is_file()))
    for name in names:
        (copy := target / name).mkdir()
        _link(copy, (entry for entry in (repository / name).iterdir() if entry.name != _CONFIG))
        if not (file := repository / name / _CONFIG).is_file():
            continue
        text = file.read_text(encoding="utf-8")
        if config is not None:
            text = _fitted(text, config)
        if library is not None and name == _USUAL:
            text = text.replace('backend: "python"', f'backend: "{_USUAL}"')
            # Triton looks for the library of a backend in the folder of the model first.
            if not os.path.lexists(copy / LIBRARY):
                (copy / LIBRARY).symlink_to(library)
        (copy / _CONFIG).write_text(text, encoding="utf-8")


def _link(folder: Path, entries: Iterable[Path]) -> None:
    for entry in entries:
        (folder / entry.name).symlink_to(entry.resolve())


def _fitted(text: str, config: ModelConfig) -> str:
    """Returns the configuration of a model of Triton with the shapes and the vocabulary of a model
    folder.
    """
    # A model without voices accepts a voice of any size, and answers that it takes none. By these
    # sizes a client sees that it must send no voice.
    sizes = {
        "prompt_mel": config.mel_bands if config.takes_voice else -1,
        "speaker_embedding": config.speaker_size or -1,
    }
    for name, size in sizes.items():
        text = re.sub(
            rf'(name: "{name}"[^}}]*?dims: \[[^\]]*?\b)({_BANDS}|{_SPEAKER_SIZE})\b',
            rf"\g<1>{size}",
            text,
        )
    vocabulary = ",".join(map(str, config.tokens.codebook_sizes))
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
    return text

"""Registry of families. Each family is a package that reads the folders of one published format.

The package of a family has these members:

- `FILES`, optional: file names, or patterns such as `*.nemo`. A folder with any of these files
  holds a model of the family. `MODEL_TYPES` or `CONFIG_KEYS` alone may identify a family, too.
- `FLOW`, optional: class of the flow in the HyperPyYAML file of `FILES`, for families whose files
  share a name. Only a folder whose file has this class is of the family, and of no other.
- `MODEL_TYPES`, optional: values of `model_type` in a `config.json` of Hugging Face, by which a
  folder is recognised too.
- `CONFIG_KEYS`, optional: keys of a `config.json` without `model_type`, by which a folder is
  recognised too.
- `DOWNLOADS`, optional: files that the decoder needs of a model on the Hugging Face Hub. Each item
  is a pattern, or patterns with `|` between them in order of preference. The default is
  `config.json`, `FILES`, and the weights of `transformers`.
- `WEIGHT_PREFIXES`, optional: beginnings of the names of the weights of the decoder. Of a larger
  `.safetensors` file on the hub, only these are fetched.
- `read(folder)`: returns its subclass of `ModelConfig`, without importing torch. It raises
  ConfigError for a value that is missing, unknown, of another type, out of range or not supported,
  or that does not fit another one, and CheckpointError for a file of weights that cannot be read.
- `DECODER`, the class of the network of a codec as `module:class`, and `WEIGHTS`, the names of its
  weights. An entry point may name a codec that is a module without a package.
- a module `family` with `FAMILY`, a `token2wav.families.family.Family`: networks, weights and
  noise. It takes the place of `DECODER` and `WEIGHTS` for a model with a flow, and for a codec
  whose weights need more than other names.

The packages in `token2wav.families` are families. An installed distribution can add further
families by entry points of the group `token2wav.families`.
"""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from fnmatch import fnmatchcase
from functools import lru_cache
from importlib import import_module
from importlib.metadata import entry_points
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

from token2wav.config.model_config import ModelConfig, StageName
from token2wav.config.values import shown
from token2wav.errors import ConfigError
from token2wav.known_models import known_models, suggestion
from token2wav.published.transformers_json import CONFIG_JSON, read_json, readable_json

GROUP = "token2wav.families"  # of the entry points, and the package of the families here
_MOST_BYTES_OF_A_MODEL_FILE = 1 << 20
_MOST_LISTED = 500  # files and folders that are examined in a folder of no family


def find_family(folder: Path) -> Any:
    """Finds the package of the family that a model folder belongs to.

    Raises:
        ConfigError: the folder does not exist, has files of several families, or has no file of any
            family. If a folder inside it is a model folder, the message names that folder.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such model folder{suggestion(str(folder))}")
    families = list(_own_families())
    found = _found(folder, families)
    if len({id(family) for family in found.values()}) > 1:
        raise ConfigError(
            f"{folder}: contains {' and '.join(found)}, which belong to different families; keep "
            "the one of the weights"
        )
    if not found:
        families += _other_families()
        found = _found(folder, families)
    for family in found.values():
        return family
    document = readable_json(folder / CONFIG_JSON)
    for family in families:
        if _has_known_configuration(document, family):
            return family
    raise ConfigError(f"{folder}: not a model folder; {_reason(folder, families)}")


def _found(folder: Path, families: Sequence[Any]) -> dict[str, Any]:
    """Returns the families of the files in a folder, by the names of these files. A family that
    recognises its flow in a file has the file alone.
    """
    found = [(name, family) for family in families for name in _files_of(folder, family)]
    recognised = {name for name, family in found if _flow(family)}
    return {name: family for name, family in found if _flow(family) or name not in recognised}


def _reason(folder: Path, families: Sequence[Any]) -> str:
    """Names the contents of a folder that no family reads, and a remedy."""
    for path in islice(folder.glob("*"), _MOST_LISTED):
        if path.is_symlink() and not path.exists():
            return (
                f"{path.name} is a link to {path.readlink()}, which does not exist; pull it again"
            )
    inside = (path for pattern in ("*", "*/*", "*/*/*") for path in folder.glob(pattern))
    for subfolder in sorted(path for path in islice(inside, _MOST_LISTED) if path.is_dir()):
        document = readable_json(subfolder / CONFIG_JSON)
        if any(
            _files_of(subfolder, family) or _has_known_configuration(document, family)
            for family in families
        ):
            return f"its subfolder {subfolder.relative_to(folder)} is one; use {subfolder}"
    types = [name for family in families for name in _model_types(family)]
    if (config := folder / CONFIG_JSON).is_file():
        document = read_json(config)  # a pointer of Git LFS, or a page, has its own sentence
        if (kind := document.get("model_type")) is not None:
            for key, section in document.items():
                inner = section.get("model_type") if isinstance(section, dict) else None
                if inner in types:
                    return (
                        f"{CONFIG_JSON} is that of a whole model, {shown(kind)}, whose codec is "
                        f"{inner} ({key}); use a folder of the codec alone{_published(inner)}"
                    )
            return (
                f"{CONFIG_JSON} has the model_type {shown(kind)}, expected one of "
                f"{', '.join(types)}"
            )
    named = [family for family in families if not _flow(family)]
    files = ", ".join(file for family in named for file in _files(family))
    return (
        f"it contains none of {files}, nor a {CONFIG_JSON} with the model_type {', '.join(types)}"
    )


def _published(model_type: str) -> str:
    """Names published models of a codec, which `token2wav pull` fetches."""
    for family in _own_families():
        if model_type in _model_types(family):
            name = family.__name__.rpartition(".")[2]
            aliases = [model.alias for model in known_models() if model.family == name][:3]
            return f", such as {' or '.join(aliases)}" if aliases else ""
    return ""


def find_remote_family(names: Set[str], config: Mapping[str, Any]) -> Any | None:
    """Finds the package of the family of a model folder that is not on this machine.

    Args:
        names: names of the files in the folder.
        config: content of its `config.json`; empty if it has none.
    """
    families = [*_own_families(), *_other_families()]
    named = [family for family in families if not _flow(family)]
    for family in named:
        if any(fnmatchcase(name, file) for file in _files(family) for name in names):
            return family
    for family in families:
        if _has_known_configuration(config, family):
            return family
    # The flow in a file is not known here, so all files must have the names of the family.
    return next((family for family in families if _flow(family) and _has_all(names, family)), None)


def _has_all(names: Set[str], family: Any) -> bool:
    """Returns whether files have all names that the decoder needs."""
    choices = [item.split("|") for item in family.DOWNLOADS]
    return all(names & {*choice} for choice in choices)


def read_config(folder: Path) -> ModelConfig:
    """Reads the configuration of a model folder."""
    config: ModelConfig = find_family(folder).read(folder)
    return config


def family_name(config: ModelConfig) -> str:
    """Returns the name of the family of a configuration, such as `cosyvoice3`."""
    return _package(config).rpartition(".")[2]


def weight_prefixes(config: ModelConfig) -> tuple[str, ...]:
    """Returns the beginnings of the names of the weights of the decoder of a model."""
    return tuple(getattr(import_module(_package(config)), "WEIGHT_PREFIXES", ("",)))


def family_of(config: ModelConfig) -> Any:
    """Imports the `Family` of a configuration, and torch with it."""
    package = import_module(_package(config))
    if decoder := getattr(package, "DECODER", None):
        module, _, name = decoder.partition(":")
        network = getattr(import_module(module), name)
        return import_module(f"{GROUP}.codec_family").codec_family(network, package.WEIGHTS)
    return import_module(f"{package.__name__}.family").FAMILY


@lru_cache(maxsize=8)
def unfilled_network(config: ModelConfig, stage: StageName) -> Any:
    """Makes the network of a stage without weights, on torch's `meta` device, where it takes no
    memory. A configuration reads from it what follows from the layers, such as their look-ahead.

    The first call imports torch, and takes 10 to 50 ms more. The result is shared.
    """
    import torch

    with torch.device("meta"):
        return family_of(config).network(config, stage)


def _package(config: ModelConfig) -> str:
    """Returns the import name of the package that a configuration belongs to."""
    module = import_module(getattr(config, "module", type(config).__module__))
    return module.__package__ or module.__name__


def _files_of(folder: Path, family: Any) -> list[str]:
    return [
        path.name
        for file in _files(family)
        for path in folder.glob(file)
        if path.is_file() and (not _flow(family) or _has_flow(path, family))
    ]


def _has_flow(path: Path, family: Any) -> bool:
    with path.open("rb") as file:
        text = file.read(_MOST_BYTES_OF_A_MODEL_FILE).decode(errors="replace")
    return re.search(rf"(?m)^flow:\s*!new:\S*\.{_flow(family)}\s", text) is not None


def _flow(family: Any) -> str:
    return getattr(family, "FLOW", "")


def _has_known_configuration(document: Mapping[str, Any], family: Any) -> bool:
    if "model_type" in document:
        return document["model_type"] in _model_types(family)
    keys = getattr(family, "CONFIG_KEYS", ())
    return bool(keys) and document.keys() >= set(keys)


def _files(family: Any) -> tuple[str, ...]:
    return getattr(family, "FILES", ())


def _model_types(family: Any) -> tuple[str, ...]:
    return getattr(family, "MODEL_TYPES", ())


def _own_families() -> Iterator[ModuleType]:
    for module in pkgutil.iter_modules(import_module(GROUP).__path__):
        if module.ispkg:
            yield import_module(f"{GROUP}.{module.name}")


def _other_families() -> Iterator[ModuleType]:
    """Yields the families of other distributions. Python reads the metadata of all installed
    distributions for them, so a caller that needs none saves time.
    """
    for point in entry_points(group=GROUP):
        yield point.load()

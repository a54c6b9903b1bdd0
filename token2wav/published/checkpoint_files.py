"""Files of weights in a model folder: a single file, or shards with or without an index."""

from __future__ import annotations

import glob
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from token2wav.config.values import shown
from token2wav.errors import CheckpointError, ConfigError
from token2wav.published.transformers_json import read_json

INDEX_ENDING = ".index.json"
PUBLISHED = ("model.safetensors", "pytorch_model.bin")  # of `transformers`; the second is a pickle
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{1,5})-of-(?P<total>\d{1,5})(?P<ending>\.\w+)")
_LARGEST_INDEX = 1 << 26  # bytes; the index of a mixture of experts has megabytes


def file_patterns(name: str) -> tuple[str, str, str]:
    """Returns patterns of the files that may hold weights of a name, the preferred one first.

    For `model.safetensors`: this file, the index `model.safetensors.index.json`, and shards without
    an index, `model-*-of-*.safetensors`.
    """
    stem, dot, ending = name.rpartition(".")
    return name, f"{name}{INDEX_ENDING}", f"{stem}-*-of-*{dot}{ending}"


def weights_file(folder: Path, names: Sequence[str] = PUBLISHED) -> Path:
    """Finds the weights in a folder, under the first of some names.

    Returns:
        Path of the only file, of the index, or of a shard. `weight_files` takes any of these.

    Raises:
        CheckpointError: the folder has no such file.
    """
    for name in names:
        *whole, shards = file_patterns(name)
        found = [folder / file for file in whole] + sorted(folder.glob(shards))
        for path in found:
            if path.is_file():
                return path
            if path.is_symlink():
                raise CheckpointError(
                    f"{path}: a link to {path.readlink()}, which does not exist; download the "
                    "file again"
                )
    inside = (folder / names[0]).parent
    files = ", ".join(Path(name).name for name in names)
    raise CheckpointError(f"{inside}: contains none of {files}")


def only_file(folder: Path, patterns: Sequence[str]) -> Path | None:
    """Returns the only file of a folder that has a name of some patterns; None if there is none.

    Raises:
        ConfigError: there are several.
    """
    paths = sorted(path for pattern in patterns for path in folder.glob(pattern))
    if len(paths) > 1:
        names = ", ".join(path.name for path in paths[:4])
        raise ConfigError(f"{folder}: {len(paths)} files of weights, expected one: {names}")
    return paths[0] if paths else None


def weight_files(
    path: Path, prefixes: tuple[str, ...] = ("",)
) -> Mapping[Path, frozenset[str] | None]:
    """Lists the files that hold weights.

    Args:
        path: file that `weights_file` found.
        prefixes: beginnings of the names of the wanted weights. An index names their files, so the
            other shards need not be there.

    Returns:
        The files. An index adds the names of the wanted weights in each.

    Raises:
        CheckpointError: a shard is missing, or the index cannot be used.
    """
    if path.name.endswith(INDEX_ENDING):
        return _indexed(path, prefixes)
    return dict.fromkeys(_shards(path))


def is_shard(name: str) -> bool:
    """Returns whether a file is a shard by its name, such as `model-00001-of-00002.safetensors`."""
    return _SHARD.fullmatch(name) is not None


def stored_bytes(path: Path) -> int:
    """Returns the size of all files of weights that are there."""
    if path.name.endswith(INDEX_ENDING):
        files = {path.parent / file for file in _weight_map(path).values()}
    else:
        files = set(_shards(path))
    return sum(file.stat().st_size for file in files if file.is_file())


def _indexed(index: Path, prefixes: tuple[str, ...]) -> dict[Path, frozenset[str]]:
    names: dict[str, set[str]] = {}
    for name, file in _weight_map(index).items():
        if name.startswith(prefixes):
            names.setdefault(file, set()).add(name)
    if not names:
        wanted = " or ".join(f"{prefix}*" for prefix in prefixes)
        raise CheckpointError(f"{index}: no weight is named {wanted}")
    for file in names:
        if not (index.parent / file).is_file():
            raise CheckpointError(f"{index.parent / file}: missing, but {index.name} names it")
    return {index.parent / file: frozenset(names[file]) for file in sorted(names)}


def _weight_map(index: Path) -> dict[str, str]:
    """Reads the name of the file of every weight. Every name is that of a file of the folder."""
    try:
        weight_map = read_json(index, most_bytes=_LARGEST_INDEX).get("weight_map")
    except ConfigError as error:
        raise CheckpointError(str(error)) from error
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{index}: weight_map: expected an object")
    ending = Path(index.name.removesuffix(INDEX_ENDING)).suffix
    for file in weight_map.values():
        if not isinstance(file, str) or Path(file).name != file or "\0" in file:
            raise CheckpointError(f"{index}: weight_map: {shown(file)} is no file of the folder")
        if not file.endswith(ending):
            raise CheckpointError(f"{index}: weight_map: {shown(file)} does not end in {ending}")
    return weight_map


def _shards(path: Path) -> list[Path]:
    """Returns a file, and the other shards if its name is that of a shard."""
    match = _SHARD.fullmatch(path.name)
    if match is None:
        return [path]
    stem, total, ending = match["stem"], match["total"], match["ending"]
    shards: dict[int, Path] = {}
    for file in path.parent.glob(f"{glob.escape(stem)}-*-of-*{ending}"):
        other = _SHARD.fullmatch(file.name)
        if other is None or other["stem"] != stem:
            continue
        if other["total"] != total:
            raise CheckpointError(
                f"{path.parent}: {path.name} is one of {int(total)} files, but {file.name} one of "
                f"{int(other['total'])}; remove the files of one download"
            )
        shards[int(other["number"])] = file
    for number in range(1, int(total) + 1):
        if number not in shards:
            name = f"{stem}-{number:0{len(match['number'])}}-of-{total}{ending}"
            raise CheckpointError(f"{path.parent / name}: missing; it is one of {int(total)} files")
    return [shards[number] for number in range(1, int(total) + 1)]

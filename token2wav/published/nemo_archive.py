"""Reader of `.nemo` archives, which are tar files with a configuration and a pickle of weights.

The archive is read member by member. Nothing is extracted to the disk, and nothing is executed.
"""

from __future__ import annotations

import tarfile
from io import BytesIO
from pathlib import Path, PurePosixPath

from token2wav.config.strict_yaml import MAX_FILE_BYTES
from token2wav.errors import CheckpointError, one_line

CONFIG, WEIGHTS = "model_config.yaml", "model_weights.ckpt"
# Largest size of a member in bytes. The published codecs have 250 MB of weights.
_MOST_BYTES = {CONFIG: MAX_FILE_BYTES, WEIGHTS: 4 << 30}


def read_member(path: Path, name: str) -> BytesIO:
    """Reads one member of an archive into memory.

    Args:
        path: archive, plain or compressed.
        name: `CONFIG` or `WEIGHTS`.

    Raises:
        CheckpointError: the file is no tar archive, lacks the member, or has another member, a
            link, a path that leads out of the archive, or a member that is too large.
    """
    content: BytesIO | None = None
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                if _checked_name(path, member) == name:
                    if content is not None:
                        raise CheckpointError(f"{path}: '{name}' appears twice")
                    file = archive.extractfile(member)
                    assert file is not None  # a regular file
                    content = BytesIO(file.read())
    except CheckpointError:
        raise
    except Exception as error:  # a damaged archive raises errors of tar and of each compression
        raise CheckpointError(f"{path}: cannot be read: {one_line(error)[:200]}") from error
    if content is None:
        raise CheckpointError(f"{path}: contains no {name}")
    return content


def _checked_name(path: Path, member: tarfile.TarInfo) -> str:
    """Returns the name of a member without a leading `./`, or an empty name for the root folder."""
    name = str(PurePosixPath(member.name))
    if member.isdir() and name == ".":
        return ""
    if not member.isreg():
        raise CheckpointError(f"{path}: '{member.name}' is not a regular file; nothing was read")
    if name not in _MOST_BYTES:
        raise CheckpointError(
            f"{path}: unexpected member '{member.name}'; only {CONFIG} and {WEIGHTS} are allowed"
        )
    if member.size > _MOST_BYTES[name]:
        raise CheckpointError(
            f"{path}: '{name}' has {member.size} bytes; at most {_MOST_BYTES[name]} are allowed"
        )
    return name

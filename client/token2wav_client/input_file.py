"""Readers of input files that check the size of an array before they allocate memory for it.

The header of an array may announce any size. An archive may unpack to a thousand times its size.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable
from io import BytesIO
from pathlib import Path
from tokenize import TokenError
from typing import Any
from zipfile import BadZipFile, ZipFile

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError

# Largest size of a file, or of one array in a file. For comparison, the prompt of 30 s and the
# tokens of 18 minutes take half a MiB each.
MOST_MIB = 64
_MOST_BYTES = MOST_MIB << 20
_NPY_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}

# Errors that json, safetensors and the readers in this module raise on malformed bytes.
# RuntimeError includes RecursionError, and zipfile raises it for encrypted archives and unknown
# compression methods. NumPy parses the header of an array with Python's own parser, which raises
# SyntaxError, the tokenizer's TokenError, and MemoryError for brackets that are nested too deep.
UNREADABLE = (
    *(
        OSError,
        ValueError,
        TypeError,
        EOFError,
        KeyError,
        RuntimeError,
        MemoryError,
        SyntaxError,
        TokenError,
    ),
    *(BadZipFile, zlib.error, SafetensorError),
)
_SHOWN_CHARS = 200


def reason(error: BaseException) -> str:
    """Returns one short line with the reason why a file cannot be read."""
    if isinstance(error, (RecursionError, MemoryError)):
        return "the content is nested too deep, or the memory is full"
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    text = " ".join(text.split()) or type(error).__name__
    text = f"type {text} is unknown" if isinstance(error, KeyError) else text
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


def content_of(path: Path) -> bytes:
    """Reads the content of a file; raises ValueError if it is larger than `MOST_MIB`."""
    with path.open("rb") as file:
        content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise ValueError(f"the file has more than {MOST_MIB} MiB")
    return content


def array_in_npy(content: bytes) -> npt.NDArray[Any]:
    """Reads the array in the content of a `.npy` file. Raises ValueError if the format version is
    unknown, the array holds Python objects, or the content is shorter than its header announces.
    """
    file = BytesIO(content)
    version = np.lib.format.read_magic(file)
    if version not in _NPY_HEADERS:
        raise ValueError(f"version {version} of the format is unknown")
    shape, fortran_order, dtype = _NPY_HEADERS[version](file)
    if dtype.hasobject:
        raise ValueError("the file holds pickled objects, which are never loaded")
    if min(shape, default=0) < 0:
        raise ValueError(f"the header has the invalid shape {shape}")
    array_bytes, data_bytes = math.prod(shape) * dtype.itemsize, len(content) - file.tell()
    if array_bytes > data_bytes:
        raise ValueError(f"the header announces {array_bytes} bytes, but {data_bytes} follow")
    flat = np.frombuffer(content, dtype, math.prod(shape), file.tell())
    return flat.reshape(shape, order="F" if fortran_order else "C")


def arrays_in_npz(content: bytes, names: Iterable[str]) -> dict[str, npt.NDArray[Any]]:
    """Reads the arrays in the content of a `.npz` file whose names are in `names`."""
    with ZipFile(BytesIO(content)) as archive:
        files = {member.filename: member for member in archive.infolist()}
        members = {name: files[f"{name}.npy"] for name in names if f"{name}.npy" in files}
        for name, member in members.items():
            if member.file_size > _MOST_BYTES:
                raise ValueError(f"{name} has more than {MOST_MIB} MiB")
        return {name: array_in_npy(archive.read(member)) for name, member in members.items()}

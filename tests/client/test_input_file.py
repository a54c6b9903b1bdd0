"""Files of tokens and voices that are refused: unreadable ones, and hostile ones, which announce or
unpack to any size, before they take memory.
"""

from __future__ import annotations

import io
import json
import os
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from testkit.limits import memory_within
from token2wav_client.errors import InputError
from token2wav_client.token_source import open_tokens
from token2wav_client.voice import ClientVoice

VOICE_SUFFIXES = (".npz", ".safetensors")
TOKEN_SUFFIXES = (".npy", ".json", ".txt", "")
# messages about an unreadable file, by its suffix
NOTHING_READ = dict.fromkeys(TOKEN_SUFFIXES, "cannot read tokens")
NOTHING_READ |= dict.fromkeys(VOICE_SUFFIXES, "cannot read the voice")


def load(path: Path) -> None:
    if path.suffix in VOICE_SUFFIXES:
        ClientVoice.load(path)
    else:
        open_tokens(str(path))


def npy_header(shape: str) -> bytes:
    """Returns the content of a `.npy` file that announces an array and has none of its data."""
    text = f"{{'descr': '<i8', 'fortran_order': False, 'shape': {shape}, }}".encode()
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


def archive(content: bytes) -> bytes:
    """Returns an archive with a prompt mel."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as members:
        members.writestr("prompt_mel.npy", content)
    return file.getvalue()


def safetensors_header(dtype: str, shape: int, size: int) -> bytes:
    """Returns the header of a prompt mel."""
    mel = {"dtype": dtype, "shape": [shape], "data_offsets": [0, size]}
    text = json.dumps({"prompt_mel": mel}).encode()
    return len(text).to_bytes(8, "little") + text


def saved(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


DEEP = npy_header("(" * 4000 + ")" * 4000)
PICKLED = saved(np.array([1, None]))
HOSTILE = [
    (
        ".npy",
        npy_header(f"({10**13}, )"),
        "the header announces 80000000000000 bytes, but 0 follow",
    ),
    (".npy", npy_header(f"({10**30}, )"), "the header announces 8[0]{30} bytes, but 0 follow"),
    (".npy", npy_header("(2**40, )"), "cannot read tokens"),
    (".npy", npy_header("(-1, )") + bytes(8), r"the header has the invalid shape \(-1,\)"),
    (".npy", DEEP, "cannot read tokens"),
    (".npy", npy_header("[" * 4000), "cannot read tokens"),
    (".npy", PICKLED, "pickled objects, which are never loaded"),
    (".json", b"[" * 100_000, "nested too deep"),
    (".json", b"[" * 100_000 + b"]" * 100_000, "nested too deep"),
    (".json", b'[{"a":' * 100_000, "nested too deep"),
    # Python 3.10 may read such a number.
    (".json", b"[1" + b"0" * 10_000 + b"]", "cannot read tokens|more than 20 digits"),
    (".npz", archive(npy_header(f"({10**12}, 80)")), "the header announces"),
    (".npz", archive(bytes(100 << 20)), "prompt_mel has more than 64 MiB"),
    (".npz", archive(DEEP), "cannot read the voice"),
    (".npz", archive(PICKLED), "cannot read the voice"),
    (".npz", saved(np.arange(3)), r"cannot read the voice \(File is not a zip file\)"),
    (".safetensors", safetensors_header("F32", 10**12, 4 * 10**12), "cannot read the voice"),
    (".safetensors", (2**60).to_bytes(8, "little"), "header too large"),
    (".safetensors", (10**5).to_bytes(8, "little") + b"[" * 10**5, "cannot read the voice"),
    (".safetensors", safetensors_header("BF16", 1, 2) + b"ab", "type 'BF16' is unknown"),
]


@pytest.mark.parametrize(("suffix", "content", "message"), HOSTILE)
def test_a_hostile_file_is_refused_before_it_takes_memory(
    tmp_path: Path, suffix: str, content: bytes, message: str
) -> None:
    path = tmp_path / f"file{suffix}"
    path.write_bytes(content)
    with memory_within(256 << 20), pytest.raises(InputError, match=message) as caught:
        load(path)
    assert str(caught.value).startswith(str(path))
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("suffix", [".npy", ".json", *VOICE_SUFFIXES])
def test_a_file_that_is_too_large_is_not_read_to_its_end(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"file{suffix}"
    path.touch()
    os.truncate(path, 10**11)  # a sparse file, which takes no room on disk
    with memory_within(256 << 20), pytest.raises(InputError, match="the file has more than 64 MiB"):
        load(path)


@pytest.mark.parametrize("suffix", NOTHING_READ)
def test_a_file_that_is_missing_or_a_folder_is_named_at_once(tmp_path: Path, suffix: str) -> None:
    (folder := tmp_path / f"folder{suffix}").mkdir()
    for path in (tmp_path / f"missing{suffix}", folder):
        words = f"{re.escape(path.name)}.*{NOTHING_READ[suffix]}"
        with pytest.raises(InputError, match=words):
            load(path)


@pytest.mark.parametrize("content", [b"", b"garbage" * 100, b"PK\x03\x04broken", b"\xff" * 64])
@pytest.mark.parametrize("suffix", [".npy", *VOICE_SUFFIXES])
def test_a_file_without_an_array_is_named(tmp_path: Path, suffix: str, content: bytes) -> None:
    path = tmp_path / f"file{suffix}"
    path.write_bytes(content)
    with pytest.raises(InputError, match=f"file{suffix}: {NOTHING_READ[suffix]}"):
        load(path)

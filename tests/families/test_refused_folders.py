"""Folders that are refused: each row of `refused_folders.txt`, and of `SPECIAL` below, names a
family, an edit of its folder, and a part of the one sentence that says what is wrong, and where.

`test_absurd_sizes.py` tries absurd values of every number.
"""

from __future__ import annotations

import json
import re
import shutil
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from testkit.models.codec_models import CODECS, write_archive
from testkit.models.family_golden import FamilyGolden
from testkit.models.folder_edits import (
    ABSENT,
    Edit,
    changed_document,
    content,
    into,
    link,
    removed,
    replaced,
    set_values,
    set_weights,
    tensor,
)
from testkit.models.folders import write_folder
from testkit.models.tiny_model import TINY, tiny_weights
from testkit.tables import table
from token2wav import CheckpointError, ConfigError, RuntimeConfig, Token2Wav, Token2WavError
from token2wav.assembly import check_folder

TABLE = Path(__file__).with_name("refused_folders.txt")
LONG = "9" * 5000


@dataclass(frozen=True)
class Refusal:
    """Row of the table.

    Attributes:
        family: name of a folder in `folders.py`.
        edit: makes the folder wrong.
        sentence: part of the message; ` ... ` stands for any text.
        name: names the row among those of the family.
        error: class of the error.
    """

    family: str
    edit: Edit
    sentence: str
    name: str
    error: type[Token2WavError] = Token2WavError

    def __str__(self) -> str:
        return f"{self.family}: {self.name[:80]}"


def assigned(text: str, start: str) -> dict[str, str]:
    """Reads assignments, which are divided by semicolons."""
    pairs = (assignment.split(" = ") for assignment in text.split("; "))
    start = f"{start}." if start else ""
    return {start + name: value for name, value in pairs}


def values(file: str, start: str, row: str) -> Edit:
    """Sets values, in JSON, of a file."""
    changes = assigned(row, start).items()
    return set_values(
        file, {path: value if value == ABSENT else json.loads(value) for path, value in changes}
    )


def tensors(file: str, start: str, row: str) -> Edit:
    """Sets tensors of a file; `tensor` says how they are written."""
    file, _, target = file.partition(" -> ")
    changes = {name: tensor(value) for name, value in assigned(row, start).items()}
    return set_weights(file, changes, target)


def files(_file: str, _start: str, row: str) -> Edit:
    """Edits whole files."""
    verb, *words = row.split()
    if verb == "remove":
        return removed(*words)
    if verb == "cut":
        return cut(*words)
    if verb == "move":
        return into(words[-1])
    if words[0] == "->":
        return link(verb, words[1])
    _, _, text = row.partition(" = ")
    return content(verb, CONTENTS.get(text, text))


def cut(name: str, keep: str, target: str = "") -> Edit:
    """Cuts a file of weights to a share of it, after it has got another name."""

    def edit(folder: Path) -> None:
        set_weights(name, {}, target)(folder)
        path = folder / (target or name)
        path.write_bytes(path.read_bytes()[: int(float(keep) * path.stat().st_size)])

    return edit


# New contents of files that have names in the table.
CONTENTS: dict[str, str | bytes] = {
    "empty": b"",
    "noise": b"\xff" * 64,
    "zero": "\0",
    "nesting": "[" * 100_000,
    "blanks": " " * ((1 << 20) + 1),
    "pointer": "version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 34\n",
    "page": "\n<!DOCTYPE html>\n<html><body>Log in</body></html>",
}
# What a row changes, by the first word of its heading, and the class of the error.
KINDS: dict[str, tuple[Callable[..., Edit], type[Token2WavError]]] = {
    "values": (values, ConfigError),
    "tensors": (tensors, CheckpointError),
    "text": (lambda file, _, old, new: replaced(file, old, new), ConfigError),
    "files": (files, Token2WavError),
}


def rows() -> Iterator[Refusal]:
    """Reads the table."""
    for part in TABLE.read_text().replace("{LONG}", LONG).split("\n[")[1:]:
        heading, _, lines = part.partition("]\n")
        family, what, start = [*heading.split(": "), ""][:3]
        kind, _, file = what.partition(" of ")
        make, error = KINDS[kind]
        for *edit, sentence in table(lines.replace("\n    |", " |")):
            yield Refusal(family, make(file, start, *edit), sentence, " -> ".join(edit), error)


def noise(name: str, table: torch.Tensor) -> Edit:
    """Adds a file with a table of noise."""
    return lambda folder: save_file({name: table}, folder / "noise.safetensors")


def pickled(change: Callable[[dict[str, Any]], object]) -> Edit:
    """Replaces the weights of the flow by another object, in a pickle."""

    def edit(folder: Path) -> None:
        path = folder / "flow.safetensors"
        torch.save(change(load_file(path)), folder / "flow.pt")
        path.unlink()

    return edit


def archive(members: dict[str, bytes]) -> Edit:
    """Replaces the archive of NanoCodec."""
    return lambda folder: write_archive(folder / "codec.nemo", members)


def member(kind: bytes, size: int = 0) -> Edit:
    """Replaces the archive of NanoCodec by the head of its first member."""
    info = tarfile.TarInfo("model_config.yaml")
    info.type, info.size = kind, size
    info.linkname = "" if size else "/etc/passwd"
    return content("codec.nemo", info.tobuf() + bytes(0 if size else 1024))


def weights_twice(folder: Path) -> None:
    """Adds a second file of weights of Moshi, and removes the file that names one of them."""
    (folder / "config.json").unlink()
    (folder / "tokenizer-2-checkpoint5.safetensors").touch()


def saved(content: object) -> bytes:
    """Returns a pickle."""
    file = BytesIO()
    torch.save(content, file)
    return file.getvalue()


def damaged_archive(folder: Path) -> None:
    """Compresses an archive of NanoCodec, and damages it behind its first member."""
    path, digits = folder / "codec.nemo", Random(0).randbytes(1 << 17).hex().encode()
    write_archive(path, {"model_config.yaml": YAML, "model_weights.ckpt": digits}, "w:xz")
    compressed = path.read_bytes()
    path.write_bytes(compressed[: 1 << 16] + bytes(64) + compressed[(1 << 16) + 64 :])


SCALES = "decoder.sr_cond_model.2.scale_embed.weight"
RAND_NOISE, SINES = "cfm.rand_noise", "sinegen.sine_waves"
NANOCODEC = CODECS["nanocodec"].document(FamilyGolden("nanocodec", "tiny").sizes)
YAML = yaml.safe_dump(NANOCODEC).encode()
CODE = saved({"audio_decoder.pre_conv.conv.bias": Path("/")})
# Edits of archives, of pickles, and of tables of noise.
SPECIAL: dict[str, list[tuple[Edit, str]]] = {
    "wavtokenizer": [
        (
            set_values("WavTokenizer_small.ckpt", {"state_dict": {"head.out.bias": torch.ones(3)}}),
            "wrongly shaped: head.out.bias (3,)",
        ),
    ],
    "dac_of_descript": [
        (
            set_values("weights.pth", {"metadata.kwargs.sample_rate": torch.ones(1)}),
            "weights.pth: metadata.kwargs.sample_rate: expected int",
        ),
        (set_values("weights.pth", {"metadata": Path("/")}), "nothing was executed"),
        (set_values("weights.pth", {"metadata": ABSENT}), "metadata.kwargs: expected an object"),
        (set_values("weights.pth", {"metadata.kwargs": 3}), "metadata.kwargs: expected an object"),
        (set_values("weights.pth", {"state_dict": [1]}), "no weight is named quantizer"),
        (set_values("weights.pth", {"state_dict": {}}), "no weight is named quantizer"),
        (set_values("weights.pth", {"state_dict": {"decoder.x": 1}}), "is a int, not a tensor"),
    ],
    "mimi_of_moshi": [(weights_twice, "2 files match ... set mimi_name in config.json")],
    "nanocodec": [
        *(
            (archive({name: YAML}), "unexpected member")
            for name in ("../model_config.yaml", "/etc/passwd", "model.py", "a/model_config.yaml")
        ),
        (archive({"model_weights.ckpt": b""}), "contains no model_config.yaml"),
        (archive({"model_config.yaml": YAML, "./model_config.yaml": YAML}), "appears twice"),
        (archive({"model_config.yaml": YAML, "model_weights.ckpt": CODE}), "nothing was executed"),
        *(
            (member(kind), "not a regular file")
            for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE)
        ),
        (member(tarfile.REGTYPE, 5 << 30), "at most 1048576 are allowed"),
        (damaged_archive, "codec.nemo: cannot be read: Corrupt input data"),
    ],
    "voxcpm": [
        (set_values("audiovae.pth", {"state_dict": [1]}), "no weight is named decoder.*"),
        (set_values("audiovae.pth", {"state_dict": {SCALES: [1.0]}}), "is a list, not a tensor"),
        (
            set_values("config.json", {"audio_vae_config.sr_bin_boundaries": [1] * 65}),
            "sr_bin_boundaries: 65 items; at most 64",
        ),
    ],
    "chatterbox": [
        (
            set_weights("s3gen.safetensors", {"flow.encoder.after_norm.weight": ABSENT}),
            "'flow.encoder.after_norm.weight' is missing",
        )
    ],
    "cosyvoice3": [
        (pickled(lambda weights: {"state_dict": weights}), "'state_dict' is a dict, not a tensor"),
        (pickled(lambda weights: list(weights.values())), "flow.pt: ... state dict ... list"),
        (pickled(lambda weights: {}), "missing: ... input_embedding.weight ... and 42 more"),
        (pickled(lambda weights: tiny_weights("hift")), "flow.pt: ... missing: ... unexpected:"),
        (noise(RAND_NOISE, torch.zeros(1, 40, 50)), f"{RAND_NOISE} ... (1, 40, 50) ... 80"),
        (noise(RAND_NOISE, torch.zeros(80, 50)), f"{RAND_NOISE} ... (80, 50)"),
        (noise(RAND_NOISE, torch.full((1, 80, 4), torch.nan)), f"NaN ... {RAND_NOISE}"),
        (noise(SINES, torch.zeros(1, 480, 8)), f"{SINES} ... (1, 480, 8) ... 9"),
        (noise(SINES, torch.zeros(1, 480, 9).double()), f"{SINES} ... float64 ... float32"),
    ],
    "few_convolutions": [
        (changed_document("hift.pt", lambda weights: torch.ones(3)), "state dict ... Tensor"),
    ],
}
REFUSALS = [
    *rows(),
    *(
        Refusal(family, edit, sentence, str(number))
        for family, edits in SPECIAL.items()
        for number, (edit, sentence) in enumerate(edits)
    ),
]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns the folder of a family without any edit. It is checked once."""

    @cache
    def folder(family: str) -> Path:
        written = write_folder(family, tmp_path_factory.mktemp(family))
        check_folder(written)
        return written

    return folder


def edited(refusal: Refusal, good: Callable[[str], Path], tmp_path: Path) -> Path:
    folder = Path(shutil.copytree(good(refusal.family), tmp_path / "model"))
    refusal.edit(folder)
    return folder


@pytest.mark.parametrize("refusal", REFUSALS, ids=str)
def test_a_folder_that_is_refused(
    refusal: Refusal, good: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = edited(refusal, good, tmp_path)
    with pytest.raises(refusal.error) as refused:
        check_folder(folder)
    message = str(refused.value)
    assert message.startswith(str(folder))
    paths = re.findall(rf"{folder}[^:;, ]*", message)
    assert len(paths) == len(set(paths)), message
    parts = map(re.escape, refusal.sentence.split(" ... "))
    assert re.search(".*".join(parts), message), message
    assert "\n" not in message
    assert len(message) < 1500 + len(refusal.name)


@pytest.mark.parametrize("refusal", {row.family: row for row in REFUSALS}.values(), ids=str)
def test_a_load_refuses_as_the_check_does(
    refusal: Refusal, good: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = edited(refusal, good, tmp_path)
    with pytest.raises(Token2WavError) as checked:
        check_folder(folder)
    with pytest.raises(Token2WavError) as loaded:
        Token2Wav.load(folder, runtime=RuntimeConfig(device="cpu"))
    assert str(loaded.value) == str(checked.value)


@pytest.mark.parametrize(
    ("name", "near"),
    [("mimmi", "mimi"), ("CosyVoice3", "fun-cosyvoice3-0.5b"), ("qwen3-tt", "qwen3-tts")],
)
def test_a_name_that_is_nearly_an_alias(name: str, near: str) -> None:
    with pytest.raises(Token2WavError, match=f"^{name}: no such model folder; did you mean {near}"):
        check_folder(Path(name))


def test_a_file_is_no_model_folder() -> None:
    with pytest.raises(ConfigError, match="no such model folder"):
        check_folder(TINY / "cosyvoice3.yaml")

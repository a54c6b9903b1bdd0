"""Absurd numbers in model folders: each is refused by its key and bound, before anything is
computed with it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from testkit.models import cosyvoice1_model, cosyvoice2_model, stepaudio2_model
from testkit.models.codec_models import CODECS, FORMATS
from testkit.models.family_golden import FamilyGolden
from testkit.models.tiny_model import DATA, TINY, one_line, tiny_copy
from token2wav import CheckpointError, ConfigError
from token2wav.assembly import check_folder
from token2wav.families.chatterbox import read as read_chatterbox
from token2wav.families.cosyvoice3.bigvgan import read_bigvgan
from token2wav.families.streamflow import StreamFlowSection
from token2wav.published.registry import find_family

Reader = Callable[[Path], Any]
ABSURD = ["0", "-1", "100000000", "1" + "0" * 18, "1.0e+308", ".nan", "text", "[[1]]"]
HARMLESS = {("inference_cfg_rate", "0")}  # no guidance
# of a file by its suffix, because YAML takes `NaN` and `1e+308` of JSON for strings
LOAD: dict[str, Callable[[str], Any]] = {".json": json.loads, ".yaml": yaml.safe_load}
DUMP: dict[str, Callable[[Any], str]] = {".json": json.dumps, ".yaml": yaml.safe_dump}
NUMBER = re.compile(r"^( *)(\w+): (!ref .*|[\[\d].*)$", re.MULTILINE)


def cosyvoice3(folder: Path) -> Path:
    path = folder / "cosyvoice3.yaml"
    text = (TINY / path.name).read_text()
    codebooks = "    codebooks:\n        count: 2\n    vocab_size"
    times = "t_scheduler: 'cosine'\n                n_timesteps: 10"
    path.write_text(
        text.replace("    vocab_size", codebooks).replace("t_scheduler: 'cosine'", times)
    )
    return path


def cosyvoice2(folder: Path) -> Path:
    path = cosyvoice2_model.write_yaml(folder, FamilyGolden("cosyvoice2", "tiny"))
    path.write_text(
        path.read_text().replace("llm_input_size: 896", "llm_input_size: 896  # not read")
    )
    return path


def cosyvoice1(folder: Path) -> Path:
    return cosyvoice1_model.write_yaml(folder, FamilyGolden("cosyvoice1", "tiny"))


def stepaudio2(folder: Path) -> Path:
    return stepaudio2_model.write_yaml(folder, FamilyGolden("stepaudio2", "tiny"), hift=False)


@pytest.mark.parametrize("write", [cosyvoice3, cosyvoice2, cosyvoice1, stepaudio2])
@pytest.mark.parametrize("absurd", ABSURD)
def test_an_absurd_number_is_refused_by_its_key(
    tmp_path: Path, write: Callable[[Path], Path], absurd: str
) -> None:
    path = write(tmp_path)
    read = find_family(tmp_path).read
    text, sound, refused = path.read_text(), read(tmp_path), 0
    for match in NUMBER.finditer(text):
        key, value = match.group(2), match.group(3)
        other = absurd if value.startswith("!ref") else re.sub(r"[\d.]+", absurd, value, count=1)
        path.write_text(f"{text[: match.start(3)]}{other}{text[match.end(3) :]}")
        try:
            assert read(tmp_path) == sound or (key, absurd) in HARMLESS, (
                f"{key}: {other} was accepted"
            )
            continue
        except ConfigError as error:
            message = one_line(error).removeprefix(str(path))
        named = {key, *re.findall(rf"(\w+): !ref.*<{key}>", text)}
        assert any(re.search(rf"\b{name}\b", message) for name in named), (key, message)
        refused += 1
    assert refused >= 8


def numbers(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the path of every number in a document; of a list only the first item."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from numbers(item, (*path, key))
    elif isinstance(value, list):
        yield from numbers(value[0] if value else None, (*path, 0))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path


def bigvgan(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    document = json.loads((DATA / "bigvgan" / path.name).read_text())
    path.write_text(json.dumps(document | changes))
    return path


def streamflow(folder: Path) -> Path:
    """Writes a StreamFlow beside its BigVGAN. All numbers of the section have their defaults."""
    rates = {"upsample_rates": [16, 10], "upsample_kernel_sizes": [32, 20]}
    bigvgan(folder, num_mels=80, hop_size=160, sampling_rate=16000, **rates)
    section = {name: value for name, value in asdict(StreamFlowSection()).items() if value != ()}
    document = {"sample_rate": 16000, "flow": section, "vocoder": {"type": "bigvgan"}}
    path = folder / "streamflow.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def qwen25_omni(folder: Path) -> Path:
    path, sizes = folder / "config.json", FamilyGolden("qwen25_omni", "tiny").sizes
    path.write_text(json.dumps({"model_type": "qwen2_5_omni", "token2wav_config": sizes}))
    return path


OTHERS = {"bigvgan": bigvgan, "streamflow": streamflow, "qwen25_omni": qwen25_omni}
# A base of rotary angles has no upper bound. A layer scale is only a sign that there are scales.
HARMLESS_NUMBERS = {"rope_theta", "max_period", "layer_scale"}


@pytest.mark.parametrize("name", [*CODECS, "higgs_first_release", *OTHERS])
def test_an_absurd_number_of_a_document_is_refused_by_its_key(name: str, tmp_path: Path) -> None:
    """A number that the server does not read may have any value."""
    if name in OTHERS:
        file = OTHERS[name](tmp_path)
    else:
        codec, sizes = (CODECS | FORMATS)[name], FamilyGolden(name, "tiny").sizes
        file = codec.write_document(tmp_path, sizes) / codec.file
        file.write_text(DUMP[file.suffix](codec.document(sizes)))
    load, dump = LOAD[file.suffix], DUMP[file.suffix]
    read: Reader = read_bigvgan if name == "bigvgan" else find_family(tmp_path).read
    text, sound, refused = file.read_text(), read(tmp_path), 0
    absurd = [0, -1, 10**8, 10**18, 1e308, float("nan"), "text", [[1]]]
    for path in numbers(load(text)):
        key = next(part for part in reversed(path) if isinstance(part, str))
        for value in absurd if key not in HARMLESS_NUMBERS else ():
            document = target = load(text)
            for part in path[:-1]:
                target = target[part]
            target[path[-1]] = value
            file.write_text(dump(document))
            try:
                assert read(tmp_path) == sound or (key, str(value)) in HARMLESS, (
                    f"{path}: {value} was accepted"
                )
                continue
            except ConfigError as error:
                message = str(error).removeprefix(str(file))
            assert re.search(rf"\b{key}\b", message), (path, value, message)
            refused += 1
    assert refused >= 4 * len(absurd)


def test_a_network_that_its_weights_cannot_fill_is_refused(tmp_path: Path) -> None:
    """Each size is within its bounds; together they would be some petabytes."""
    folder = tiny_copy(tmp_path)
    path = folder / "cosyvoice3.yaml"
    text = (
        path.read_text().replace("dim: 64\n", "dim: 65536\n").replace("depth: 2\n", "depth: 256\n")
    )
    path.write_text(text.replace("dim_head: 32", "dim_head: 65536"))
    with pytest.raises(
        CheckpointError, match=r"flow\.safetensors: the file is too small for the configuration"
    ):
        check_folder(folder)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ([10**9, 0], r"flow\.encoder\.size: 1000000000 is not between 1 and 65536"),
        ([0], r"flow\.encoder\.size: 0 is not between 1 and 65536"),
        ([], r"'flow\.encoder\.after_norm\.weight' has the shape \(\), which lacks dimension 1"),
    ],
)
def test_sizes_that_are_counted_in_weights_have_bounds(
    tmp_path: Path, shape: list[int], words: str
) -> None:
    """A tensor without numbers may say any size in its file: zero times any size takes no bytes."""
    header = {
        name: {"dtype": "F32", "shape": size, "data_offsets": [0, 0] if size else [0, 4]}
        for name, size in {
            "flow.encoder.after_norm.weight": shape,
            "flow.encoder.encoders.0.self_attn.pos_bias_u": [8, 0],
            "flow.encoder.encoders.0.feed_forward.w_1.weight": [0],
            "flow.encoder.up_encoders.0.x": [0],
            "flow.decoder.estimator.final_proj.weight": [0, 10**9],
            "flow.decoder.estimator.down_blocks.0.1.0.attn1.to_q.weight": [512, 0],
            "flow.decoder.estimator.mid_blocks.0.x": [0],
            "mel2wav.conv_pre.bias": [0],
            "mel2wav.f0_predictor.classifier.weight": [0],
        }.items()
    }
    written = json.dumps(header).encode()
    (tmp_path / "s3gen.safetensors").write_bytes(
        len(written).to_bytes(8, "little") + written + (b"" if shape else bytes(4))
    )
    with pytest.raises(ConfigError, match=words):
        read_chatterbox(tmp_path)

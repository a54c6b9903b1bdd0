"""Families that nothing here knows, in distributions of their own: they are found, loaded, streamed
and served.

Tone has two stages of its own. Shared has the decoder of DAC, and declares its own sizes and names
of weights in one file.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from testkit.door import Door
from testkit.models.codec_models import CODECS
from testkit.utterances import chunks_of, joined, off, portions
from token2wav import ConfigError, Token2Wav, Voice
from token2wav.assembly import exportable, flow_networks
from token2wav.published.codec_config import CodecConfig
from token2wav.published.codec_sizes import CodecSizes
from token2wav.published.registry import read_config

AUDIO = 1e-5  # of float32; phases are summed in double precision
TOKENS = np.random.default_rng(0).integers(0, 100, 47).astype(np.int32)
MADE_UP = Path(__file__).with_name("made_up")


@pytest.fixture(scope="module", autouse=True)
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folder with the packages that pip would have installed, for this process only."""
    site = tmp_path_factory.mktemp("site")
    for name in ("tone", "shared"):
        package = f"token2wav_{name}.py" if name == "shared" else f"token2wav_{name}"
        (site / package).symlink_to(MADE_UP / package)
        (info := site / f"token2wav_{name}-1.dist-info").mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: token2wav-{name}\nVersion: 1\n"
        )
        (info / "entry_points.txt").write_text(f"[token2wav.families]\n{name} = token2wav_{name}\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site))
        yield site
    made_up = ("token2wav_tone", "token2wav_shared")
    for name in [name for name in sys.modules if name.startswith(made_up)]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tone")
    (folder / "tone.json").write_text('{"loudness": 0.5}')
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> Token2Wav:
    return Token2Wav.load(folder)


def a_voice(prompt_tokens: int) -> Voice:
    return Voice(np.arange(prompt_tokens), np.zeros((2 * prompt_tokens, 1)), np.ones(3))


def by_hand(tokens: NDArray[np.int32]) -> NDArray[np.float64]:
    """The audio of tokens, sample by sample."""
    cycles, audio = 0.0, []
    for index, token in enumerate(tokens):
        following = tokens[min(index + 1, len(tokens) - 1)]
        for pitch in (100.0 + token, 100.0 + (int(token) + int(following)) / 2):
            for _ in range(40):
                cycles += pitch / 2000
                audio.append(0.5 * np.sin(2 * np.pi * cycles))
    return np.array(audio)


def test_without_networks_it_is_neither_exported_nor_planned(folder: Path) -> None:
    with pytest.raises(ConfigError, match="a tone runs only on torch"):
        exportable(folder)
    with pytest.raises(ConfigError, match="the model has no flow with a cache"):
        flow_networks(read_config(folder), "float32")


def test_a_folder_of_no_family_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"not a model folder; it contains none of .*cosyvoice3\.yaml, .*tone\.json",
    ):
        Token2Wav.load(tmp_path)


@pytest.mark.parametrize("prompt_tokens", [0, 5, 12])
@pytest.mark.parametrize("portion", [1, 7, 47])
def test_chunks_equal_the_whole(model: Token2Wav, prompt_tokens: int, portion: int) -> None:
    chunks = chunks_of(model, portions(TOKENS, [portion]), a_voice(prompt_tokens))
    assert len(chunks) > 1
    assert off(joined(chunks), by_hand(TOKENS)) <= AUDIO


def test_family_is_served(model: Token2Wav) -> None:
    with Door.open(model) as door, ThreadPoolExecutor(3) as threads:
        lengths = (47, 3, 20)
        heard = threads.map(
            lambda length: door.heard(np.array_split(TOKENS[:length], 3), a_voice(length % 7)),
            lengths,
        )
        for length, chunks in zip(lengths, heard, strict=True):
            assert {chunk.sample_rate for chunk in chunks} == {2000}
            assert off(joined(chunks), by_hand(TOKENS[:length])) <= AUDIO


CODES = np.random.default_rng(1).integers(0, 16, (53, 2)).astype(np.int32)


SHARED_SIZES = {
    "downsampling_ratios": [2, 3],
    "decoder_hidden_size": 8,
    "hidden_size": 6,
    "codebook_dim": 4,
}


@pytest.fixture
def shared_folders(tmp_path: Path) -> tuple[Path, Path]:
    """Folders of one model: in the format of DAC, and in the format of the made-up codec."""
    dac, shared = tmp_path / "dac", tmp_path / "shared"
    for folder in (dac, shared):
        folder.mkdir()
    sizes = {**SHARED_SIZES, "n_codebooks": 2, "codebook_size": 16, "sampling_rate": 6000}
    CODECS["dac"].write(dac, sizes)
    weights = load_file(dac / "model.safetensors")
    codec = {**SHARED_SIZES, "books": 2, "entries": 16, "activation": "snake", "loss_weight": 0.5}
    document = {"model_type": "made_up_codec", "rate": 6000, "codec": codec, "dim": 4096}
    (shared / "config.json").write_text(json.dumps(document))
    names = {
        "quantizer.quantizers.": "codec.books.",
        "codebook.weight": "table",
        "out_proj.": "outward.",
        "in_proj.": "inward.",
        "decoder.": "codec.generator.",
    }
    renamed = {}
    for name, value in weights.items():
        for old, new in names.items():
            name = name.replace(old, new)
        renamed[name] = value
    save_file(renamed, shared / "model.safetensors")
    return dac, shared


def test_a_codec_with_a_shared_decoder_is_one_short_file(
    shared_folders: tuple[Path, Path],
) -> None:
    assert len((MADE_UP / "token2wav_shared.py").read_text().splitlines()) <= 100
    dac, shared = (Token2Wav.load(folder) for folder in shared_folders)
    assert off(shared.synthesize(CODES), dac.synthesize(CODES)) <= AUDIO
    chunks = chunks_of(shared, portions(CODES, [6]))
    assert len(chunks) > 1


def test_its_folders_are_refused_by_the_names_of_its_format(
    shared_folders: tuple[Path, Path],
) -> None:
    path = shared_folders[1] / "config.json"
    document = json.loads(path.read_text())
    for key, value, sentence in (
        ("books", 0, r"codec\.books: 0 is not between 1 and 64"),
        (
            "bookz",
            2,
            r"codec\.bookz: unknown key; did you mean codec\.books\?",
        ),
        ("activation", "elu", r"codec\.activation: 'elu' is not supported; expected 'snake'"),
        ("decoder_hidden_size", 6, r"codec\.decoder_hidden_size: 6 cannot be halved 2 times"),
    ):
        changed = {**document, "codec": {**document["codec"], key: value}}
        path.write_text(json.dumps(changed))
        with pytest.raises(ConfigError, match=rf"^{path}: {sentence}"):
            read_config(path.parent)


@dataclass(frozen=True)
class Frameless(CodecSizes):
    sampling_rate: int = 24_000


def test_sizes_without_their_frame_are_refused() -> None:
    with pytest.raises(RuntimeError, match="Frameless: FRAME must name the fields"):
        CodecConfig.of(Frameless())

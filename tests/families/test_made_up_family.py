"""A family that nothing here knows, in a distribution of its own: it is found, loaded, streamed and served."""

from __future__ import annotations

import sys
import sysconfig
import venv
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.server.rig import Rig
from tests.support.batches import spoken_together
from token2wav import ConfigError, InputError, Token2Wav, Voice
from token2wav.families import check_folder, exportable, networks, read_config
from token2wav_client import Client, ClientVoice

AUDIO = 1e-5  # of float32; phases are summed in double precision
TOKENS = np.random.default_rng(0).integers(0, 100, 47).astype(np.int32)
MADE_UP = Path(__file__).with_name("made_up")


@pytest.fixture(scope="module", autouse=True)
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What pip would have put beside this project; here for this process."""
    site = tmp_path_factory.mktemp("site")
    (site / "token2wav_tone").symlink_to(MADE_UP / "token2wav_tone")
    (info := site / "token2wav_tone-1.dist-info").mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: token2wav-tone\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[token2wav.families]\ntone = token2wav_tone\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site))
        yield site
    for name in [name for name in sys.modules if name.startswith("token2wav_tone")]:
        del sys.modules[name]


@pytest.fixture
def _environment(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment with this one's packages and that one more: Triton takes packages from no other place."""
    venv.create(tmp_path / "venv", symlinks=True)
    [packages] = (tmp_path / "venv").glob("lib/python*/site-packages")
    folders = [sysconfig.get_path("purelib"), str(site)]
    (packages / "both.pth").write_text("".join(f"import site; site.addsitedir({folder!r})\n" for folder in folders))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv" / "bin" / "python"))


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
    with pytest.raises(ConfigError, match="its family runs on torch alone"):
        exportable(folder)
    with pytest.raises(ConfigError, match="it keeps nothing in a cache"):
        networks(read_config(folder), "float32")


def test_it_is_found_and_its_folder_checked(folder: Path) -> None:
    check_folder(folder)
    assert read_config(folder).sample_rate == 2000


def test_a_folder_of_no_family_is_refused_by_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"not a model folder; none of .*cosyvoice3\.yaml, .*tone\.json is there"):
        Token2Wav.load(tmp_path)


@pytest.mark.parametrize("prompt_tokens", [0, 5, 12])
@pytest.mark.parametrize("portion", [1, 7, 47])
def test_chunks_equal_the_whole(model: Token2Wav, prompt_tokens: int, portion: int) -> None:
    with model.stream(a_voice(prompt_tokens)) as stream:
        chunks = [chunk for at in range(0, 47, portion) for chunk in stream.push(TOKENS[at : at + portion])]
        chunks += stream.finish()
    assert len(chunks) > 1
    assert np.abs(np.concatenate([chunk.audio for chunk in chunks]) - by_hand(TOKENS)).max() <= AUDIO


def test_batches_equal_each_alone(model: Token2Wav) -> None:
    lengths = (47, 3, 20)
    audio = spoken_together(model.pipeline, [(a_voice(length % 7), TOKENS[:length], 0) for length in lengths])
    for length, heard in zip(lengths, audio, strict=True):
        assert np.abs(heard - by_hand(TOKENS[:length])).max() <= AUDIO
    assert model.pipeline.open_streams == 0


def test_bad_input_is_refused_by_the_numbers_of_the_model(model: Token2Wav) -> None:
    with pytest.raises(InputError, match="tokens: 100 at index 0 is outside the vocabulary 0 to 99"):
        model.synthesize([100], a_voice(0))
    with pytest.raises(InputError, match=r"speaker_embedding: shape \(2,\), expected \(3,\)"):
        model.stream(Voice([], np.zeros((0, 1)), np.ones(2)))


@pytest.mark.usefixtures("_environment")
def test_it_is_served(folder: Path, tmp_path: Path) -> None:
    def heard(url: str, length: int) -> NDArray[np.float32]:
        voice = a_voice(length % 7)
        sent = ClientVoice(voice.prompt_tokens, voice.prompt_mel, voice.speaker_embedding)
        with Client(url) as client:
            chunks = list(client.synthesize(np.array_split(TOKENS[:length], 3), sent))
        assert {(chunk.sample_rate, chunk.samples_per_token) for chunk in chunks} == {(2000, 80)}
        return np.concatenate([np.asarray(chunk.audio, np.float32) for chunk in chunks])

    with Rig.start(folder, tmp_path) as rig, ThreadPoolExecutor(3) as threads:
        lengths = (47, 3, 20)
        audio = threads.map(lambda length: heard(rig.server.grpc_url, length), lengths)
        for length, each in zip(lengths, audio, strict=True):
            assert np.abs(each - by_hand(TOKENS[:length])).max() <= AUDIO
        rig.wait_until_empty()

"""Chatterbox and its Turbo in the library: full attention, fade-in, voices.

`test_public_mels.py` compares their mel with the public code, and `test_streams.py` tests their
streams under the block mask.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from testkit.batches import WHOLE_BLOCKS
from testkit.models.chatterbox_model import write_conditionals
from testkit.models.folders import CPU, golden_of, write_folder
from testkit.models.golden import snr_db
from testkit.utterances import a_voice, off, some_tokens
from token2wav import StreamConfig, Token2Wav, Voice, assembly
from token2wav.errors import InputError
from token2wav.execution.cuda_graphs import GraphSummary
from token2wav.published.registry import read_config
from token2wav.stages.stage import FrameChunk
from token2wav.stages.waveform import PieceShape, WaveformStage

AUDIO = 1e-4
SNR_DB = 40


@pytest.fixture(scope="session", params=["chatterbox", "turbo"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="session")
def model(folder: Path) -> Token2Wav:
    return Token2Wav.load(folder, stream=WHOLE_BLOCKS, runtime=CPU)


def test_mean_flow_by_its_weights(tmp_path: Path) -> None:
    """Chatterbox Flash has a mean flow in a file that is named like the plain flow."""
    folder = write_folder("turbo", tmp_path)
    expected: Any = read_config(folder)
    (folder / "s3gen_meanflow.safetensors").rename(folder / "s3gen.safetensors")
    assert read_config(folder) == replace(expected, file="s3gen.safetensors")
    assert expected.ode_steps == 2
    assembly.check_folder(folder)


def test_whole_utterances_prepare_pieces_of_hops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prepares pieces as on a GPU, where each length is a CUDA graph.

    A chunk is then a whole utterance of up to a million tokens.
    """
    made: list[int] = []

    def vocoder(*_: object, shapes: Sequence[PieceShape], **rest: object) -> SimpleNamespace:
        made.extend(shape.frames for shape in shapes)
        return SimpleNamespace(withheld_samples=0)

    no_graphs = SimpleNamespace(capture=lambda function: function, summary=GraphSummary())
    path = write_folder("chatterbox", tmp_path)
    monkeypatch.setattr(assembly, "graphs_enabled", lambda device: True)
    monkeypatch.setattr(assembly, "GraphPool", lambda device: no_graphs)
    monkeypatch.setattr(assembly, "gpu_runs_kernels", lambda device: False)
    monkeypatch.setattr(assembly, "WaveformStage", vocoder)
    Token2Wav.load(path, stream=StreamConfig(reference=True), runtime=CPU)
    assert 200 in made
    assert max(made) <= 400


def test_windows(model: Token2Wav, folder: Path) -> None:
    """Each chunk attends to all tokens before it and to 25 tokens after it, and waits for these.

    The last chunks attend to all tokens.
    """
    windows = Token2Wav.load(
        folder, stream=StreamConfig(reference=True, max_hop_tokens=25), runtime=CPU
    )
    voice, tokens = a_voice(30), some_tokens(130)
    mels = [windows.mel(tokens[: stop + 25], voice, streaming=False) for stop in (45, 70, 95, 130)]
    cuts = zip(mels, ((0, 90), (90, 140), (140, 190), (190, 260)), strict=True)
    expected = np.concatenate([mel[:, begin:end] for mel, (begin, end) in cuts], axis=1)
    with windows.stream(voice) as stream:
        assert not stream.push(tokens[:69])
        chunks = [*stream.push(tokens[69:70]), *stream.push(tokens[70:]), *stream.finish()]
    audio = np.concatenate([chunk.audio for chunk in chunks])
    assert snr_db(audio, windows.vocode(expected)) > SNR_DB
    whole = windows.mel(tokens, voice, streaming=False)
    assert (
        np.square(expected - whole).sum() < 0.5 * np.square(model.mel(tokens, voice) - whole).sum()
    )


@pytest.mark.parametrize("count", [1, 40])
def test_utterances_are_faded_in(model: Token2Wav, count: int) -> None:
    voice, tokens = a_voice(0), some_tokens(count)
    audio = model.synthesize(tokens, voice)
    assert not audio[:480].any()
    assert 0 < np.abs(audio[480:500]).max() < 0.01 * np.abs(audio[700:960]).max()
    assert off(audio[:960], model.vocode(model.mel(tokens, voice))[:960]) <= 1e-3


@pytest.mark.parametrize("lengths", [[], [1], [1, 1], [1, 4, 1]], ids=str)
def test_the_fade_in_goes_on_where_the_first_piece_is_shorter(
    model: Token2Wav, lengths: list[int]
) -> None:
    """The first piece is one frame longer than the holdback of the vocoder.

    It has fewer samples than the fade-in.
    """
    vocoder = model.pipeline.vocoder
    assert isinstance(vocoder, WaveformStage)
    mel = torch.from_numpy(model.mel(some_tokens(40), a_voice(0)))
    network = vocoder._net
    shortest = network.lookahead_frames + 1
    assert 0 < shortest * network.frame_samples - network.output_delay < 960
    pieces = torch.split(mel, [shortest, *lengths, mel.shape[1] - shortest - sum(lengths)], dim=1)
    handle = vocoder.open()
    audio = [
        vocoder.advance([(handle, FrameChunk(piece, last=piece is pieces[-1]))])[0]
        for piece in pieces
    ]
    vocoder.close(handle)
    samples, whole = torch.cat(audio)[:1920].numpy(), model.vocode(mel.numpy())[:1920]
    assert off(samples, whole) <= AUDIO


def test_pickles_are_read_without_running_them(tmp_path: Path) -> None:
    path = tmp_path / "conds.pt"
    path.touch()
    with pytest.raises(InputError, match=f"^{path}: the file is empty; download it again$"):
        Voice.load(path)
    path.write_bytes(pickle.dumps({"gen": Path("x")}))
    with pytest.raises(InputError, match="refused, nothing was executed"):
        Voice.load(path)
    torch.save({"gen": {"prompt_token": torch.zeros(1, 2)}}, path)
    with pytest.raises(
        InputError, match="gen: missing, or without prompt_token, prompt_feat and embedding"
    ):
        Voice.load(path)


def test_a_mel_that_is_longer_than_its_tokens_is_cut(tmp_path: Path) -> None:
    path = write_conditionals(tmp_path / "conds.pt", golden_of("chatterbox"))
    state = torch.load(path, weights_only=True)
    state["gen"]["prompt_token"] = state["gen"]["prompt_token"][:, :20]
    torch.save(state, path)
    voice = Voice.load(path)
    assert (len(voice.prompt_tokens), len(voice.prompt_mel)) == (20, 40)

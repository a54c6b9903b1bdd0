"""Every ONNX file and every output of a graph that is refused."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest

from testkit.models import streamflow_model
from testkit.models.golden import TINY
from tests.voices import graphs, reference
from tests.voices.graphs import TOKENIZER
from tests.voices.material import WriteWav, speechlike
from token2wav import Voice
from token2wav.published.registry import read_config
from token2wav_voice import FrontEnd, ModelError, PromptVoice, Recording
from token2wav_voice.onnx_models import EARLIER_TOKENIZER_FILES


@pytest.fixture
def recording(write_wav: WriteWav) -> Recording:
    return Recording.load(write_wav(speechlike(1.5, 24_000), 24_000))


def refused(folder: Path, recording: Recording, file: str, message: str) -> None:
    with pytest.raises(ModelError) as error:
        FrontEnd(folder).voice(recording)
    text = str(error.value)
    assert re.fullmatch(f"{re.escape(str(folder / file))}: {message}", text), text
    assert "\n" not in text


@pytest.mark.parametrize("samples", [24_000, 24_955, 25_146, 25_919, 36_000])
def test_the_graphs_get_the_features(samples: int, folder: Path, write_wav: WriteWav) -> None:
    """A voice has two frames for each token, so it lacks a token that the tokenizer gives more."""
    recording = Recording.load(write_wav(speechlike(samples / 24_000, 24_000), 24_000))
    front_end, heard, count = FrontEnd(folder), recording.at(16_000), samples // 960
    tokens = graphs.tokens_of(reference.whisper_log_mel(heard))
    np.testing.assert_array_equal(front_end.tokens(recording), tokens)
    voice = front_end.voice(recording)
    np.testing.assert_array_equal(voice.prompt_tokens, tokens[:count])
    mel = reference.prompt_mel(recording.samples)[: 2 * count]
    np.testing.assert_allclose(voice.prompt_mel, mel, atol=2e-5)
    expected = graphs.embedding_of(reference.kaldi_fbank(heard))
    np.testing.assert_allclose(voice.speaker_embedding, expected, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("name", EARLIER_TOKENIZER_FILES)
def test_folders_of_earlier_generations(name: str, folder: Path, recording: Recording) -> None:
    later = FrontEnd(folder).voice(recording)
    (folder / TOKENIZER).rename(folder / name)
    earlier = FrontEnd(folder).voice(recording)
    np.testing.assert_array_equal(earlier.prompt_tokens, later.prompt_tokens)
    expected = reference.prompt_mel(recording.samples, 8_000)[: len(later.prompt_mel)]
    np.testing.assert_allclose(earlier.prompt_mel, expected, atol=2e-5)


def test_prompts_of_step_audio2_keep_all_tokens(folder: Path, write_wav: WriteWav) -> None:
    """The last frame of mel is repeated where public code repeats it; other families drop the last
    token there.
    """
    recording = Recording.load(write_wav(speechlike(1.03, 24_000), 24_000))
    other, tokens = FrontEnd(folder).voice(recording), FrontEnd(folder).tokens(recording)
    (folder / "flow.yaml").touch()
    voice = FrontEnd(folder).voice(recording)
    assert len(voice.prompt_tokens) == len(tokens) == len(other.prompt_tokens) + 1
    assert voice.prompt_mel.shape == (2 * len(tokens), 80)
    np.testing.assert_array_equal(voice.prompt_mel[: len(other.prompt_mel)], other.prompt_mel)
    np.testing.assert_array_equal(voice.prompt_mel[-1], voice.prompt_mel[-2])


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="none: no such folder"):
        FrontEnd(tmp_path / "none")


def test_a_folder_with_another_kind_of_tokenizer(folder: Path) -> None:
    (folder / "flow-chunk-5.pt").touch()
    with pytest.raises(ModelError, match="tokenizer of MOSS-Speech is no ONNX file"):
        FrontEnd(folder)


def test_streamflow_has_tokens_and_voices_of_an_embedding(
    folder: Path, recording: Recording, tmp_path: Path
) -> None:
    model = streamflow_model.write_model(tmp_path / "streamflow")
    for file in (graphs.TOKENIZER, graphs.SPEAKER):
        (folder / file).rename(model / file)
    front_end = FrontEnd(model)
    assert len(front_end.tokens(recording)) > 0
    with pytest.raises(
        ModelError,
        match="streamflow: the weights and the mel of StreamFlow's speaker encoder, an ECAPA-TDNN, "
        "are not published; compute an embedding",
    ):
        front_end.voice(recording)
    by_hand = PromptVoice(
        np.zeros(0, np.int32), np.zeros((0, 80), np.float32), np.ones(192, np.float32)
    )
    by_hand.save(tmp_path / "voice.safetensors")
    Voice.load(tmp_path / "voice.safetensors").check(read_config(model))


@pytest.mark.parametrize("file", [graphs.TOKENIZER, graphs.SPEAKER])
def test_no_file(file: str, folder: Path, recording: Recording) -> None:
    (folder / file).unlink()
    refused(
        folder,
        recording,
        file,
        "no such file; voices need this model from the published model folder",
    )


def test_a_folder_above_the_model_folder(folder: Path, recording: Recording) -> None:
    message = f"no such file, but {folder / graphs.SPEAKER} exists; use {folder}$"
    refused(folder.parent, recording, graphs.SPEAKER, message)


@pytest.mark.parametrize("file", [graphs.TOKENIZER, graphs.SPEAKER])
@pytest.mark.parametrize("content", [b"", b"\x00", b"not a model" * 100])
def test_invalid_model_files_are_refused(
    file: str, content: bytes, folder: Path, recording: Recording
) -> None:
    (folder / file).write_bytes(content)
    refused(folder, recording, file, r"cannot be loaded as an ONNX model \(.+\)")


FAILED, GAVE = "failed on inputs of shape", "returned an embedding"
LAST = "indices = Cast <to = 7> (whole)"
# edits of a graph, and the message
OTHER_TOKENIZERS = [
    ([("128", "80")], rf"{FAILED} \(1, 128, 150\) and \(1,\) \(.*128 Expected: 80.*\)"),
    (
        [
            ("1, 128, T", "128, T"),
            ("Slice (feats,", "Slice (batch,"),
            ("> {", "> {\n    batch = Unsqueeze (feats, zero)"),
        ],
        rf"{FAILED} .* \(.*rank for input: feats Got: 3 Expected: 2.*\)",
    ),
    ([("int32[1] feats", "int64[1] feats")], r"failed on .*: \(tensor\(int64\)\)\)"),
    (
        [("int64[1, N]", "float[1, N]"), (LAST, LAST.replace("7", "1"))],
        r"returned an output float32 \(1, 38\), .*",
    ),
    (
        [('"": 17', '"": 17, "elsewhere": 1'), (LAST, LAST.replace("Cast", "elsewhere.Cast"))],
        r"cannot be loaded as an ONNX model \(.*elsewhere.*\)",
    ),
    ([("[4]", "[2]")], "returned 75 tokens for 1.50 s, expected 25 per second"),
    (
        [("int64[1, N]", "int64[2, N]"), (LAST, "indices = Concat <axis = 0> (whole, whole)")],
        r"returned an output int64 \(2, 38\), expected integer \(1, any\)",
    ),
]
OTHER_SPEAKERS = [
    (
        [("T, 80", "T, 60"), ("{32}", "{72}")],
        rf"{FAILED} \(1, 148, 80\) \(.*Got: 80 Expected: 60.*\)",
    ),
    ([("192", "200"), ("{32}", "{40}")], f"{GAVE} of 200 values, expected 192"),
    ([("scale = {1}", "scale = {nan}")], f"{GAVE} with NaN or infinite values"),
    ([("scale = {1}", "scale = {inf}")], f"{GAVE} with NaN or infinite values"),
    ([("scale = {1}", "scale = {0}")], f"{GAVE} of zeros, .+"),
    (
        [
            ("{32},", "{32}, int64[2] wrong = {1, 7},"),
            ("output = Mul (all,", "reshaped = Reshape (all, wrong)\n    output = Mul (reshaped,"),
        ],
        rf"{FAILED} \(1, 148, 80\) \(.+\)",
    ),
]


@pytest.mark.parametrize(
    ("file", "model", "message"),
    [
        (graphs.TOKENIZER, graphs.speaker(), "has 1 inputs, expected 2"),
        *(
            (graphs.TOKENIZER, graphs.tokenizer(*edits), message)
            for edits, message in OTHER_TOKENIZERS
        ),
        *((graphs.SPEAKER, graphs.speaker(*edits), message) for edits, message in OTHER_SPEAKERS),
    ],
)
def test_a_graph_with_another_interface_is_refused(
    file: str, model: onnx.ModelProto, message: str, folder: Path, recording: Recording
) -> None:
    graphs.save(model, folder / file)
    refused(folder, recording, file, message)


def with_offset(offset: int) -> onnx.ModelProto:
    return graphs.tokenizer(("add = {0}", f"add = {{{offset}}}"))


def test_the_public_vocabulary(folder: Path, recording: Recording) -> None:
    first = FrontEnd(folder).tokens(recording)
    graphs.save(with_offset(6561 - int(first.max())), folder / graphs.TOKENIZER)
    position = int(first.argmax())
    outside = "is outside the vocabulary 0 to 6560"
    refused(folder, recording, TOKENIZER, f"token 6561 at position {position} {outside}")
    graphs.save(with_offset(6560 - int(first.max())), folder / graphs.TOKENIZER)
    assert FrontEnd(folder).tokens(recording).max() == 6560
    graphs.save(with_offset(-10_000), folder / graphs.TOKENIZER)
    refused(folder, recording, TOKENIZER, rf"token -\d+ at position 0 {outside}")


def test_the_vocabulary_of_the_folder(folder: Path, recording: Recording) -> None:
    text = (TINY / "cosyvoice3.yaml").read_text(encoding="utf-8")
    (folder / "cosyvoice3.yaml").write_text(text.replace("vocab_size: 6561", "vocab_size: 20"))
    outside = "is outside the vocabulary 0 to 19"
    refused(folder, recording, TOKENIZER, rf"token \d+ at position 0 {outside}")
    shutil.copy(TINY / "cosyvoice3.yaml", folder)
    FrontEnd(folder).voice(recording)
    (folder / "cosyvoice3.yaml").write_text("flow: [")
    with pytest.raises(ModelError, match=r"cosyvoice3\.yaml"):
        FrontEnd(folder)


def test_each_model_is_loaded_once_and_only_when_needed(folder: Path, recording: Recording) -> None:
    front_end = FrontEnd(folder)
    (folder / graphs.SPEAKER).unlink()
    tokens = front_end.tokens(recording)
    (folder / graphs.TOKENIZER).unlink()
    np.testing.assert_array_equal(front_end.tokens(recording), tokens)

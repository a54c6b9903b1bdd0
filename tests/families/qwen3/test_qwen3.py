"""Qwen3-TTS's tokenizer and Qwen3-Omni's Code2Wav in the library: the public audio, streams and
batches, checkpoints of several files, and folders that are refused.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.batches import spoken_together
from tests.support.family_golden import FamilyGolden
from tests.support.qwen3_model import document, is_omni, write_model
from tests.support.utterances import Tokens, chunks_of, joined, off, portions
from token2wav import CheckpointError, ConfigError, InputError, RuntimeConfig, Token2Wav
from token2wav.execution.assemble import check_folder
from token2wav.families import read_config
from token2wav.families.qwen3.config import DecoderSizes
from token2wav.families.qwen3.network import Qwen3Decoder
from token2wav.serving.token_buffer import checked_tokens
from token2wav.voice import voice_for

# Of the spread of the audio. Sums are in another order than in the public code.
PARITY = 1e-5
CPU = RuntimeConfig(device="cpu")
INDEX = "model.safetensors.index.json"


@pytest.fixture(
    scope="module",
    params=[(name, size) for name in ("qwen3_tts", "qwen3_omni") for size in ("tiny", "small")],
    ids=" ".join,
)
def golden(request: pytest.FixtureRequest) -> FamilyGolden:
    return FamilyGolden(*request.param)


@pytest.fixture(scope="module")
def model(golden: FamilyGolden, tmp_path_factory: pytest.TempPathFactory) -> Token2Wav:
    return Token2Wav.load(write_model(tmp_path_factory.mktemp("qwen3"), golden), runtime=CPU)


def codes(golden: FamilyGolden, count: int) -> Tokens:
    shape = (count, golden.sizes["num_quantizers"])
    drawn = np.random.default_rng(count).integers(0, golden.sizes["codebook_size"], shape)
    return drawn.astype(np.int32)


def test_the_public_audio(golden: FamilyGolden, model: Token2Wav) -> None:
    expected = golden["audio"].numpy()
    audio = model.synthesize(golden["codes"].numpy())
    assert audio.shape == expected.shape
    assert off(audio, expected) <= PARITY * expected.std()


@pytest.mark.parametrize("sizes", [[1], [2, 3, 1], [7, 30], [40]], ids=str)
def test_a_stream_is_the_whole_in_any_portions(
    golden: FamilyGolden, model: Token2Wav, sizes: list[int]
) -> None:
    tokens = codes(golden, 40)
    [decoder] = model.pipeline.stages.values()
    whole = decoder.whole(tokens).numpy()  # type: ignore[attr-defined]
    chunks = chunks_of(model, portions(tokens, sizes))
    assert len(chunks) > 1
    assert off(joined(chunks), whole) <= PARITY * whole.std()


def test_streams_in_a_batch_equal_each_stream_alone(golden: FamilyGolden, model: Token2Wav) -> None:
    utterances = [codes(golden, count) for count in (40, 9, 22, 1)]
    nobody = voice_for(model.config, None)
    together = spoken_together(
        model.pipeline, [(nobody, checked_tokens(each, model.config), 0) for each in utterances]
    )
    for tokens, audio in zip(utterances, together, strict=True):
        alone = model.synthesize(tokens)
        assert off(audio, alone) <= PARITY * alone.std()


def test_the_samples_that_qwen3_omni_does_not_make() -> None:
    for sizes, missing in ((DecoderSizes(), 555), (DecoderSizes(codebook_dim=512), 0)):
        with torch.device("meta"):
            network = Qwen3Decoder(sizes)
        assert (network.missing_samples, network.frame_samples) == (missing, 1920)


def test_missing_samples_count_as_trimmed(golden: FamilyGolden, model: Token2Wav) -> None:
    config, tokens = model.config, codes(golden, 5)
    assert (config.missing_samples > 0) == is_omni(golden)
    with model.stream() as stream:
        chunks = [chunk for token in tokens for chunk in stream.push(token[None])]
        chunks += stream.finish()
    samples = sum(len(chunk.audio) for chunk in chunks)
    assert chunks[-1].samples_trimmed == config.missing_samples
    assert samples + config.missing_samples == len(tokens) * config.samples_per_token
    heard = next(chunk for chunk in chunks if len(chunk.audio))
    assert (heard.first_token, heard.token_count) == (0, 1)


def test_several_files_of_weights(tmp_path: Path) -> None:
    golden = FamilyGolden("qwen3_omni", "tiny")
    write_model(tmp_path, golden, files=3)
    (tmp_path / "unread.safetensors").write_bytes(b"no weights")
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"]["thinker.layers.0.weight"] = "unread.safetensors"
    (tmp_path / INDEX).write_text(json.dumps(index))
    audio = Token2Wav.load(tmp_path, runtime=CPU).synthesize(golden["codes"].numpy())
    assert off(audio, golden["audio"].numpy()) <= PARITY * float(golden["audio"].std())


def test_an_index_that_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path, FamilyGolden("qwen3_omni", "tiny"), files=2)
    name = "code2wav.code_embedding.weight"
    for content, message in (
        ({"weight_map": {name: "../model.safetensors"}}, "is no file of the folder"),
        ({"weight_map": {name: "/etc/passwd"}}, "is no file of the folder"),
        ({"weight_map": {name: 3}}, "3 is no file of the folder"),
        ({"weight_map": {name: "gone.safetensors"}}, "missing, but the index names it"),
        ({"weight_map": {"thinker.weight": "x"}}, r"no weight is named code2wav\.\*"),
        ({"weight_map": []}, "expected an object"),
        ([], "expected an object, got list"),
    ):
        (tmp_path / INDEX).write_text(json.dumps(content))
        with pytest.raises(CheckpointError, match=message):
            check_folder(tmp_path)
    (tmp_path / INDEX).unlink()
    with pytest.raises(CheckpointError, match="contains neither"):
        check_folder(tmp_path)


def test_codes_and_rates_that_are_refused(golden: FamilyGolden, model: Token2Wav) -> None:
    with pytest.raises(InputError, match="tokens"):
        model.synthesize(codes(golden, 2)[:, :-1])
    with pytest.raises(InputError, match="outside the vocabulary"):
        model.synthesize(codes(golden, 2) + golden.sizes["codebook_size"])
    assert model.pipeline.open_streams == 0


@pytest.mark.parametrize("name", ["qwen3_tts", "qwen3_omni"])
@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("attention_bias", True, "attention_bias: True is not supported"),
        ("hidden_act", "relu", "is not one of silu"),
        ("num_key_value_heads", 1, "they must be equal"),
        ("head_dim", 7, "head_dim: 7 is odd"),
        ("num_hidden_layers", 10**9, "is not between 1 and 256"),
        ("sliding_window", 1, "is not between 2"),
        ("hidden_size", "16", "expected int"),
        ("upsample_rates", [], "empty; at least 1"),
        ("decoder_dim", 18, "cannot be halved 2 times"),
        ("rope_parameters", {"rope_type": "yarn"}, "'yarn' is not supported"),
        ("num_quantizers", 65, "is not between 1 and 64"),
    ],
)
def test_values_that_are_refused(
    name: str, key: str, value: object, message: str, tmp_path: Path
) -> None:
    content = document(FamilyGolden(name, "tiny"))
    section = next(part for part in ("decoder_config", "code2wav_config") if part in content)
    content[section][key] = value
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=f"config.json: {section}.*{message}"):
        read_config(tmp_path)


def test_documents_that_are_refused(tmp_path: Path) -> None:
    whole = document(FamilyGolden("qwen3_tts", "tiny"))
    for content, message in (
        ({**whole, "decode_upsample_rate": 1920}, "upsampling_ratios give 24"),
        ({**whole, "output_sample_rate": 0}, "output_sample_rate: 0 is not between"),
        ({**whole, "decoder_config": None}, "this folder has no decoder"),
        ({"model_type": "qwen3_omni_moe"}, "code2wav_config: expected an object"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(content))
        with pytest.raises(ConfigError, match=f"config.json: .*{message}"):
            read_config(tmp_path)


def test_weights_that_are_refused(tmp_path: Path) -> None:
    write_model(tmp_path, FamilyGolden("qwen3_tts", "tiny"))
    weights = load_file(tmp_path / "model.safetensors")
    book = "decoder.quantizer.rvq_rest.vq.layers.1._codebook."
    for name, value, message in (
        (f"{book}embedding_sum", None, "codebook .acoustic. lacks embedding_sum"),
        (f"{book}cluster_usage", torch.ones(3), "codebook .acoustic. has embedding_sum"),
        ("decoder.decoder.1.block.0.beta", None, "1 missing: decoder.1.block.0.beta"),
        ("decoder.surplus.weight", torch.ones(3), "1 unexpected: surplus.weight"),
    ):
        changed = dict(weights)
        if value is None:
            del changed[name]
        else:
            changed[name] = value
        save_file(changed, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=message):
            check_folder(tmp_path)

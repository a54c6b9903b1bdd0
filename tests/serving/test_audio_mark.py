"""Marks of synthetic audio: all audio is marked once and exactly, and plugins may fail."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testkit.batches import WHOLE_BLOCKS
from testkit.echo_mark import Audio, Echo, EchoStream, echoed
from testkit.models.tiny_model import ODE_STEPS, TINY, demo_tokens
from testkit.replies import FIRST, Expected
from testkit.rigs.plugins import installed
from testkit.utterances import joined, off, random_portions
from token2wav import (
    AudioChunk,
    BackendError,
    ConfigError,
    InputError,
    Token2Wav,
    UtteranceOptions,
    Voice,
)
from token2wav.config import RuntimeConfig
from token2wav.model import check_settings
from token2wav.serving.audio_mark import Marking, load_mark
from token2wav.serving.audio_output import AudioFormat

_CODE = """
from testkit.echo_mark import Echo

class Weightless:
    def __init__(self):
        raise FileNotFoundError("no weights in\\n/marks")
"""
MARKED = replace(WHOLE_BLOCKS, steps=(ODE_STEPS,), mark="Echo")
ROUNDING = 1e-4  # of the model, in chunks and batches


@pytest.fixture(scope="module", autouse=True)
def _installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    names = ["Echo", "Weightless", "Gone"]
    site = tmp_path_factory.mktemp("site")
    with installed(site, "made_up_marks", _CODE, "token2wav.audio_marks", names):
        yield


@pytest.fixture(scope="module")
def marked(_installed: None) -> Token2Wav:
    return Token2Wav.load(TINY, stream=MARKED, runtime=RuntimeConfig(device="cpu"))


@settings(max_examples=50)
@given(
    st.lists(st.integers(0, 1500), min_size=1, max_size=12),
    st.sampled_from([(), (2,)]),
)
def test_portions_are_marked_as_the_whole(sizes: list[int], shape: tuple[int, ...]) -> None:
    audio = np.random.default_rng(0).standard_normal((sum(sizes), *shape)).astype(np.float32)
    marking, parts = Marking(Echo(), 24_000, *shape or (1,)), np.split(audio, np.cumsum(sizes))
    done = [marking.take(part, last=part is parts[-1]) for part in parts]
    assert np.array_equal(np.concatenate(done), echoed(audio))


@pytest.mark.parametrize("seed", range(4))
def test_streams_of_the_library(
    marked: Token2Wav, voice: Voice, expected: Expected, seed: int
) -> None:
    assert np.array_equal(marked.synthesize(demo_tokens(90), voice), echoed(expected(90)))
    with marked.stream(voice) as stream:
        parts = random_portions(demo_tokens(90), seed)
        chunks = [chunk for part in parts for chunk in stream.push(part)] + stream.finish()
    assert off(joined(chunks), echoed(expected(90))) < ROUNDING


def test_the_mark_follows_the_resampler_and_precedes_the_encoder(
    marked: Token2Wav, model: Token2Wav, voice: Voice
) -> None:
    def spoken(model: Token2Wav, encoding: str) -> Any:
        options = UtteranceOptions(audio_format=AudioFormat(encoding, 16_000), speed=1.25)
        return model.synthesize(demo_tokens(60), voice, options)

    samples = echoed(spoken(model, "float32"))
    assert np.array_equal(spoken(marked, "float32"), samples)
    pcm = np.rint(np.clip(samples, -1, 1) * np.float32(32767)).astype(np.int16)
    assert np.array_equal(spoken(marked, "int16"), pcm)


def test_a_stage_of_the_ensemble_does_not_mark() -> None:
    """The process that schedules the streams does: tests/server/ensemble/test_ensemble.py."""
    stream, runtime = replace(MARKED, mark="Weightless"), RuntimeConfig(device="cpu")
    assert Token2Wav.load(TINY, stream=stream, runtime=runtime, stages=("vocoder",))


@pytest.mark.parametrize("end", ["finish", "cancel", "fail"])
def test_the_end_of_a_stream_frees_its_mark(
    marked: Token2Wav, voice: Voice, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    states = weakref.WeakSet[EchoStream]()

    class Watched(EchoStream):
        def __init__(self, channels: int) -> None:
            super().__init__(channels)
            states.add(self)

        def mark(self, audio: Audio, *, last: bool) -> Audio:
            if end == "fail" and last:
                raise RuntimeError("broken")
            return super().mark(audio, last=last)

    monkeypatch.setattr("testkit.echo_mark.EchoStream", Watched)
    # A record of pytest would keep the traceback.
    monkeypatch.setattr("token2wav.serving.audio_mark.log.disabled", True)
    stream = marked.stream(voice)
    stream.push(demo_tokens(FIRST))
    assert len(states) == 1
    if end == "cancel":
        stream.cancel()
    elif end == "finish":
        stream.finish()
    else:
        with pytest.raises(BackendError, match=r"^stream\.mark: the plugin failed: Runtime.*: bro"):
            stream.finish()
    gc.collect()
    assert len(states) == 0
    assert marked.pipeline.open_streams == 0


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda audio: audio[:-1], r"returned an array \(4799,\); expected \(4800,\)$"),
        (lambda audio: np.append(audio, 0), r"\(4801,\); expected \(4800,\)$"),
        (lambda audio: audio[:, None], r"\(4800, 1\); expected \(4800,\)$"),
        (lambda audio: 0.0, r"returned an array \(\); expected \(4800,\)$"),
        (lambda audio: audio * np.nan, "returned NaN or infinite samples$"),
        (lambda audio: audio["x"], "the plugin failed: IndexError: .*"),
    ],
    ids=["few", "many", "shape", "number", "NaN", "raises"],
)
def test_a_plugin_that_fails_ends_its_stream_alone(
    marked: Token2Wav,
    voice: Voice,
    expected: Expected,
    wrong: Any,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipeline = marked.pipeline
    utterances = [pipeline.utterance(voice) for _ in range(2)]
    stream: Any = utterances[0].output._marking
    monkeypatch.setattr(stream._stream, "mark", lambda audio, last: wrong(audio))
    for utterance in utterances:
        pipeline.open(utterance)
        utterance.chunker.push(demo_tokens(5), end=True)
    broken, whole = pipeline.advance(utterances)
    for utterance in utterances:
        pipeline.close(utterance)
    assert isinstance(broken, BackendError)
    with pytest.raises(BackendError, match=rf"^stream\.mark: .*{words}"):
        raise broken
    assert isinstance(whole, AudioChunk)
    assert off(whole.audio, echoed(expected(5))) < ROUNDING
    with pytest.raises(BackendError, match="the stream is closed"):
        stream.take(np.zeros(1, np.float32), last=False)


def test_a_plugin_that_cannot_open_fails_the_request(
    marked: Token2Wav, voice: Voice, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match=r"^sample_rate: 8000: an echo needs 16000 or more$"):
        marked.stream(voice, UtteranceOptions(audio_format=AudioFormat("alaw", 8000)))
    monkeypatch.setattr(Echo, "open", lambda *_: 1 // 0)
    with pytest.raises(
        BackendError, match=r"^stream\.mark: the plugin failed: ZeroDivisionError: "
    ):
        marked.stream(voice)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Ech", "'Ech' is not one of the installed ones: Echo, Gone, Weightless"),
        ("Gone", "Gone cannot be imported: AttributeError: .*"),
    ],
)
def test_a_mark_that_is_not_installed(name: str, words: str) -> None:
    stream = replace(MARKED, mark=name)
    with pytest.raises(ConfigError, match=rf"^stream\.mark: {words}$"):
        check_settings(TINY, stream, RuntimeConfig(device="cpu"))
    with pytest.raises(ConfigError, match=rf"^stream\.mark: {words}$"):
        Token2Wav.load(TINY, stream=stream)


def test_a_mark_without_weights() -> None:
    with pytest.raises(
        ConfigError,
        match=r"^stream\.mark: Weightless cannot be loaded: FileNotFoundError: no weights in /ma",
    ):
        load_mark("Weightless")

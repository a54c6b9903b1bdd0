"""Every family through the door of a server: streams side by side equal the library, and errors of
one stream harm no other. `tests/served/` adds the wire, for one flow and for one codec of each kind
of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from testkit.door import Door, VoiceInputs, at_once, audio_of, chunks_of, named
from testkit.models import qwen25_omni_model
from testkit.models.codec_models import CODECS
from testkit.models.folders import CACHING, write_folder
from testkit.models.golden import snr_db
from testkit.models.sized import a_voice
from testkit.utterances import Audio, joined, random_portions
from token2wav import RuntimeConfig, StreamConfig, Token2Wav, UtteranceOptions, Voice
from token2wav.config import LimitConfig, ServerConfig
from token2wav.families.qwen25_omni.voices import write_voices
from token2wav.voice import FIELDS

STREAMS, MOST_TOKENS = 6, 20_000
# Batches sum in another order than single streams, and F0 turns rounding into phase: 75 dB seen.
FLOW_DB, CODEC_DB = 60, 100
# Early audio depends on how tokens are portioned.
EXACT = StreamConfig(first_tokens=0, lookahead_frames=0)
FLOWS = ("cosyvoice3", *CACHING, "bigvgan", "codebooks", "streamflow", "qwen25_omni")


@dataclass(frozen=True, eq=False)
class Subject:
    """Model behind a door; its voice is `anna` of the settings.

    Attributes:
        voice: voice of the tokens; None if the model takes no voice.
    """

    name: str
    door: Door
    voice: Voice | None
    tokens: NDArray[Any]
    _whole: dict[Any, Audio] = field(default_factory=dict)

    def assert_equal(self, audio: Audio, tokens: NDArray[Any], **options: Any) -> None:
        """Asserts that audio equals that of the library."""
        key = (tokens.tobytes(), *options.items())
        if (whole := self._whole.get(key)) is None:
            model = self.door.model
            whole = model.synthesize(tokens, self.voice, UtteranceOptions(**options))
            self._whole[key] = whole
        assert audio.shape == whole.shape
        assert snr_db(audio, whole) > (CODEC_DB if self.voice is None else FLOW_DB)


@pytest.fixture(scope="module", params=[*FLOWS, *CODECS])
def subject(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Subject]:
    name, voice, files = request.param, None, list[Path]()
    folder = write_folder(name, tmp_path_factory.mktemp(name))
    # windows depend on the number of tokens alone
    windows = name in CODECS and CODECS[name].windows
    settings = StreamConfig() if windows else EXACT
    model = Token2Wav.load(folder, stream=settings, runtime=RuntimeConfig(device="cpu"))
    if model.config.takes_voice:
        omni = name == "qwen25_omni"
        voice = qwen25_omni_model.a_voice(folder) if omni else a_voice(model.config, 1, 30)
        files = [tmp_path_factory.mktemp("voices") / "anna.safetensors"]
        save_file({name: np.ascontiguousarray(getattr(voice, name)) for name in FIELDS}, files[0])
    limits = LimitConfig(streams=STREAMS + 4, stream_tokens=MOST_TOKENS)
    config = ServerConfig(settings, limits=limits, voices=tuple(map(str, files)))
    tokens = model.config.tokens.draw(60 if voice else 24, np.random.default_rng(0))
    with Door.open(model, config) as door:
        yield Subject(name, door, voice, tokens)


def test_streams_side_by_side_in_random_portions(subject: Subject) -> None:
    """Flows get their voice by name, as tensors, or by its id, and every stream has another speed.
    If a decoder adds noise, every third stream turns it off. Every second stream ends with a
    message without tokens.
    """
    voice, config = subject.voice, subject.door.model.config
    voices: list[Voice | VoiceInputs | str | None] = [None]
    if voice is not None:
        voices = ["anna", voice, named(voice.content_hash)]
    options: list[dict[str, Any]] = [{}]
    if voice is not None:
        options += [{"speed": 0.7}, {"speed": 1.9}]
    elif config.adds_noise:
        options += [{"decoder_noise": on} for on in (True, False)]
    streams = STREAMS if voice is None else 3  # flows take more time
    utterances = [subject.tokens[seed % 4 :] for seed in range(streams)]
    sent = at_once(
        [
            subject.door.speak(
                [*random_portions(tokens, seed % 8), *[tokens[:0]] * (seed % 2)],
                voices[seed % len(voices)],
                **options[seed % len(options)],
            )
            for seed, tokens in enumerate(utterances)
        ]
    )
    for seed, (tokens, replies) in enumerate(zip(utterances, sent, strict=True)):
        chunks = chunks_of(replies)
        assert {chunk.sample_rate for chunk in chunks} == {config.sample_rate}
        assert {chunk.samples_per_token for chunk in chunks} == {config.samples_per_token}
        assert chunks[-1].samples_trimmed == config.missing_samples  # so the length is known
        assert chunks[-1].first_token + chunks[-1].token_count == len(tokens)
        subject.assert_equal(joined(chunks), tokens, **options[seed % len(options)])


def wrong(subject: Subject) -> tuple[NDArray[Any], str]:
    """Returns tokens of which the last one is refused, and the error."""
    form = subject.door.model.config.tokens
    tokens = form.zeros(2)
    if form.are_latents:
        tokens[1] = np.nan
        return tokens, "latents: holds NaN or infinite values"
    size = form.codebook_sizes[-1]
    tokens[1] = (*(0 for _ in form.codebook_sizes[1:]), size) if form.shape else size
    which = f", codebook {len(form.codebook_sizes) - 1}," if form.shape else ""
    return tokens, f"tokens: {size} at index 1{which} is outside the vocabulary 0 to {size - 1}"


def test_errors_of_one_stream_do_not_affect_others(subject: Subject) -> None:
    """One stream gets a bad token. The clients of two others have gone: one stream is waiting, and
    the other one is being computed.
    """
    door, voice, tokens = subject.door, subject.voice, subject.tokens
    half = len(tokens) // 2
    good = [door.send(tokens[:half], voice, "good", start=True)]
    bad = [door.send(tokens[:half], voice, "bad", start=True)]
    left = [
        door.send(tokens, voice, "left", start=True, end=True),
        door.send(tokens[:1], voice, "waits", start=True, parameters={"keep_open": True}),
    ]
    for reply in left:
        reply.cancelled = True
    refused, message = wrong(subject)
    bad.append(door.send(refused, None, "bad", end=True))
    good.append(door.send(tokens[half:], None, "good", end=True))
    assert str(bad[1].failed()) == message
    subject.assert_equal(audio_of(good), tokens)


def test_limits_and_voices_that_do_not_fit(subject: Subject) -> None:
    door, config, tokens = subject.door, subject.door.model.config, subject.tokens
    too_many = config.tokens.zeros(MOST_TOKENS + 1)
    exceeded = f"tokens: the utterance would exceed {MOST_TOKENS} tokens, the limit of one stream"
    opened = door.send(tokens[:1], subject.voice, "open", start=True)
    assert door.refusal(too_many, subject.voice) == exceeded
    if (voice := subject.voice) is None:
        given = "given, but this model takes no voice"
        speaker = {"speaker_embedding": np.ones(192, np.float32)}
        assert door.refusal(tokens, speaker).startswith(f"speaker_embedding: {given}")
        assert door.refusal(tokens, "anna").startswith(f"voice: {given}")
        faster = door.refusal(tokens, parameters={"speed": 1.5})
        assert faster.startswith("speed: 1.5, but this model has no mel")
    else:
        inputs = {name: getattr(voice, name) for name in FIELDS}
        for name, shape in (("prompt_mel", (7, 80)), ("speaker_embedding", (100,))):
            wrong_voice = inputs | {name: np.ones(shape, np.float32)}
            assert door.refusal(tokens, wrong_voice).startswith(f"{name}: ")
        assert door.refusal(tokens).startswith("prompt_tokens: missing; ")
    rest = door.send(tokens[1:], None, "open", end=True)
    subject.assert_equal(audio_of([opened, rest]), tokens)


# The other families with a cache differ from this one in nothing that a prompt meets.
@pytest.mark.parametrize("subject", ["moss_speech"], indirect=True)
def test_the_longest_prompt_of_the_largest_values(subject: Subject) -> None:
    config = subject.door.model.config
    largest = config.tokens.codebook_sizes[0] - 1
    mel = np.full((config.token_mel_ratio * 750, 80), 100, np.float32)
    voice = Voice(np.full(750, largest), mel, np.full(192, -1000, np.float32))
    audio = audio_of([subject.door.send([0, largest], voice)])
    assert audio.shape == (2 * config.samples_per_token,)
    assert np.isfinite(audio).all()


def test_named_voices_of_qwen25_omni(tmp_path: Path) -> None:
    folder = write_folder("qwen25_omni", tmp_path)
    files = write_voices(folder, tmp_path / "voices")
    model = Token2Wav.load(folder, runtime=RuntimeConfig(device="cpu"))
    tokens = model.config.tokens.draw(20, np.random.default_rng(4))
    with Door.open(model, ServerConfig(voices=tuple(map(str, files)))) as door:
        heard = {
            name: joined(door.heard(random_portions(tokens, 3), name))
            for name in qwen25_omni_model.SPEAKERS
        }
    for name, audio in heard.items():
        whole = model.synthesize(tokens, qwen25_omni_model.a_voice(folder, name))
        assert snr_db(audio, whole) > FLOW_DB

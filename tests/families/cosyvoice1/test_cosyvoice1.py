"""CosyVoice1 and GLM-4-Voice: parity with the public code, streams in windows, and voices.

The tests of a stream compare with an utterance that is pushed at once. `test_public_mel` compares
that with the public code, for the windows of a whole utterance.
"""

from __future__ import annotations

from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from testkit.batches import spoken_together
from testkit.door import Door
from testkit.models.cosyvoice1_model import spoken
from testkit.models.cosyvoice2_model import write_yaml as write_cosyvoice2_yaml
from testkit.models.folders import golden_of, write_folder
from testkit.models.random_weights import SEED
from testkit.models.sized import a_voice
from testkit.utterances import chunks_of, joined, off, portions
from token2wav import RuntimeConfig, StreamConfig, Token2Wav, Voice
from token2wav.assembly import load_network
from token2wav.errors import ConfigError, InputError
from token2wav.families import cosyvoice1 as cosyvoice1_package
from token2wav.families.cosyvoice1 import CosyVoice1Config
from token2wav.families.cosyvoice1.network import CosyVoice1
from token2wav.families.cosyvoice1.stage import CosyVoice1Decoder
from token2wav.published.registry import family_name, read_config
from token2wav.voice import voice_for

GOLDEN = golden_of("cosyvoice1")
CPU = RuntimeConfig(device="cpu")
WHOLE = StreamConfig(lookahead_frames=0)
MEL = 2e-5  # tolerance between float32 results with values up to 5
AUDIO = 1e-4  # of audio with a spread of 0.04, from mels that differ by rounding
COUNTS = (130, 71, 50, 9, 1)
Model = Token2Wav


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder("cosyvoice1", tmp_path_factory.mktemp("cosyvoice1"))


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return Token2Wav.load(folder, runtime=CPU)


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of GLM-4-Voice."""
    return write_folder("glm4_voice", tmp_path_factory.mktemp("glm4_voice"))


@pytest.fixture(scope="module")
def whole(folder: Path) -> Model:
    return Token2Wav.load(folder, stream=WHOLE, runtime=CPU)


@pytest.fixture(scope="module")
def models(model: Model, whole: Model, glm: Path) -> dict[str, Model]:
    return {"windows": model, "whole": whole, "glm4_voice": Token2Wav.load(glm, runtime=CPU)}


def voice_of(model: Model, seed: int, prompt: int) -> Voice | None:
    return a_voice(model.config, seed, prompt) if model.config.takes_voice else None


def tokens_of(model: Model, count: int) -> Any:
    return model.config.tokens.draw(count, np.random.default_rng([SEED, count]))


def test_public_mel(whole: Model) -> None:
    _, mel = spoken(whole, GOLDEN["token"].numpy(), GOLDEN.voice)
    assert off(mel, GOLDEN["mel_full"]) <= MEL
    voice = GOLDEN.voice
    nothing = Voice(voice.prompt_tokens[:0], voice.prompt_mel[:0], voice.speaker_embedding)
    audio, mel = spoken(whole, GOLDEN["token"].numpy()[:7], nothing)
    assert off(mel, GOLDEN["mel_short"]) <= MEL
    # 7 tokens have 12.06 frames. The public code leaves out the rest, which is silent here.
    assert len(audio) == 7 * 441
    assert not audio[12 * 256 :].any()


def test_public_mel_of_glm4_voice(glm: Path) -> None:
    """Its encoder attends in blocks, and frames repeat tokens. It has neither voice nor prompt."""
    golden = golden_of("glm4_voice")
    model = Token2Wav.load(glm, stream=WHOLE, runtime=CPU)
    audio, mel = spoken(model, golden["token"].numpy(), None)
    assert off(mel, golden["mel_full"]) <= MEL
    assert len(audio) == 5 * 1764


def test_a_window_of_glm4_voice_has_whole_attention_blocks(glm: Path) -> None:
    config = read_config(glm)
    assert isinstance(config, CosyVoice1Config)
    assert (config.windows.block, config.windows.left) == (12, 24)
    with pytest.raises(
        ConfigError, match=r"^stream\.block_tokens: 15 is not a multiple of 2, the attention block"
    ):
        config.with_stream_settings(StreamConfig(block_tokens=15))


@pytest.mark.parametrize("family", ["cosyvoice1", "glm4_voice"])
def test_context_on_the_left_has_a_bound(family: str, request: pytest.FixtureRequest) -> None:
    config: Any = read_config(
        request.getfixturevalue("folder" if family == "cosyvoice1" else "glm")
    )
    for left in (-1, 59):
        settings = StreamConfig(left_blocks=left)
        assert config.with_stream_settings(settings).windows.left == 59 * config.windows.block
    sentence = r"^stream\.left_blocks: 60, expected -1 to 59 for windows of \d+ tokens"
    with pytest.raises(ConfigError, match=sentence):
        config.with_stream_settings(StreamConfig(left_blocks=60))


@pytest.mark.parametrize("levels", [1, 2, 3])
def test_a_window_starts_with_frames_that_all_levels_join(levels: int, model: Model) -> None:
    config: Any = model.config
    config = replace(config, sizes=replace(config.sizes, levels=levels))
    decoder: Any = CosyVoice1Decoder(config, CosyVoice1(config.sizes))
    for window in config.windows.over(0, 500, 520):
        tokens = np.zeros(window.last - window.first)
        item = decoder._input(None, window, tokens)
        assert item.start % 2 ** (levels - 1) == 0
        assert 0 <= config.sizes.mel_frames(window.first) - item.start < 2 ** (levels - 1)
        assert item.start + item.count >= config.sizes.mel_frames(window.fade_stop)


def test_the_flow_is_never_rounded(folder: Path) -> None:
    runtime = RuntimeConfig(device="cpu", precision="float16", decoder_precision="float16")
    assert Token2Wav.load(folder, runtime=runtime).summary.precision == "float32"


def test_public_audio(folder: Path) -> None:
    """The vocoder continues phases from random starts, which are written into the source."""
    hift = load_network(folder, read_config(folder), "decoder").hift
    harmonics, samples = hift.config.nb_harmonics + 1, len(GOLDEN["audio"])
    begins = torch.from_numpy(np.random.default_rng([SEED, 5]).random(harmonics)) - 0.5
    begins[0] = 0
    hift.m_source.begins.copy_(begins)
    numbers = np.random.default_rng([SEED, 6]).standard_normal((harmonics, samples))
    noise = hift.m_source.merged(torch.from_numpy(numbers.T).float())
    audio = hift(GOLDEN["mel_full"][None, :, :12], noise)[0]
    assert off(audio, GOLDEN["audio"]) <= AUDIO


@pytest.mark.parametrize("name", ["windows", "whole", "glm4_voice"])
@pytest.mark.parametrize("sizes", [[1], [41, 30]], ids=str)
@pytest.mark.parametrize("count", COUNTS)
def test_a_stream_has_the_same_audio_in_any_portions(
    name: str, count: int, sizes: list[int], models: dict[str, Model]
) -> None:
    model = models[name]
    voice, tokens = voice_of(model, 1, 30), tokens_of(model, count)
    chunks = chunks_of(model, portions(tokens, sizes), voice)
    expected, audio = model.synthesize(tokens, voice), joined(chunks)
    assert len(audio) == len(expected) == (1764 if name == "glm4_voice" else 441) * count
    assert off(audio, expected) <= AUDIO
    assert model.pipeline.open_streams == 0
    if name == "windows" and count > 70 and sizes == [1]:
        # 50 tokens complete 86 frames, at whose end the vocoder withholds audio.
        [decoder] = model.pipeline.stages.values()
        withheld = decoder.withheld_samples - 256
        assert len(chunks[0].audio) == 86 * 256 - withheld


@pytest.mark.parametrize("name", ["windows", "glm4_voice"])
def test_a_batch_equals_each_stream_alone(name: str, models: dict[str, Model]) -> None:
    """The windows of a batch have several lengths, positions and prompts."""
    model = models[name]
    voices = [voice_of(model, prompt, prompt) for prompt in (0, 30, 30, 75, 1)]
    utterances = [
        (voice_for(model.config, voice), tokens_of(model, count), 0)
        for voice, count in zip(voices, COUNTS, strict=True)
    ]
    together = spoken_together(model.pipeline, utterances, 0)
    for voice, (_, tokens, _), audio in zip(voices, utterances, together, strict=True):
        assert off(audio, model.synthesize(tokens, voice)) <= AUDIO


def test_windows_with_all_context_are_close_to_the_whole(folder: Path, whole: Model) -> None:
    """Windows see all tokens of a short utterance, and differ only in the places of frames: those
    of the whole are stretched at both ends, by half a frame at most.
    """
    settings = StreamConfig(block_tokens=20, left_blocks=-1, lookahead_frames=100)
    wide = Token2Wav.load(folder, stream=settings, runtime=CPU)
    narrow = Token2Wav.load(folder, stream=replace(settings, left_blocks=0), runtime=CPU)
    voice, tokens = a_voice(wide.config, 1, 30), tokens_of(wide, 90)
    expected = spoken(whole, tokens, voice)[1]
    errors = [
        float((spoken(model, tokens, voice)[1] - expected).std() / expected.std())
        for model in (wide, narrow)
    ]
    assert errors[0] < errors[1]


@pytest.mark.parametrize("family", ["cosyvoice1", "glm4_voice"])
def test_frames_of_a_long_utterance_keep_their_times(
    family: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An utterance of several windows is not stretched, so its mel is that of a stream with the
    same windows. Two blocks stand for the 60 of a whole window.
    """
    folder = request.getfixturevalue("folder" if family == "cosyvoice1" else "glm")
    with monkeypatch.context() as patch:
        patch.setattr(cosyvoice1_package, "_WHOLE_BLOCKS", 2)
        whole = Token2Wav.load(folder, stream=WHOLE, runtime=CPU)
    config = whole.config
    assert isinstance(config, CosyVoice1Config)
    block, left, right, overlap, _ = astuple(config.whole)
    settings = StreamConfig(
        block_tokens=block,
        left_blocks=left // block,
        lookahead_frames=right,
        overlap_tokens=overlap - 1,
    )
    stream = Token2Wav.load(folder, stream=settings, runtime=CPU)
    voice = voice_of(whole, 1, 30)
    tokens = tokens_of(whole, 2 * block + block // 2)
    mel, expected = (spoken(model, tokens, voice)[1] for model in (whole, stream))
    for seam in (block, 2 * block):  # only these frames differ: they fade over other lengths
        mel[:, slice(*map(config.sizes.mel_frames, (seam, seam + overlap)))] = 0
        expected[:, slice(*map(config.sizes.mel_frames, (seam, seam + overlap)))] = 0
    assert off(mel, expected) <= MEL


def test_the_door_of_a_server_takes_voices_and_portions(model: Model) -> None:
    voice, tokens = a_voice(model.config, 1, 30), tokens_of(model, 130)
    with Door.open(model) as door:
        audio = joined(door.heard(portions(tokens, [60]), voice))
        assert off(audio, model.synthesize(tokens, voice)) <= AUDIO
        refusal = door.refusal(tokens, voice, parameters={"speed": 1.2})
    assert refusal.startswith("speed: 1.2, but this model decodes windows")


def test_steps_of_the_ode(folder: Path, model: Model) -> None:
    quick = Token2Wav.load(folder, stream=StreamConfig(steps=(4, 10)), runtime=CPU)
    voice, tokens = a_voice(model.config, 1, 30), tokens_of(model, 60)
    assert off(quick.synthesize(tokens, voice), model.synthesize(tokens, voice)) > AUDIO


def test_a_window_must_divide_a_part(folder: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"^stream\.block_tokens: 70 does not divide 30000, the tokens of a part"
    ):
        Token2Wav.load(folder, stream=StreamConfig(block_tokens=70), runtime=CPU)


@pytest.mark.parametrize(("frames", "sound"), [(51, True), (47, True), (46, False), (56, False)])
def test_frames_of_a_prompt(frames: int, sound: bool, model: Model) -> None:
    """30 tokens have 51.7 frames. A recording may have a few more or fewer."""
    voice = Voice(np.arange(30), np.zeros((frames, 80)), np.ones(192))
    if sound:
        assert len(model.synthesize(tokens_of(model, 3), voice)) == 3 * 441
        return
    with pytest.raises(
        InputError, match="expected 47 to 55 frames of 80 bands for 30 prompt tokens"
    ):
        model.synthesize(tokens_of(model, 3), voice)
    with pytest.raises(InputError, match="expected 0 frames of 80 bands for 0 prompt tokens"):
        model.synthesize(tokens_of(model, 3), replace(voice, prompt_tokens=np.zeros(0, np.int32)))


def test_the_class_of_the_flow_selects_the_family(folder: Path, tmp_path: Path) -> None:
    """The first release of CosyVoice2 has a file of the same name."""
    path = write_cosyvoice2_yaml(tmp_path, golden_of("cosyvoice2"))
    path = path.rename(path.with_name("cosyvoice.yaml"))
    with path.open("a") as file:
        file.write("# flow: was !new:cosyvoice.flow.flow.MaskedDiffWithXvec before\n")
    assert family_name(read_config(tmp_path)) == "cosyvoice2"
    assert family_name(read_config(folder)) == "cosyvoice1"


def test_planned_memory_of_a_stream(model: Model) -> None:
    """A stream keeps the state of its vocoder, tokens, and mel that fades."""
    voice, config = a_voice(model.config, 1, 30), model.config
    assert isinstance(config, CosyVoice1Config)
    [decoder] = model.pipeline.stages.values()
    with model.stream(voice) as stream:
        stream.push(tokens_of(model, 180))
        [state] = decoder._streams.values()
        kept = state.past.nbytes + state.tail.nbytes + decoder._vocoder.store.slot_bytes  # type: ignore[attr-defined]
    assert kept == pytest.approx(config.stream_bytes, rel=0.02)

"""Early audio of DAC, the Higgs Audio tokenizer and SNAC, and the files of a folder of DAC."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from testkit.models.codec_models import CODECS, drawn_tokens
from testkit.models.dac_model import write_dac, write_descript
from testkit.models.family_golden import FamilyGolden
from testkit.utterances import chunks_of, joined, off, portions
from token2wav import ConfigError, RuntimeConfig, StreamConfig, Token2Wav
from token2wav.assembly import check_folder
from token2wav.published.registry import read_config
from token2wav.stages.stage import FrameChunk
from token2wav.stages.waveform import WaveformStage, likely_pieces

# Of the spread of the audio. Sums are in another order than in the public code.
PARITY = 1e-5
CPU = RuntimeConfig(device="cpu")
EXACT = StreamConfig(lookahead_frames=0)
# Codecs that can send audio early. SNAC with attention never does.
EARLY_AUDIO = ("dac", "dac_of_descript", "higgs", "snac")


@pytest.fixture(
    scope="module",
    params=[(name, size) for name in EARLY_AUDIO for size in ("tiny", "small")],
    ids="-".join,
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    name, size = request.param
    return CODECS[name].write(tmp_path_factory.mktemp(name), FamilyGolden(name, size))


@pytest.fixture(scope="module")
def model(folder: Path) -> Token2Wav:
    return Token2Wav.load(folder, stream=EXACT, runtime=CPU)


@pytest.mark.parametrize("prepared", [False, True], ids=["own lengths", "prepared lengths"])
@pytest.mark.parametrize("held", [0, 1, 3])
def test_stages_with_any_number_of_frames_held_back(
    model: Token2Wav, held: int, prepared: bool
) -> None:
    """Two streams run side by side. Their first chunks are shorter than the reach of the decoder.

    With the whole reach held back, a stream equals the whole. Early audio differs, but not the
    audio after it.
    """
    [decoder] = model.pipeline.stages.values()
    network = decoder._frames._net  # type: ignore[attr-defined]
    reach, samples = network.lookahead_frames, network.frame_samples
    assert reach == model.config.reach_frames  # type: ignore[attr-defined]
    shapes = likely_pieces(network, model.config, (4, 16), 2) if prepared else []
    stage = WaveformStage(network, None, shapes=shapes, lookahead_frames=held)
    stops = [(2, 5, 6, reach + 6, reach + 22, reach + 30), (1, 3, 8, 9, reach + 9, reach + 15)]
    codes = [torch.from_numpy(drawn_tokens(model.config, row[-1])).T for row in stops]
    handles = [stage.open() for _ in codes]
    audio: list[list[torch.Tensor]] = [[] for _ in codes]
    for turn, ends in enumerate(zip(*stops, strict=True)):
        starts = [row[turn - 1] if turn else 0 for row in stops]
        batch = [
            (handle, FrameChunk(frames[:, start:stop], stop == frames.shape[1]))
            for handle, frames, start, stop in zip(handles, codes, starts, ends, strict=True)
        ]
        for parts, stop, new in zip(audio, ends, stage.advance(batch), strict=True):
            parts.append(new)
            if held and turn < len(stops[0]) - 1:
                assert sum(map(len, parts)) == max(0, stop - held) * samples
    for handle in handles:
        stage.close(handle)
    assert stage.open_streams == stage.store.used == 0
    for frames, row, parts in zip(codes, stops, audio, strict=True):
        whole, sent = stage.whole(frames), torch.cat(parts)
        assert sent.shape == whole.shape
        exact = (row[-2] - held) * samples if held else 0  # since the last extrapolated sample
        assert off(sent[exact:], whole[exact:]) <= PARITY * float(whole.std())
        assert not held or off(sent, whole) > PARITY * float(whole.std())


def test_early_audio_is_exact_if_later_tokens_have_arrived(folder: Path) -> None:
    """So an utterance that is known as a whole is exact, with any number of frames held back."""
    model = Token2Wav.load(folder, stream=StreamConfig(lookahead_frames=2), runtime=CPU)
    [decoder] = model.pipeline.stages.values()
    first, longest = model.config.hops(StreamConfig(lookahead_frames=2))
    for count in (first + 1, 3 * first + 2, 7 * first, first + longest):
        tokens = drawn_tokens(model.config, count)
        whole = decoder.whole(tokens).numpy()  # type: ignore[attr-defined]
        assert off(model.synthesize(tokens), whole) <= PARITY * whole.std()
    slow = joined(chunks_of(model, portions(tokens, [1])))
    assert off(slow, whole) > PARITY * whole.std()


def test_files_of_a_folder(tmp_path: Path) -> None:
    """The package also names its files by sample rate. A folder of `transformers` may have one."""
    golden = FamilyGolden("dac_of_descript", "tiny")
    renamed = write_descript(tmp_path, golden) / "weights.pth"
    other = renamed.rename(tmp_path / "weights_44khz_8kbps_0.0.1.pth")
    assert read_config(tmp_path).sample_rate == golden.sizes["sample_rate"]
    check_folder(tmp_path)
    renamed.touch()
    with pytest.raises(ConfigError, match=r"2 files of weights, expected one: weights\.pth, "):
        read_config(tmp_path)
    renamed.unlink()
    write_dac(tmp_path, FamilyGolden("dac", "tiny"))
    assert other.is_file()
    assert read_config(tmp_path).sample_rate == 2400

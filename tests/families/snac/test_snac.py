"""SNAC in the library: the order of codes, and noise."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from testkit.models.family_golden import FamilyGolden
from testkit.models.snac_model import SNAC_24KHZ, config_of, write_snac
from testkit.utterances import off
from token2wav import InputError, RuntimeConfig, StreamConfig, Token2Wav, UtteranceOptions
from token2wav.stages.stage import FrameChunk, StreamOptions
from token2wav.stages.waveform import WaveformStage, likely_pieces

PARITY = 1e-5  # of the spread of the audio


@pytest.mark.parametrize("size", ["tiny", "small"])
def test_noise_that_is_turned_off(size: str, tmp_path: Path) -> None:
    golden = FamilyGolden("snac", size)
    folder, cpu = write_snac(tmp_path, golden), RuntimeConfig(device="cpu")
    codes, expected = golden["codes"].numpy(), golden["audio_without_noise"].numpy()
    silent = StreamConfig(lookahead_frames=0, decoder_noise=False)
    audio = Token2Wav.load(folder, stream=silent, runtime=cpu).synthesize(codes)
    assert off(audio, expected) <= PARITY * expected.std()
    has_noise = not torch.equal(golden["audio"], golden["audio_without_noise"])
    assert has_noise == golden.sizes["noise"]
    model = Token2Wav.load(folder, stream=StreamConfig(lookahead_frames=0), runtime=cpu)
    if not has_noise:
        with pytest.raises(InputError, match="decoder_noise: given, but the decoder of this model"):
            model.stream(options=UtteranceOptions(decoder_noise=True))
        return
    assert (
        off(model.synthesize(codes, options=UtteranceOptions(decoder_noise=False)), expected)
        <= PARITY * expected.std()
    )
    noisy = golden["audio"].numpy()
    heard = Token2Wav.load(folder, stream=silent, runtime=cpu).synthesize(
        codes, options=UtteranceOptions(decoder_noise=True)
    )
    assert off(heard, noisy) <= PARITY * noisy.std()


@pytest.mark.parametrize("prepared", [False, True], ids=["own lengths", "prepared lengths"])
@pytest.mark.parametrize("held", [0, 1])
def test_streams_of_a_batch_with_and_without_noise(
    held: int, prepared: bool, tmp_path: Path
) -> None:
    """Each stream of a batch gets its own noise, in all pieces: the first, inner ones, the last,
    and extrapolated ones.
    """
    golden = FamilyGolden("snac", "tiny")
    model = Token2Wav.load(write_snac(tmp_path, golden), runtime=RuntimeConfig(device="cpu"))
    [decoder] = model.pipeline.stages.values()
    network = decoder._frames._net  # type: ignore[attr-defined]
    shapes = likely_pieces(network, model.config, (4, 16), 2) if prepared else []
    frames = golden["codes"].T  # (codes, 24)
    audio = []
    for switches in ((True,), (False,), (True, False)):
        stage = WaveformStage(network, shapes=shapes, lookahead_frames=held)
        options = [StreamOptions(decoder_noise=switch) for switch in switches]
        handles = [stage.open(options=chosen) for chosen in options]
        parts = [list[torch.Tensor]() for _ in switches]
        for start, stop in ((0, 14), (14, 22), (22, 24)):
            chunk = FrameChunk(frames[:, start:stop], stop == 24)
            results = stage.advance([(handle, chunk) for handle in handles])
            for pieces, new in zip(parts, results, strict=True):
                pieces.append(new)
        audio += [torch.cat(pieces) for pieces in parts]
    noisy, silent, *together = audio
    if not held:
        assert off(noisy, golden["audio"]) <= PARITY * float(noisy.std())
        assert off(silent, golden["audio_without_noise"]) <= PARITY * float(noisy.std())
    for alone, in_batch in zip((noisy, silent), together, strict=True):
        assert off(in_batch, alone) <= PARITY * float(noisy.std())


def test_the_order_of_codes(tmp_path: Path) -> None:
    places = config_of(tmp_path, SNAC_24KHZ).sizes.code_places()
    assert places == [[0, 0, 0, 0], [1, 1, 4, 4], [2, 3, 5, 6]]
    config = config_of(tmp_path, {**SNAC_24KHZ, "vq_strides": [8, 4, 2, 1]})
    places = config.sizes.code_places()
    assert config.tokens.shape == (15,)
    assert places[0] == [0] * 8
    assert places[1] == [1] * 4 + [8] * 4
    assert places[2] == [2, 2, 5, 5, 9, 9, 12, 12]
    assert places[3] == [3, 4, 6, 7, 10, 11, 13, 14]

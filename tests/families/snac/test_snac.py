"""SNAC in the library: the order of codes, noise, and folders that are refused. Early audio of SNAC
is tested in `tests/families/dac/test_dac.py`, because SNAC has the decoder of DAC.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from testkit.models.family_golden import FamilyGolden
from testkit.models.snac_model import SNAC_24KHZ, config_of, published_weights, write_snac
from testkit.utterances import off
from token2wav import (
    CheckpointError,
    ConfigError,
    InputError,
    RuntimeConfig,
    StreamConfig,
    Token2Wav,
    UtteranceOptions,
)
from token2wav.assembly import check_folder, family_for
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


def test_published_sizes(tmp_path: Path) -> None:
    config = config_of(tmp_path, SNAC_24KHZ)
    with torch.device("meta"):
        network: Any = family_for(config).network(config, "decoder")
    assert config.tokens.shape == (7,)
    assert config.samples_per_token == network.frame_samples == 2048
    assert config.token_frame_rate == pytest.approx(11.72, abs=0.01)
    assert network.output_delay == 4757
    assert network.missing_samples == 0
    assert network.lookahead_frames == config.reach_frames == 3
    assert config.withheld_frames(StreamConfig()) == 2
    assert config.hops(StreamConfig()) == (3, 16)
    assert config.hops(StreamConfig(lookahead_frames=0)) == (4, 16)
    assert config.sizes.code_places() == [[0, 0, 0, 0], [1, 1, 4, 4], [2, 3, 5, 6]]
    parameters = sum(weight.numel() for weight in network.parameters())
    assert parameters == 13_121_025


def test_the_order_of_the_codes_of_four_codebooks(tmp_path: Path) -> None:
    config = config_of(tmp_path, {**SNAC_24KHZ, "vq_strides": [8, 4, 2, 1]})
    places = config.sizes.code_places()
    assert config.tokens.shape == (15,)
    assert places[0] == [0] * 8
    assert places[1] == [1] * 4 + [8] * 4
    assert places[2] == [2, 2, 5, 5, 9, 9, 12, 12]
    assert places[3] == [3, 4, 6, 7, 10, 11, 13, 14]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("vq_strides", [], "vq_strides: empty"),
        ("vq_strides", [4, 3, 1], "vq_strides: 4 is no multiple of 3"),
        ("vq_strides", [1, 2], "vq_strides: 1 is no multiple of 2"),
        ("vq_strides", [64, 1], "vq_strides: 65 codes for each token; at most 64"),
        ("vq_strides", [4, 0], "is not between 1 and 64"),
        ("vq_strides", 4, "vq_strides: expected"),
        ("decoder_rates", [5, 5], "25 samples for each frame, but"),
        ("decoder_dim", 36, "36 cannot be halved 4 times"),
        ("decoder_rates", [2, 10**9], "is not between 1 and 4096"),
        ("codebook_size", 0, "is not between 1 and"),
        ("noise", "yes", "noise: expected"),
        ("sampling_rate", 10**9, "is not between 1 and 768000"),
        ("sampling_rate", 1, "tokens per second: .* is not between 0.01 and 1000"),
    ],
)
def test_values_that_are_refused(key: str, value: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"config.json: .*{message}"):
        config_of(tmp_path, {**SNAC_24KHZ, key: value})


def test_weights_that_are_refused_and_weights_that_are_not_read(tmp_path: Path) -> None:
    write_snac(tmp_path, FamilyGolden("snac", "tiny"))
    path = tmp_path / "pytorch_model.bin"
    weights = published_weights(tmp_path)
    unread = {
        "encoder.block.0.bias": torch.full((2,), torch.nan),
        "quantizer.quantizers.0.in_proj.parametrizations.weight.original0": torch.ones(1),
    }
    torch.save(weights | unread, path)
    check_folder(tmp_path)
    noise = "decoder.model.2.block.2.linear.parametrizations.weight.original1"
    assert noise in weights
    for name, value, message in (
        ("quantizer.quantizers.1.out_proj.bias", None, "codebook 1 lacks out_proj.bias"),
        (noise, None, r"missing: decoder\.block\.0\.noise\.linear\.weight"),
        ("decoder.model.0.bias", torch.ones(3), r"wrongly shaped: decoder\.conv0\.bias \(3,\)"),
        ("decoder.model.77.bias", torch.ones(1), r"unexpected: decoder\.model\.77\.bias"),
        ("decoder.model.1.bias", Path("/"), "nothing was executed"),
    ):
        changed = {other: tensor for other, tensor in weights.items() if other != name}
        torch.save(changed if value is None else changed | {name: value}, path)
        with pytest.raises(CheckpointError, match=message):
            check_folder(tmp_path)
    path.unlink()
    with pytest.raises(
        CheckpointError, match=r"contains none of model\.safetensors, pytorch_model\.bin"
    ):
        check_folder(tmp_path)

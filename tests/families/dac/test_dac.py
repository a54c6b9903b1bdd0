"""DAC, the Higgs Audio tokenizer and SNAC in the library: early audio, published sizes, and folders
of DAC that are refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from testkit.models.codec_models import CODECS, drawn_tokens
from testkit.models.dac_model import (
    descript_content,
    document,
    published_weights,
    write_dac,
    write_descript,
)
from testkit.models.family_golden import FamilyGolden
from testkit.utterances import chunks_of, joined, off, portions
from token2wav import CheckpointError, ConfigError, RuntimeConfig, StreamConfig, Token2Wav
from token2wav.assembly import check_folder, family_for
from token2wav.families.registry import read_config
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


PUBLISHED: dict[str, tuple[dict[str, Any], tuple[Any, ...]]] = {
    # token rate, codebooks, samples missing and held back; frames: reach, held, block, hops
    "dac 44.1 kHz": ({"sampling_rate": 44100}, (44100 / 512, 9, 0, 4757, 10, 0, 4, (16, 128))),
    "dac 24 kHz": (
        {"sampling_rate": 24000, "downsampling_ratios": [2, 4, 5, 8], "n_codebooks": 32},
        (75, 32, 8, 3141, 10, 8, 3, (12, 96)),
    ),
    "dac 16 kHz": (
        {"sampling_rate": 16000, "downsampling_ratios": [2, 4, 5, 8], "n_codebooks": 12},
        (50, 12, 8, 3141, 10, 8, 2, (10, 64)),
    ),
    "higgs": (
        {
            "target_bandwidths": [0.5, 1, 1.5, 2],
            "acoustic_model_config": {
                "downsampling_ratios": [8, 5, 4, 2, 3],
                "upsampling_ratios": [8, 5, 4, 2, 3],
            },
        },
        (25, 8, 0, 9458, 10, 7, 1, (8, 32)),
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name: str, tmp_path: Path) -> None:
    sizes, expected = PUBLISHED[name]
    content = document(sizes, name.split()[0])
    (tmp_path / "config.json").write_text(json.dumps(content))
    config: Any = read_config(tmp_path)
    with torch.device("meta"):
        network: Any = family_for(config).network(config, "decoder")
    assert network.missing_samples == config.missing_samples
    assert network.lookahead_frames == config.reach_frames
    geometry = (
        *(config.token_frame_rate, *config.tokens.shape, config.missing_samples),
        *(network.output_delay, config.reach_frames, config.withheld_frames(StreamConfig())),
        *(config.block_tokens, config.hops(StreamConfig())),
    )
    assert geometry == expected
    assert config.withheld_frames(EXACT) == 0
    # the first packet, and the longest one
    held = config.withheld_frames(StreamConfig()) or config.reach_frames
    first, longest = config.hops(StreamConfig())
    assert 0.039 < (first - held) / config.token_frame_rate < 0.08
    assert 1.2 < longest / config.token_frame_rate < 1.5


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("downsampling_ratios", [], "empty; at least 1"),
        ("downsampling_ratios", [2, 10**9], "is not between 1 and 4096"),
        ("upsampling_ratios", [5, 5], "25 samples for each frame, but downsampling_ratios give 24"),
        ("decoder_hidden_size", 12, "12 cannot be halved 3 times"),
        ("decoder_hidden_size", "32", "expected int"),
        ("encoder_hidden_size", 1 << 16, "524288 channels of the latents; at most 65536"),
        ("hidden_size", 10**9, "is not between 1 and 65536"),
        ("n_codebooks", 10**9, "is not between 1 and 64"),
        ("codebook_size", 0, "is not between 1 and"),
        ("codebook_dim", [4, 4], "expected int"),
        ("sampling_rate", 768_000, "frames per second: 32000.0 is not between 0.01 and 1000"),
    ],
)
def test_values_that_are_refused(key: str, value: object, message: str, tmp_path: Path) -> None:
    content = {**document(FamilyGolden("dac", "tiny").sizes), key: value}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=f"config.json: .*{message}"):
        read_config(tmp_path)


def test_weights_that_are_refused(tmp_path: Path) -> None:
    write_dac(tmp_path, FamilyGolden("dac", "tiny"))
    path = tmp_path / "model.safetensors"
    weights = published_weights(tmp_path)
    book = "quantizer.quantizers.1."
    for name, value, message in (
        (f"{book}codebook.weight", None, r"codebook 1 lacks codebook\.weight"),
        (f"{book}out_proj.bias", torch.ones(3), "out_proj.bias has different shapes"),
        ("decoder.block.0.snake1.alpha", None, r"1 missing: decoder\.block\.0\.snake1\.alpha"),
        ("decoder.conv2.bias", torch.tensor([torch.nan]), r"NaN .* in decoder\.conv2\.bias"),
        (f"decoder.model.{'9' * 5000}.bias", torch.ones(1), "1 unexpected: decoder.model.99"),
    ):
        changed = dict(weights)
        if value is None:
            del changed[name]
        else:
            changed[name] = value
        save_file(changed, path)
        with pytest.raises(CheckpointError, match=message):
            check_folder(tmp_path)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"contains none of model\.safetensors"):
        check_folder(tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("decoder_rates", [4, 10**9], "kwargs.decoder_rates.*is not between 1 and 4096"),
        ("codebook_dim", [4, 4], "kwargs.codebook_dim: expected int"),
        ("latent_dim", -1, "kwargs.latent_dim: -1 is not between 1 and 65536"),
        ("sample_rate", torch.ones(1), "kwargs.sample_rate: expected int"),
        ("n_codebooks", 1 << 70, "kwargs.n_codebooks.*is not between 1 and 64"),
        ("decoder_dim", 30, "30 cannot be halved 2 times"),
    ],
)
def test_sizes_in_a_pickle_that_are_refused(
    key: str, value: object, message: str, tmp_path: Path
) -> None:
    sizes = FamilyGolden("dac_of_descript", "tiny").sizes
    torch.save({"metadata": {"kwargs": {**sizes, key: value}}}, tmp_path / "weights.pth")
    with pytest.raises(ConfigError, match=f"weights.pth: .*{message}"):
        read_config(tmp_path)


def test_pickles_that_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights.pth"
    sizes = FamilyGolden("dac_of_descript", "tiny").sizes
    content = descript_content(tmp_path, sizes)
    for saved, error, message in (
        ({"metadata": Path("/")}, CheckpointError, "nothing was executed"),
        ({"state_dict": {}}, ConfigError, "metadata.kwargs: expected a mapping"),
        ({"metadata": {"kwargs": 3}}, ConfigError, "metadata.kwargs: expected a mapping"),
        (content | {"state_dict": [1]}, CheckpointError, "no weight is named quantizer"),
        (content | {"state_dict": {"decoder.x": 1}}, CheckpointError, "is a int, not a tensor"),
        (content | {"state_dict": {}}, CheckpointError, "no weight is named quantizer"),
    ):
        torch.save(saved, path)
        with pytest.raises(error, match=message):
            check_folder(tmp_path)
    path.write_bytes(b"no pickle")
    with pytest.raises(CheckpointError, match=r"nothing was executed|cannot be read"):
        check_folder(tmp_path)


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

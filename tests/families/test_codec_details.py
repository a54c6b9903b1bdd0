"""What is special to a codec. `test_codec_contract.py` tests what all codecs have in common."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from testkit.models.codec_models import CODECS, drawn_tokens
from testkit.models.family_golden import FamilyGolden
from testkit.models.folder_edits import set_weights
from testkit.models.folders import write_folder
from testkit.models.published_codecs import FURTHER, PUBLISHED
from testkit.utterances import joined, off
from token2wav import ConfigError, InputError, RuntimeConfig, StreamConfig, Token2Wav
from token2wav.assembly import check_folder, family_for, load_network
from token2wav.families.nanocodec.network import HalfSnake
from token2wav.published.registry import read_config
from token2wav.serving.options import UtteranceOptions
from token2wav.stages.stage import FrameChunk, StreamOptions, as_frames
from token2wav.stages.waveform import WaveformStage, likely_pieces

PARITY = 1e-5  # of the spread of the audio
CPU = RuntimeConfig(device="cpu")
EXACT = StreamConfig(lookahead_frames=0)


def network_of(model: Token2Wav) -> Any:
    [decoder] = model.pipeline.stages.values()
    return decoder._net  # type: ignore[attr-defined]


def config_of(name: str, folder: Path, sizes: dict[str, Any]) -> Any:
    """Returns the configuration of a codec with other sizes."""
    return read_config(CODECS[name].write_document(folder, sizes))


def test_files_of_dac(tmp_path: Path) -> None:
    """The package also names its files by sample rate. A folder of `transformers` may have one."""
    renamed = write_folder("dac_of_descript", tmp_path) / "weights.pth"
    renamed.rename(other := tmp_path / "weights_44khz_8kbps_0.0.1.pth")
    rate = FamilyGolden("dac_of_descript", "tiny").sizes["sample_rate"]
    assert read_config(tmp_path).sample_rate == rate
    check_folder(tmp_path)
    write_folder("dac", tmp_path)
    assert other.is_file()
    assert read_config(tmp_path).sample_rate == 2400


@pytest.mark.parametrize("size", ["tiny", "small"])
def test_noise_of_snac_that_is_turned_off(size: str, tmp_path: Path) -> None:
    golden = FamilyGolden("snac", size)
    folder = write_folder("snac", tmp_path, size)
    codes, expected = golden["codes"].numpy(), golden["audio_without_noise"].numpy()
    silent = StreamConfig(lookahead_frames=0, decoder_noise=False)
    quiet, noisy = (Token2Wav.load(folder, stream=each, runtime=CPU) for each in (silent, EXACT))
    assert off(quiet.synthesize(codes), expected) <= PARITY * expected.std()
    if torch.equal(golden["audio"], golden["audio_without_noise"]):
        assert not golden.sizes["noise"]
        with pytest.raises(InputError, match="decoder_noise: given, but the decoder of this model"):
            noisy.stream(options=UtteranceOptions(decoder_noise=True))
        return
    for model, switch, name in (
        (noisy, False, "audio_without_noise"),
        (quiet, True, "audio"),
    ):
        expected = golden[name].numpy()
        audio = model.synthesize(codes, options=UtteranceOptions(decoder_noise=switch))
        assert off(audio, expected) <= PARITY * expected.std()


@pytest.mark.parametrize("prepared", [False, True], ids=["own lengths", "prepared lengths"])
@pytest.mark.parametrize("held", [0, 1])
def test_streams_of_a_batch_with_and_without_noise(
    held: int, prepared: bool, tmp_path: Path
) -> None:
    """Each stream of a batch gets its own noise, in all pieces: the first, inner ones, the last,
    and extrapolated ones.
    """
    golden = FamilyGolden("snac", "tiny")
    model = Token2Wav.load(write_folder("snac", tmp_path), runtime=CPU)
    network = network_of(model)
    shapes = likely_pieces(network, model.config, (4, 16), 2) if prepared else []
    frames = golden["codes"].T  # (codes, 24)
    audio = []
    for switches in ((True,), (False,), (True, False)):
        stage = WaveformStage(network, shapes=shapes, lookahead_frames=held)
        handles = [stage.open(options=StreamOptions(decoder_noise=switch)) for switch in switches]
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


def test_windows_of_snac(tmp_path: Path) -> None:
    """Chunks end one token after a window of 4 tokens. A step has whole windows."""
    config = config_of("snac_attention", tmp_path, PUBLISHED["SNAC 44.1 kHz"])
    with torch.device("meta"):
        network: Any = family_for(config).network(config, "decoder")
    layer = network.decoder.attention
    assert (config.block_tokens, config.tokens_past_window) == (4, 1)
    assert config.grid(0).first_boundary == 1
    assert (layer.heads, layer.window) == (24, 32)
    model = Token2Wav.load(write_folder("snac_attention", tmp_path), runtime=CPU)
    stage = WaveformStage(network_of(model))
    frames = torch.from_numpy(drawn_tokens(model.config, 12)).T
    with pytest.raises(ValueError, match="step of 48 latents: it ends inside a window of 8"):
        stage.advance([(stage.open(), FrameChunk(frames, False))])
    with pytest.raises(
        ConfigError, match=r"stream\.lookahead_frames: 1, expected 0; this model holds"
    ):
        Token2Wav.load(tmp_path, stream=StreamConfig(lookahead_frames=1))


def test_windows_of_moss(tmp_path: Path) -> None:
    """Version 2 has windows of its own for some transformers."""
    for name, windows in (
        ("MOSS with null", {0: 125, 2: 250, 4: 500, 6: 1000}),
        ("MOSS 2", {0: 125, 2: 250, 4: 400, 6: 400, 8: 400, 10: 400}),
    ):
        (tmp_path / "config.json").write_text(json.dumps(FURTHER[name]["document"]))
        config: Any = read_config(tmp_path)
        assert dict(config.sizes.windows()) == windows


def test_the_activation_of_nanocodec_can_be_trained() -> None:
    layer, x = HalfSnake(5), torch.randn(2, 5, 7, requires_grad=True)
    trained = layer(x)
    trained.sum().backward()
    assert layer.alpha.grad is not None
    assert x.grad is not None
    with torch.no_grad():
        layer.freeze()
        torch.testing.assert_close(layer(x), trained)


def test_an_entry_of_mimi_without_any_use_is_finite(tmp_path: Path) -> None:
    """Files store sums of vectors and their number; the entry is the quotient."""
    book = "quantizer.acoustic_residual_vector_quantizer.layers.1.codebook"
    folder = write_folder("mimi", tmp_path)
    uses = load_file(folder / "model.safetensors")[f"{book}.cluster_usage"]
    set_weights("model.safetensors", {f"{book}.cluster_usage": torch.zeros_like(uses)})(folder)
    check_folder(folder)


def test_latents_of_vibevoice_are_scaled_by_the_factors_of_the_folder(tmp_path: Path) -> None:
    """The public code divides by the scale, and then subtracts the bias."""
    golden = FamilyGolden("vibevoice", "tiny")
    factors = {"scaling": 0.25, "bias": -0.5}
    tensors = {f"model.latent_{name}_factor": torch.tensor(it) for name, it in factors.items()}
    write_folder("vibevoice_of_transformers", tmp_path)
    set_weights("model.safetensors", tensors)(tmp_path)
    model, expected = Token2Wav.load(tmp_path, runtime=CPU), golden["audio"].numpy()
    scaled = 0.25 * (golden["latents"].numpy() - 0.5)
    assert off(model.synthesize(scaled), expected) <= 2 * PARITY * expected.std()


# A whole model whose decoder is a small part of one file: its language model has 256 MB in
# bfloat16, the decoder 40 MB in float32.
LARGE = {"num_filters": 128, "downsampling_ratios": [2, 2, 2], "depths": [1, 1, 1, 4]}
PEAK = """
import resource, sys
from pathlib import Path
from token2wav.assembly import load_network
from token2wav.published.registry import read_config

folder = Path(sys.argv[1])
config = read_config(folder)
peak = lambda: next(
    int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")
)
before = peak()
network = load_network(folder, config, "decoder")
weights = sum(value.numel() * 4 for value in network.parameters()) // 1024
print(peak() - before, weights)
"""


def test_only_the_decoder_is_read(tmp_path: Path) -> None:
    """Loading takes the memory of the decoder in float32, and at most 200 MB more."""
    sizes = {**FamilyGolden("vibevoice", "tiny").sizes, **LARGE}
    CODECS["vibevoice"].write(tmp_path, sizes)
    weights = load_file(tmp_path / "model.safetensors")
    halves = {name: value.bfloat16() for name, value in weights.items()}
    halves["model.language_model.weight"] = torch.ones(1 << 27, dtype=torch.bfloat16)
    save_file(halves, tmp_path / "model.safetensors")
    command = [sys.executable, "-c", PEAK, str(tmp_path)]
    grown, size = map(int, subprocess.check_output(command, text=True).split())
    assert size > 20_000
    assert grown <= size + 200_000  # KB


@pytest.mark.parametrize(
    ("rate", "row"), [(16_000, 0), (20_000, 0), (20_001, 1), (40_000, 2), (48_000, 3)]
)
def test_the_rate_of_voxcpm_selects_a_scale_and_a_bias(rate: int, row: int, tmp_path: Path) -> None:
    sizes = {"decoder_dim": 64, "decoder_rates": [32, 32], "encoder_rates": [1024]}
    sizes = {**PUBLISHED["VoxCPM2"], **sizes, "sample_rate": rate, "out_sample_rate": rate}
    CODECS["voxcpm"].write(tmp_path, sizes)
    weights = torch.load(tmp_path / "audiovae.pth")["state_dict"]
    network: Any = load_network(tmp_path, read_config(tmp_path), "decoder")
    for layer, block in enumerate(network.decoder.block, 2):
        for kind, parameter in (("scale", block.scale.weight), ("bias", block.scale.bias)):
            published = weights[f"decoder.sr_cond_model.{layer}.{kind}_embed.weight"]
            assert torch.equal(parameter, published[row])


@pytest.mark.parametrize("boundaries", [None, []])
def test_voxcpm2_without_boundaries(boundaries: Any, tmp_path: Path) -> None:
    """Null is a decoder without scales, and an empty list is one range."""
    sizes = {**FamilyGolden("voxcpm", "tiny").sizes, "sr_bin_boundaries": boundaries}
    config = config_of("voxcpm", tmp_path, sizes)
    network: Any = family_for(config).network(config, "decoder")
    assert hasattr(network.decoder.block[0], "scale") == (boundaries is not None)
    assert config.sizes.rate_range == 0


def test_the_older_vae_of_voxcpm_has_no_settings_of_the_newer_one(tmp_path: Path) -> None:
    """Its public code skips them."""
    older = FURTHER["VoxCPM1.5"]["document"]["audio_vae_config"]
    sizes = {**older, "sr_bin_boundaries": [20_000]}
    assert config_of("voxcpm", tmp_path, sizes).sizes.sr_bin_boundaries is None


def test_the_past_of_audex_has_a_limit_or_a_window(tmp_path: Path) -> None:
    """Without a window, a longer utterance is refused before it is decoded; a window allows any.

    The stream goes on after the refusal. Tokens after an end by equal tokens do not count.
    """
    folder = write_folder("audex", tmp_path)
    model = Token2Wav.load(folder, runtime=CPU)
    tokens = drawn_tokens(model.config, 2049)
    with model.stream() as stream:
        chunks = stream.push(tokens[:2047])
        for call in (stream.push, stream.finish):
            with pytest.raises(InputError, match="the utterance would exceed 2048, whose atten"):
                call(tokens[2047:])
        chunks += stream.finish(tokens[2047:2048])
    assert len(joined(chunks)) == 2048 * model.config.samples_per_token
    equal = tokens[:1].repeat(2049, axis=0)
    ended = model.synthesize(equal, options=UtteranceOptions(end_after_repeats=9))
    assert len(ended) == 9 * model.config.samples_per_token
    bounded = Token2Wav.load(folder, stream=StreamConfig(left_blocks=3), runtime=CPU)
    audio = bounded.synthesize(tokens)
    [decoder] = bounded.pipeline.stages.values()
    whole = decoder.whole(as_frames(tokens)).numpy()  # type: ignore[attr-defined]
    assert off(audio, whole) <= PARITY * whole.std()
    # 8 positions, of which each of the two layers sees 7 before its own
    sees_all = model.synthesize(tokens[:40])
    samples = model.config.samples_per_token
    assert off(audio[: 8 * samples], sees_all[: 8 * samples]) <= PARITY * whole.std()
    assert off(audio[20 * samples : 36 * samples], sees_all[20 * samples : 36 * samples]) > 0.01

"""Every stage from mel to audio against the public implementation."""

from __future__ import annotations

import pytest
import torch

from testkit.models.golden import GoldenSet, snr_db
from testkit.utterances import off
from tests.families.cosyvoice3 import tolerances
from token2wav.networks.hift import HiFT
from token2wav.networks.noise import FlowNoise, SourceNoise
from token2wav.networks.source import F0_LOOKAHEAD

Noises = tuple[FlowNoise, SourceNoise]


def on_device(hift: HiFT, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(hift.device)


@pytest.fixture
def reference_phase(device: torch.device) -> None:
    """Skips tests of the reference phase on a GPU.

    The public code sums phases in float32. Its rounding errors depend on the order of the sum,
    which differs on a GPU. The exact phase is tested everywhere.
    """
    if device.type == "cuda":
        pytest.skip("a GPU rounds the reference phase in another way")


def test_f0(golden: GoldenSet, hift: HiFT) -> None:
    mel = on_device(hift, golden["hift.in.mel"])
    assert off(hift.f0_predictor(mel), golden["hift.finalize.f0"]) <= tolerances.F0_HZ
    assert (
        off(hift.f0_predictor(mel)[:, :-F0_LOOKAHEAD], golden["hift.nofinalize.f0"])
        <= tolerances.F0_HZ
    )
    whole = torch.cat([golden.chunk(index, "mel") for index in range(len(golden.chunks))], dim=1)
    assert off(
        hift.f0_predictor(on_device(hift, whole[None])), golden["hift.full.f0_of_chunked_mel"]
    ) <= (tolerances.F0_HZ)


@pytest.mark.usefixtures("reference_phase")
def test_source_with_the_reference_phase(golden: GoldenSet, hift: HiFT, noises: Noises) -> None:
    for ending in ("finalize", "nofinalize"):
        f0, reference = on_device(hift, golden[f"hift.{ending}.f0"]), golden[f"hift.{ending}.s"]
        noise = hift.m_source.merged(on_device(hift, noises[1].window(0, reference.shape[2])))
        assert off(hift.m_source(f0, noise, "reference"), reference) <= tolerances.SOURCE


@pytest.mark.usefixtures("reference_phase")
def test_sines_and_noise_before_they_are_merged(
    golden: GoldenSet, hift: HiFT, noises: Noises
) -> None:
    f0, reference = (
        on_device(hift, golden["hift.finalize.f0"]),
        golden["hift.finalize.sines_first_2400"],
    )
    sine, amplitude, _ = hift.m_source.frames(f0, "reference")
    samples = [
        value.repeat_interleave(hift.config.samples_per_frame, dim=1)[:, :2400]
        for value in (sine, amplitude)
    ]
    noise = on_device(hift, noises[1].window(0, 2400))
    assert off(samples[0] + samples[1][..., None] * noise, reference) <= tolerances.SOURCE


def test_exact_phase_is_the_phase_that_the_reference_rounds(
    golden: GoldenSet, hift: HiFT, noises: Noises
) -> None:
    mel = on_device(hift, golden["flow.mel.streaming"])
    reference = golden["hift.full.audio_of_streaming_mel"].numpy()
    assert (
        snr_db(hift.vocode(mel, noises[1], phase="exact").cpu().numpy(), reference)
        > tolerances.SNR_DB
    )


def test_spectrum_of_the_source(golden: GoldenSet, hift: HiFT) -> None:
    spectrum = hift.stft(on_device(hift, golden["hift.finalize.s"]))
    assert (
        off(spectrum[..., :600], golden["hift.finalize.s_stft_first_600"]) <= tolerances.SOURCE * 16
    )


def test_decoder_stages(golden: GoldenSet, hift: HiFT) -> None:
    prefix = "hift.finalize.stage."
    names = {key.removeprefix(prefix) for key in golden.tensors if key.startswith(prefix)}
    outputs: dict[str, torch.Tensor] = {}
    hooks = []
    for name in names:
        module = hift.get_submodule(name.removesuffix("_first_1200"))
        hooks.append(
            module.register_forward_hook(
                lambda _m, _i, output, name=name: outputs.update({name: output.clone()})
            )
        )
    hift.decode(on_device(hift, golden["hift.in.mel"]), on_device(hift, golden["hift.finalize.s"]))
    for hook in hooks:
        hook.remove()
    assert len(outputs) == 11
    for name, output in outputs.items():
        reference = golden[prefix + name]
        assert off(output[..., : reference.shape[2]], reference) <= tolerances.VOCODER_STAGE, name


@pytest.mark.usefixtures("reference_phase")
def test_audio_of_a_short_mel(golden: GoldenSet, hift: HiFT, noises: Noises) -> None:
    mel = on_device(hift, golden["hift.in.mel"])
    final = hift.vocode(mel, noises[1], final=True, phase="reference")
    assert off(final, golden["hift.finalize.audio"]) <= tolerances.AUDIO
    reference = golden["hift.nofinalize.audio"]
    unfinished = hift.vocode(mel, noises[1], final=False, phase="reference")
    # less is held back than in the public code
    assert unfinished.shape[1] == reference.shape[1] + 8 * 480 - hift.output_delay
    assert off(unfinished[:, : reference.shape[1]], reference) <= tolerances.AUDIO


@pytest.mark.usefixtures("reference_phase")
def test_audio_of_a_whole_utterance(golden: GoldenSet, hift: HiFT, noises: Noises) -> None:
    audio = hift.vocode(on_device(hift, golden["flow.mel.streaming"]), noises[1], phase="reference")
    assert off(audio, golden["hift.full.audio_of_streaming_mel"]) <= tolerances.AUDIO

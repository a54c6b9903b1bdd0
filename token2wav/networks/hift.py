"""CosyVoice's HiFT vocoder: F0 prediction, harmonic source, upsampling network, inverse STFT.

Parameters have the names of public `hift.pt` files. Comments mark details that only follow the
public code, because checkpoints depend on them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

from token2wav.layers.combine import Mean, placed, run
from token2wav.layers.convolutions import (
    StreamConv,
    StreamConvTranspose,
    centred_conv,
    lookahead_conv,
)
from token2wav.layers.streaming import OFFLINE, ON_TIME, Delay, StreamStep, Timing
from token2wav.networks.hift_layers import (
    Analysis,
    MirroredStart,
    ResBlock,
    Synthesis,
    UpConv,
    hift_conv,
)
from token2wav.networks.noise import SourceNoise
from token2wav.networks.source import F0Predictor, HarmonicSource, Phase, SmoothSource
from token2wav.networks.waveform_network import WaveformNetwork
from token2wav.published.sizes import HiFTConfig

Decode = Callable[[torch.Tensor, torch.Tensor, StreamStep], torch.Tensor]  # as `HiFT.decode`


class HiFT(WaveformNetwork):
    """HiFT vocoder, for whole utterances and for streams.

    Args:
        source: class for the harmonic source, if the family has one of its own.
    """

    def __init__(self, config: HiFTConfig, source: type[HarmonicSource] | None = None) -> None:
        super().__init__()
        self.config = config
        self.input_channels, self.frame_samples = config.in_channels, config.samples_per_frame
        bins = config.n_fft + 2  # real and imaginary part of n_fft / 2 + 1 bins
        channels = [
            config.base_channels >> stage for stage in range(len(config.upsample_rates) + 1)
        ]
        self.f0_predictor = F0Predictor(config)
        self.m_source = (source or (HarmonicSource if config.causal else SmoothSource))(config)
        self.mel_delay, self.source_delay = Delay(config.in_channels), Delay(1)
        self.stft = Analysis(config.n_fft, config.hop_len)
        look = config.conv_pre_look_right
        self.conv_pre = weight_norm(
            lookahead_conv(config.in_channels, channels[0], look + 1)
            if config.causal
            else centred_conv(config.in_channels, channels[0], 2 * look + 1)
        )
        self.ups, self.source_downs, self.source_resblocks = (nn.ModuleList() for _ in range(3))
        self.resblocks = nn.ModuleList()
        # delays, without parameters
        self.spectrum_waits, self.branch_waits = nn.ModuleList(), nn.ModuleList()
        self._means: list[Mean] = []  # residual blocks of each stage
        make_up = UpConv if config.causal else StreamConvTranspose
        for stage, rate in enumerate(config.upsample_rates):
            width, kernel = channels[stage + 1], config.upsample_kernel_sizes[stage]
            self.ups.append(weight_norm(make_up(channels[stage], width, kernel, rate)))
            self.spectrum_waits.append(Delay(bins))
            stride = math.prod(config.upsample_rates[stage + 1 :])
            left = stride - 1 if config.causal else stride // 2
            self.source_downs.append(
                StreamConv(
                    bins,
                    width,
                    2 * stride if stride > 1 else 1,
                    left=left,
                    right=0 if config.causal else left,
                    stride=stride,
                )
            )
            self.source_resblocks.append(
                ResBlock(
                    width,
                    config.source_resblock_kernel_sizes[stage],
                    config.source_resblock_dilation_sizes[stage],
                    causal=config.causal,
                )
            )
            shapes = zip(config.resblock_kernel_sizes, config.resblock_dilation_sizes, strict=True)
            blocks = [ResBlock(width, *shape, causal=config.causal) for shape in shapes]
            waits = [Delay(width) for _ in blocks]
            self.resblocks.extend(blocks)
            self.branch_waits.extend(waits)
            self._means.append(Mean(blocks, waits))
        self.mirror = MirroredStart()
        self.conv_post = weight_norm(hift_conv(channels[-1], bins, 7, config.causal))
        self.istft = Synthesis(config.n_fft, config.hop_len)
        self.output = self._place()

    def _place(self) -> Timing:
        """Places all layers, and returns the audio timing.

        Mel and source are added at every stage, so both must be equally late there. The mel waits
        for whole frames before the first stage. The source waits for samples before the first
        stage, and its spectrum for windows before the others.
        """
        source = self.m_source.place(self.f0_predictor.place())
        first = placed((self.conv_pre, *self._ups(0)))  # without a wait of the mel
        limit = self.stft.window.latest_input(self._spectrum_delay(0, first.delay))
        samples = self.config.samples_per_frame
        self.mel_delay.length = max(0, -((limit - source.delay) // samples))
        timing, spectrum = placed((self.mel_delay, self.conv_pre)), ON_TIME
        for stage, mean in enumerate(self._means):
            timing = placed(self._ups(stage), timing)
            target = Timing(self._spectrum_delay(stage, timing.delay))
            if stage == 0:
                latest = Timing(self.stft.window.latest_input(target.delay))
                self.source_delay.align(source, latest)
                spectrum = self.stft.place(latest)
            wait: Any = self.spectrum_waits[stage]
            wait.align(spectrum, target)
            spectrum = wait.output
            placed((self.source_downs[stage], self.source_resblocks[stage]), spectrum)
            timing = mean.place(timing)
        return placed((self.conv_post, self.istft), timing)

    def _ups(self, stage: int) -> list[nn.Module]:
        last = stage == len(self.ups) - 1
        return [self.ups[stage], self.mirror] if last else [self.ups[stage]]

    def _spectrum_delay(self, stage: int, delay: int) -> int:
        """Returns the largest delay of the spectrum that is in time for a delay in a stage."""
        down: Any = self.source_downs[stage]
        reach = placed((self.source_resblocks[stage],)).delay
        return int(down.window.latest_input(delay - reach))

    @property
    def fade_gains(self) -> torch.Tensor | None:
        """Gains of the first samples of a stream, if a family fades utterances in."""
        return None

    def freeze(self) -> None:
        """Ends loading: converts the F0 predictor to double precision, and replaces weight norms by
        plain weights.
        """
        # Converted before its weights are normalised, as in the public code.
        self.f0_predictor.double()
        for module in self.modules():
            if parametrize.is_parametrized(module, "weight"):
                parametrize.remove_parametrizations(module, "weight")
        super().freeze()

    @torch.inference_mode()
    def vocode(
        self, mel: torch.Tensor, noise: SourceNoise, *, final: bool = True, phase: Phase = "exact"
    ) -> torch.Tensor:
        """Computes the audio of a mel that starts with the utterance.

        Args:
            mel: (B, bands, T), T > `lookahead_frames` unless `final`.
            final: whether the utterance ends here. If not, the last `output_delay` samples are left
                out.

        Returns:
            (B, samples), `samples_per_frame` for every frame.
        """
        samples = mel.shape[2] * self.config.samples_per_frame
        numbers = noise.window(0, samples).to(mel.device)
        return self(mel, self.m_source.merged(numbers), phase=phase)[
            :, : samples - (0 if final else self.output_delay)
        ]

    def forward(
        self,
        mel: torch.Tensor,
        noise: torch.Tensor,
        step: StreamStep = OFFLINE,
        phase: Phase = "exact",
        decode: Decode | None = None,
    ) -> torch.Tensor:
        """Computes the audio (B, samples), late by `output_delay`, of the next mel of streams.

        Args:
            mel: (B, bands, T) next frames.
            noise: (N,) or (B, N) source noise from `HarmonicSource.merged`. In a stream it has the
                same delay as F0.
            decode: replacement of `decode` on another backend; None for torch.
        """
        source = self.m_source(self.f0_predictor(mel, step), noise, phase, step)
        return (decode or self.decode)(mel, source, step)

    def run_step(
        self, mel: torch.Tensor, noise: torch.Tensor, step: StreamStep, decode: Decode | None = None
    ) -> torch.Tensor:
        return self(mel, noise, step, decode=decode)

    def decode(
        self, mel: torch.Tensor, source: torch.Tensor, step: StreamStep = OFFLINE
    ) -> torch.Tensor:
        """Computes the audio (B, samples) of mel (B, bands, T) and excitation (B, 1, T *
        samples_per_frame).

        In a stream the excitation has the delay of `m_source`.
        """
        config = self.config
        spectrum = self.stft(self.source_delay(source, step), step)
        x = self.conv_pre(self.mel_delay(mel, step), step)
        for stage, mean in enumerate(self._means):
            x = run(self._ups(stage), F.leaky_relu(x, config.lrelu_slope), step)
            spectrum = self.spectrum_waits[stage](spectrum, step)
            x = self.source_resblocks[stage](self.source_downs[stage](spectrum, step), step).add_(x)
            x = mean(x, step)
        # The slope is 0.01 here, torch's default, not `lrelu_slope`, as in the public code.
        x = self.conv_post(F.leaky_relu(x), step)
        return self.istft(x, step).clamp(-config.audio_limit, config.audio_limit)

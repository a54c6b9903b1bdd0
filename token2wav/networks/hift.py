"""CosyVoice's HiFT vocoder: F0 prediction, harmonic source, upsampling network, inverse STFT.

The HiFT of CosyVoice3 is causal. The HiFT of earlier generations has convolutions that are centred.
Parameters have the names of public `hift.pt` files. Some details only follow the public code,
because checkpoints depend on them. Comments mark these details.
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

from token2wav.networks.configs import HiFTConfig
from token2wav.networks.hift_layers import Analysis, ResBlock, Snake, Synthesis, UpConv, hift_conv
from token2wav.networks.noise import SourceNoise
from token2wav.networks.source import F0Predictor, HarmonicSource, Phase, SmoothSource
from token2wav.networks.streaming import (
    OFFLINE,
    Delay,
    StreamConv,
    StreamConvTranspose,
    StreamStep,
    VocoderNetwork,
    centred_conv,
    lookahead_conv,
)

Decode = Callable[[torch.Tensor, torch.Tensor, StreamStep], torch.Tensor]  # as `HiFT.decode`


class HiFT(VocoderNetwork):
    """HiFT vocoder, for whole utterances and for streams.

    Args:
        config: sizes of the network.
        source: class of the harmonic source, if the family has one of its own.

    For attributes see `VocoderNetwork`.
    """

    def __init__(self, config: HiFTConfig, source: type[HarmonicSource] | None = None) -> None:
        super().__init__()
        self.config = config
        self.bands, self.frame_samples = config.in_channels, config.samples_per_frame
        bins = config.n_fft + 2  # real and imaginary part of n_fft / 2 + 1 bins
        channels = [
            config.base_channels >> stage for stage in range(len(config.upsample_rates) + 1)
        ]
        look, last_stage = config.conv_pre_look_right, len(config.upsample_rates) - 1
        self.f0_predictor = F0Predictor(config)
        source = source or (HarmonicSource if config.causal else SmoothSource)
        self.m_source = source(config, self.f0_predictor.output_delay)
        # Mel and source are added at every stage, so both need the same delay there. The earlier
        # signal is delayed: mel by whole frames, the source by samples.
        in_time = self._source_delay(self._spectrum_delay(0, self._up_delay(0, look)))
        self.mel_delay = Delay(
            config.in_channels,
            max(0, -((in_time - self.m_source.output_delay) // config.samples_per_frame)),
        )
        late = self._spectrum_delay(0, self._up_delay(0, look + self.mel_delay.length))
        self.source_delay = Delay(
            1,
            self._source_delay(late) - self.m_source.output_delay,
            input_delay=self.m_source.output_delay,
        )
        self.stft = Analysis(
            config.n_fft, config.hop_len, input_delay=self.source_delay.output_delay
        )
        if config.causal:
            pre = lookahead_conv(
                config.in_channels, channels[0], look + 1, input_delay=self.mel_delay.output_delay
            )
        else:
            pre = centred_conv(
                config.in_channels,
                channels[0],
                2 * look + 1,
                input_delay=self.mel_delay.output_delay,
            )
        self.conv_pre = weight_norm(pre)
        self.ups, self.source_downs, self.source_resblocks = (
            nn.ModuleList(),
            nn.ModuleList(),
            nn.ModuleList(),
        )
        self.resblocks = nn.ModuleList()
        # delays, without parameters
        self.spectrum_waits, self.branch_waits = nn.ModuleList(), nn.ModuleList()
        delay = pre.output_delay
        for stage, rate in enumerate(config.upsample_rates):
            width, kernel = channels[stage + 1], config.upsample_kernel_sizes[stage]
            extra_inputs = int(stage == last_stage)
            make_up = UpConv if config.causal else StreamConvTranspose
            up = make_up(channels[stage], width, kernel, rate, input_delay=delay)
            self.ups.append(weight_norm(up))
            delay = self._up_delay(stage, delay)
            wanted = self._spectrum_delay(stage, delay)
            wait = Delay(bins, wanted - late, input_delay=late)
            late = wait.output_delay
            self.spectrum_waits.append(wait)
            stride, kernel, left = self._down(stage)
            right = 0 if config.causal else left
            down = StreamConv(
                bins,
                width,
                kernel,
                left=left,
                right=right,
                stride=stride,
                input_delay=late,
                extra_inputs=1,
            )
            self.source_downs.append(down)
            source_shape = (
                config.source_resblock_kernel_sizes[stage],
                config.source_resblock_dilation_sizes[stage],
            )
            shape: dict[str, Any] = {"causal": config.causal, "extra_inputs": extra_inputs}
            self.source_resblocks.append(
                ResBlock(width, *source_shape, **shape, input_delay=down.output_delay)
            )
            branches = [
                ResBlock(width, *each, **shape, input_delay=delay)
                for each in zip(
                    config.resblock_kernel_sizes, config.resblock_dilation_sizes, strict=True
                )
            ]
            self._mirrored_at, delay = delay, max(branch.output_delay for branch in branches)
            self.resblocks.extend(branches)
            self.branch_waits.extend(
                Delay(width, delay - each.output_delay, input_delay=each.output_delay)
                for each in branches
            )
        post = hift_conv(channels[-1], bins, 7, config.causal, input_delay=delay, extra_inputs=1)
        self.conv_post = weight_norm(post)
        self.istft = Synthesis(config.n_fft, config.hop_len, input_delay=post.output_delay)
        self.output_delay = self.istft.output_delay

    @property
    def fade_gains(self) -> torch.Tensor | None:
        """Gains of the first samples of a stream, if a family fades utterances in."""
        return None

    def _up_delay(self, stage: int, delay: int) -> int:
        """Returns the delay in positions after a stage upsamples, from the delay before it."""
        config = self.config
        rate, kernel = config.upsample_rates[stage], config.upsample_kernel_sizes[stage]
        # the last stage has one extra position at the start, which reduces the delay by one
        mirrored = stage == len(config.upsample_rates) - 1
        return rate * delay + (0 if config.causal else (kernel - rate) // 2) - mirrored

    def _down(self, stage: int) -> tuple[int, int, int]:
        """Returns stride, kernel and padding of the convolution from the spectrum to a stage."""
        config = self.config
        stride = math.prod(config.upsample_rates[stage + 1 :])
        return stride, 2 * stride if stride > 1 else 1, stride - 1 if config.causal else stride // 2

    def _spectrum_delay(self, stage: int, delay: int) -> int:
        """Returns the delay of the spectrum, in windows, that matches a delay in a stage."""
        config, (stride, kernel, left) = self.config, self._down(stage)
        size, dilations = (
            config.source_resblock_kernel_sizes[stage],
            config.source_resblock_dilation_sizes[stage],
        )
        reach = 0 if config.causal else (size - 1) // 2 * (sum(dilations) + len(dilations))
        return stride * (delay - reach + 1) + left - kernel

    def _source_delay(self, delay: int) -> int:
        """Returns the delay of the source, in samples, that matches a delay of its spectrum."""
        return self.config.hop_len * (delay + 1) - self.config.n_fft // 2

    def freeze(self) -> None:
        """Ends loading: converts the F0 predictor to double precision, and replaces weight norms by
        plain weights.
        """
        # Converted before its weights are normalised, as in the public code.
        self.f0_predictor.double()
        for module in self.modules():
            if parametrize.is_parametrized(module, "weight"):
                parametrize.remove_parametrizations(module, "weight")
        self.eval().requires_grad_(False)
        for module in self.modules():
            if isinstance(module, Snake | UpConv | ResBlock):
                module.freeze()

    @torch.inference_mode()
    def vocode(
        self, mel: torch.Tensor, noise: SourceNoise, *, final: bool = True, phase: Phase = "exact"
    ) -> torch.Tensor:
        """Computes the audio of a mel that starts with the utterance.

        Args:
            mel: (B, bands, T), T > `lookahead_frames` unless `final`.
            noise: noise of the source.
            final: whether the utterance ends here. If not, the last `output_delay` samples are left
                out.
            phase: rounding of the phase of the source, see `frame_sines`.

        Returns:
            (B, samples), samples_per_frame for every frame, without the samples left out.
        """
        samples = mel.shape[2] * self.config.samples_per_frame
        drawn = noise.window(0, samples).to(mel.device)
        return self(mel, self.m_source.merged(drawn), phase=phase)[
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
            noise: (N,) or (B, N) noise of the source from `HarmonicSource.merged`. In a stream it
                has the same delay as F0.
            step: position in the streams, and the state of every layer.
            phase: rounding of the phase of the source, see `frame_sines`.
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

        In a stream the excitation has the delay of `m_source`, and the audio is late by
        `output_delay`.
        """
        config = self.config
        spectrum = self.stft(self.source_delay(source, step), step)
        x = self.conv_pre(self.mel_delay(mel, step), step)
        last_stage = len(self.ups) - 1
        blocks = len(config.resblock_kernel_sizes)
        for stage, up in enumerate(self.ups):
            x = up(F.leaky_relu(x, config.lrelu_slope), step)
            if stage == last_stage:
                x = self._mirrored(x, step)
            spectrum = self.spectrum_waits[stage](spectrum, step)
            x = self.source_resblocks[stage](self.source_downs[stage](spectrum, step), step).add_(x)
            branches = range(stage * blocks, (stage + 1) * blocks)
            total, *others = [
                self.branch_waits[at](self.resblocks[at](x, step), step) for at in branches
            ]
            for other in others:
                total += other
            x = total / blocks
        # The slope is 0.01 here, torch's default, not `lrelu_slope`, as in the public code.
        x = self.conv_post(F.leaky_relu(x), step)
        return self.istft(x, step).clamp(-config.audio_limit, config.audio_limit)

    def _mirrored(self, x: torch.Tensor, step: StreamStep) -> torch.Tensor:
        """Adds one position at the start, because the STFT has one window more than hops. In a
        stream the position reduces the delay by one instead.
        """
        if step.state is None:
            return F.pad(x, (1, 0), mode="reflect")
        if step.first:
            x[:, :, self._mirrored_at] = x[:, :, self._mirrored_at + 2]
        return x

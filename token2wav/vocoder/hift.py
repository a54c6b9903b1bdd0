"""CosyVoice3's causal HiFT vocoder: F0 prediction, harmonic source, upsampling network, inverse STFT.

Parameter names are those of public `hift.pt` files. Remarks with a number (Q17 ...) are quirks of the public code that
checkpoints rely on; docs/parity.md lists them.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

from token2wav.hift_config import HiFTConfig
from token2wav.vocoder.noise import SourceNoise
from token2wav.vocoder.source import HarmonicSource, Phase

F0_LOOKAHEAD = 3  # mel frames to the right that an F0 value needs
_F0_CAUSAL_CONVS, _F0_KERNEL = 4, 3
F0_LEFT_REACH = _F0_CAUSAL_CONVS * (_F0_KERNEL - 1)  # mel frames to the left
_SNAKE_EPS = 1e-9
_LEAST_FOLDED = 1e-2  # slope below which the epsilon of `Snake` is not lost in rounding
_MAX_MAGNITUDE = 100.0


class CausalConv(nn.Conv1d):
    """Convolution that sees only the past: as many zeros on the left as the kernel reaches back.

    With `history`, here and below, inputs start in the middle of an utterance: no zeros stand for what was before, and
    there is no output where it would be needed. Outputs always end with the same position, so they are shorter.
    """

    @property
    def reach(self) -> int:
        return (self.kernel_size[0] - 1) * self.dilation[0]

    def forward(self, x: torch.Tensor, *, history: bool = False) -> torch.Tensor:
        return super().forward(x if history else F.pad(x, (self.reach, 0)))


class DownConv(nn.Conv1d):
    """Strided convolution whose output i ends at input i * stride."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(F.pad(x, (self.stride[0] - 1, 0)))

    def last(self, x: torch.Tensor, count: int) -> torch.Tensor:
        """The last `count` outputs, or as many as there are inputs for, from no more of x than they need."""
        stride, kernel = self.stride[0], self.kernel_size[0]
        count = min(count, (x.shape[2] - kernel) // stride + 1)
        return super().forward(ending(x, (count - 1) * stride + kernel))


class UpConv(nn.Conv1d):
    """Nearest-neighbour repeat, then a causal convolution (Q23: not a transposed one).

    The kernel lies over few different inputs, each repeated. So there is one short kernel for each of the `rate` places
    of an output in its repeat, which `freeze` adds up from the published one, and nothing is repeated.
    """

    phases: torch.Tensor
    phase_bias: torch.Tensor | None

    def __init__(self, inputs: int, outputs: int, kernel: int, rate: int) -> None:
        super().__init__(inputs, outputs, kernel)
        self.rate = rate
        # Filled by `freeze`: (outputs * rate, inputs, reach + 1) and (outputs * rate,).
        self.register_buffer("phases", None, persistent=False)
        self.register_buffer("phase_bias", None, persistent=False)

    @property
    def reach(self) -> int:
        """Inputs to the left that an output depends on."""
        return upsampling_reach(self.kernel_size[0], self.rate)

    def freeze(self) -> None:
        outputs, inputs, kernel = self.weight.shape
        phases = self.weight.new_zeros(outputs, self.rate, inputs, self.reach + 1)
        for phase in range(self.rate):
            for tap in range(kernel):
                phases[:, phase, :, self.reach + (phase + tap - kernel + 1) // self.rate] += self.weight[:, :, tap]
        self.phases = phases.flatten(0, 1)
        if self.bias is not None:
            self.phase_bias = self.bias.repeat_interleave(self.rate)

    def forward(self, x: torch.Tensor, *, history: bool = False) -> torch.Tensor:
        if self.training:  # the weights are not to be frozen yet
            return super().forward(F.pad(x.repeat_interleave(self.rate, dim=2), (self.kernel_size[0] - 1, 0)))
        x = F.conv1d(x if history else F.pad(x, (self.reach, 0)), self.phases, self.phase_bias)
        return x.unflatten(1, (-1, self.rate)).transpose(2, 3).flatten(2)


def upsampling_reach(kernel: int, rate: int) -> int:
    """Inputs to the left that an output of an `UpConv` depends on."""
    return -(-(kernel - 1) // rate)


class Snake(nn.Module):
    """x + sin²(αx) / α with one α per channel, on a linear scale.

    Between convolutions α can be theirs: `fold` makes the one before give αx, and the one after take α times this.
    """

    inverse: torch.Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(channels))
        self.register_buffer("inverse", None, persistent=False)  # filled by `HiFT.freeze`
        self._takes_scaled = self._gives_scaled = False

    def freeze(self) -> None:
        self.inverse = self._inverse().detach()

    def fold(self, before: nn.Conv1d | None, after: nn.Conv1d) -> None:
        """Scales the weights of the convolutions around it, in place; not where an α is so small that it would show."""
        alpha = self.alpha.detach()
        if not alpha.is_meta and alpha.abs().min() < _LEAST_FOLDED:  # on `meta`, where sizes are counted, none is known
            return
        after.weight /= alpha[:, None]
        self._gives_scaled = True
        if before is not None:
            before.weight *= alpha[:, None, None]
            if before.bias is not None:
                before.bias *= alpha
            self._takes_scaled = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled = x if self._takes_scaled else x * self.alpha[:, None]
        sine = torch.sin(scaled)
        if self._gives_scaled:
            return torch.addcmul(scaled, sine, sine)
        return torch.addcmul(x, sine, sine * (self._inverse() if self.training else self.inverse))

    def _inverse(self) -> torch.Tensor:
        return 1 / (self.alpha + _SNAKE_EPS)[:, None]


class ResBlock(nn.Module):
    """For each dilation: Snake, dilated convolution, Snake, convolution, added to the input."""

    def __init__(self, channels: int, kernel: int, dilations: tuple[int, ...]) -> None:
        super().__init__()
        self.convs1 = nn.ModuleList(weight_norm(CausalConv(channels, channels, kernel, dilation=d)) for d in dilations)
        self.convs2 = nn.ModuleList(weight_norm(CausalConv(channels, channels, kernel)) for _ in dilations)
        self.activations1 = nn.ModuleList(Snake(channels) for _ in dilations)
        self.activations2 = nn.ModuleList(Snake(channels) for _ in dilations)

    @property
    def reach(self) -> int:
        """Positions to the left that an output depends on."""
        return sum(conv.reach for conv in (*self.convs1, *self.convs2))

    def freeze(self) -> None:
        layers = zip(self.activations1, self.convs1, self.activations2, self.convs2, strict=True)
        for snake1, conv1, snake2, conv2 in layers:
            snake1.fold(None, conv1)  # type: ignore[operator]
            snake2.fold(conv1, conv2)  # type: ignore[operator]

    def forward(self, x: torch.Tensor, *, history: bool = False) -> torch.Tensor:
        layers = zip(self.activations1, self.convs1, self.activations2, self.convs2, strict=True)
        for snake1, conv1, snake2, conv2 in layers:
            h = conv2(snake2(conv1(snake1(x), history=history)), history=history)
            x = (ending(x, h.shape[2]) if history else x) + h
        return x


def ending(x: torch.Tensor, count: int) -> torch.Tensor:
    """The last `count` positions of x (B, C, T), a view."""
    return x[:, :, x.shape[2] - count :]


class F0Predictor(nn.Module):
    """Mel to F0 in double precision (Q17): F0 integrates into phase, so its errors grow."""

    def __init__(self, config: HiFTConfig) -> None:
        super().__init__()
        layers: list[nn.Module] = [weight_norm(nn.Conv1d(config.in_channels, config.f0_channels, F0_LOOKAHEAD + 1))]
        for _ in range(_F0_CAUSAL_CONVS):
            layers += [nn.ELU(), weight_norm(CausalConv(config.f0_channels, config.f0_channels, _F0_KERNEL))]
        self.condnet = nn.Sequential(*layers, nn.ELU())
        self.classifier = nn.Linear(config.f0_channels, 1)

    def forward(self, mel: torch.Tensor, final: bool) -> torch.Tensor:
        """mel (B, bands, T) to F0 in Hz, float32, (B, T); without the last 3 frames unless `final`."""
        x = mel.to(self.classifier.weight.dtype)
        if final:
            x = F.pad(x, (0, F0_LOOKAHEAD))
        return self.classifier(self.condnet(x).transpose(1, 2)).abs().squeeze(-1).to(mel.dtype)


def fourier_kernels(window: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Short-time Fourier transform as convolution kernels: 16 samples need no FFT, and every engine has convolutions.

    Args:
        window: (n,) of both directions.

    Returns:
        Analysis and synthesis kernels, (n + 2, 1, n): real parts of all bins, then imaginary parts.
    """
    size = len(window)
    angle = 2 * math.pi / size * torch.outer(torch.arange(size // 2 + 1), torch.arange(size)).double()
    waves = torch.cat((angle.cos(), -angle.sin()))  # (n + 2, n)
    # All bins but the first and the last stand for two of the inverse transform, their mirror image included.
    twice = torch.full((size // 2 + 1,), 2.0, dtype=torch.float64)
    twice[0] = twice[-1] = 1.0
    inverse = waves * twice.repeat(2)[:, None] / size
    return (waves * window).float()[:, None], (inverse * window).float()[:, None]


class HiFT(nn.Module):
    """The vocoder as one module."""

    window: torch.Tensor
    analysis: torch.Tensor
    synthesis: torch.Tensor

    def __init__(self, config: HiFTConfig) -> None:
        super().__init__()
        self.config = config
        bins = config.n_fft + 2  # real and imaginary part of n_fft / 2 + 1 bins
        channels = [config.base_channels >> stage for stage in range(len(config.upsample_rates) + 1)]
        self.m_source = HarmonicSource(config)
        self.conv_pre = weight_norm(nn.Conv1d(config.in_channels, channels[0], config.conv_pre_look_right + 1))
        self.ups = nn.ModuleList()
        self.source_downs = nn.ModuleList()
        self.source_resblocks = nn.ModuleList()
        self.resblocks = nn.ModuleList()
        stride = config.samples_per_frame // config.hop_len  # STFT frames per position of a stage
        for stage, rate in enumerate(config.upsample_rates):
            width = channels[stage + 1]
            self.ups.append(weight_norm(UpConv(channels[stage], width, config.upsample_kernel_sizes[stage], rate)))
            stride //= rate
            self.source_downs.append(DownConv(bins, width, 2 * stride if stride > 1 else 1, stride))
            self.source_resblocks.append(
                ResBlock(
                    width,
                    config.source_resblock_kernel_sizes[stage],
                    config.source_resblock_dilation_sizes[stage],
                )
            )
            for kernel, dilations in zip(config.resblock_kernel_sizes, config.resblock_dilation_sizes, strict=True):
                self.resblocks.append(ResBlock(width, kernel, dilations))
        self.conv_post = weight_norm(CausalConv(channels[-1], bins, 7))
        self.f0_predictor = F0Predictor(config)
        for name in ("window", "analysis", "synthesis"):  # filled by `freeze`
            self.register_buffer(name, None, persistent=False)

    @property
    def lookahead_frames(self) -> int:
        """Mel frames at the end of an unfinished mel that yield no audio yet: F0, first convolution, inverse STFT."""
        return F0_LOOKAHEAD + self.config.conv_pre_look_right + 1

    def freeze(self) -> None:
        """Ends loading: the F0 predictor goes to double precision, weight norms become plain weights."""
        self.f0_predictor.double()  # before its weights are normalised, as published
        for module in self.modules():
            if parametrize.is_parametrized(module, "weight"):
                parametrize.remove_parametrizations(module, "weight")
        self.eval().requires_grad_(False)
        for module in self.modules():
            if isinstance(module, Snake | UpConv | ResBlock):
                module.freeze()
        self.window = torch.hann_window(self.config.n_fft)
        self.analysis, self.synthesis = fourier_kernels(self.window)

    @torch.inference_mode()
    def vocode(
        self,
        mel: torch.Tensor,
        noise: SourceNoise,
        *,
        final: bool = True,
        phase: Phase = "exact",
    ) -> torch.Tensor:
        """Audio of a mel that starts with the utterance.

        Args:
            mel: (B, bands, T), T > `lookahead_frames` unless `final`.
            noise: of the source.
            final: whether the utterance ends here; else the last `lookahead_frames` are only context.
            phase: rounding of the source's phase, see `StreamConfig`.

        Returns:
            (B, samples): samples_per_frame for every frame that is not held back.
        """
        f0 = self.f0_predictor(mel, final)
        samples = f0.shape[1] * self.config.samples_per_frame
        source, _ = self.m_source(f0, self.m_source.merged(noise.window(0, samples).to(mel.device)), phase)
        return self.decode(mel[..., : f0.shape[1]], source, final=final)

    def decode(self, mel: torch.Tensor, source: torch.Tensor, *, final: bool) -> torch.Tensor:
        """mel (B, bands, T) and its excitation (B, 1, T * samples_per_frame) to audio (B, samples)."""
        audio = self.network(*self.network_inputs(mel, source, final=final))
        return audio if final else audio[:, : -self.config.samples_per_frame]

    def network_inputs(
        self, mel: torch.Tensor, source: torch.Tensor, *, final: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What `network` takes of a mel and its excitation: at the end of an utterance zeros stand for what follows."""
        look_right, spectrum = self.config.conv_pre_look_right, self.spectrum(source)
        if final:
            return F.pad(mel, (0, look_right)), spectrum
        return mel, spectrum[..., : -look_right * self.config.samples_per_frame // self.config.hop_len]

    def network(self, mel: torch.Tensor, spectrum: torch.Tensor, *, history: bool = False) -> torch.Tensor:
        """The part that is exported, without `history`.

        Args:
            mel: (B, bands, T + conv_pre_look_right).
            spectrum: (B, n_fft + 2, T * samples_per_frame / hop_len + 1) STFT of the excitation, see `spectrum`.
            history: whether these start in the middle of an utterance. Then every layer computes only what has all it
                depends on, which spares the copies that zeros before every layer's inputs cost, too.

        Returns:
            (B, T * samples_per_frame) audio. With `history` less of it, the last samples; of those the first n_fft lack
            what the windows of the inverse STFT before them would add.
        """
        config = self.config
        x = self.conv_pre(mel)
        last_stage = len(self.ups) - 1
        blocks = len(config.resblock_kernel_sizes)
        for stage, up in enumerate(self.ups):
            x = up(F.leaky_relu(x, config.lrelu_slope), history=history)
            if stage == last_stage and not history:
                x = F.pad(x, (1, 0), mode="reflect")  # the STFT has one frame more than hops
            down, refine = self.source_downs[stage], self.source_resblocks[stage]
            source = down.last(spectrum, x.shape[2] + refine.reach) if history else down(spectrum)  # type: ignore[operator]
            source = refine(source, history=history)
            x = (ending(x, source.shape[2]) if history else x) + source
            branches = list(self.resblocks[stage * blocks : (stage + 1) * blocks])
            if history:
                outputs = x.shape[2] - max(branch.reach for branch in branches)  # type: ignore[type-var]
                parts = [branch(ending(x, outputs + branch.reach), history=True) for branch in branches]
            else:
                parts = [branch(x) for branch in branches]
            x = torch.stack(parts).sum(dim=0) / blocks
        audio = self.waveform(self.conv_post(F.leaky_relu(x), history=history))  # slope 0.01 here (Q24)
        return audio.clamp(-config.audio_limit, config.audio_limit)

    def spectrum(self, source: torch.Tensor) -> torch.Tensor:
        """STFT of the excitation, (B, 1, N) to (B, n_fft + 2, N / hop + 1): real parts, then imaginary parts."""
        edge = self.config.n_fft // 2
        return F.conv1d(F.pad(source, (edge, edge), mode="reflect"), self.analysis, stride=self.config.hop_len)

    def waveform(self, x: torch.Tensor) -> torch.Tensor:
        """Inverse STFT of log-magnitudes and phases, (B, n_fft + 2, frames) to (B, (frames - 1) * hop)."""
        hop, edge = self.config.hop_len, self.config.n_fft // 2
        bins = edge + 1
        magnitude = x[:, :bins].exp().clamp(max=_MAX_MAGNITUDE)
        angle = x[:, bins:].sin()  # the sine of the output is the phase, in radians (Q24)
        stft = torch.cat((magnitude * angle.cos(), magnitude * angle.sin()), dim=1)
        # Overlapping windows, and what they add up to.
        overlap = F.conv_transpose1d(stft, self.synthesis, stride=hop, padding=edge)
        ones, squared = torch.ones_like(x[:1, :1]), self.window.square()[None, None]
        weight = F.conv_transpose1d(ones, squared, stride=hop, padding=edge)
        return (overlap / weight)[:, 0]

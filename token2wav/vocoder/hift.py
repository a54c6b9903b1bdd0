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

from token2wav.model_config import HiFTConfig
from token2wav.vocoder.noise import SourceNoise
from token2wav.vocoder.source import HarmonicSource, Phase

F0_LOOKAHEAD = 3  # mel frames to the right that an F0 value needs
_F0_CAUSAL_CONVS, _F0_KERNEL = 4, 3
F0_LEFT_REACH = _F0_CAUSAL_CONVS * (_F0_KERNEL - 1)  # mel frames to the left
_SNAKE_EPS = 1e-9
_MAX_MAGNITUDE = 100.0


class CausalConv(nn.Conv1d):
    """Convolution that sees only the past: zeros on the left, as many as the kernel reaches back."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        reach = (self.kernel_size[0] - 1) * self.dilation[0]
        return super().forward(F.pad(x, (reach, 0)))


class DownConv(nn.Conv1d):
    """Strided convolution whose output i ends at input i * stride."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(F.pad(x, (self.stride[0] - 1, 0)))


class UpConv(nn.Conv1d):
    """Nearest-neighbour repeat, then a causal convolution (Q23: not a transposed one)."""

    def __init__(self, inputs: int, outputs: int, kernel: int, rate: int) -> None:
        super().__init__(inputs, outputs, kernel)
        self.rate = rate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.repeat_interleave(self.rate, dim=2)
        return super().forward(F.pad(x, (self.kernel_size[0] - 1, 0)))


class Snake(nn.Module):
    """x + sin²(αx) / α with one α per channel, on a linear scale."""

    inverse: torch.Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(channels))
        self.register_buffer("inverse", None, persistent=False)  # filled by `HiFT.freeze`

    def freeze(self) -> None:
        self.inverse = self._inverse().detach()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sine = torch.sin(x * self.alpha[:, None])
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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layers = zip(self.activations1, self.convs1, self.activations2, self.convs2, strict=True)
        for snake1, conv1, snake2, conv2 in layers:
            x = x + conv2(snake2(conv1(snake1(x))))
        return x


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
            if isinstance(module, Snake):
                module.freeze()
        self.window = torch.hann_window(self.config.n_fft)
        self.analysis, self.synthesis = fourier_kernels(self.window)
        self.eval().requires_grad_(False)

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

    def network(self, mel: torch.Tensor, spectrum: torch.Tensor) -> torch.Tensor:
        """The part that is exported.

        Args:
            mel: (B, bands, T + conv_pre_look_right).
            spectrum: (B, n_fft + 2, T * samples_per_frame / hop_len + 1) STFT of the excitation, see `spectrum`.

        Returns:
            (B, T * samples_per_frame) audio.
        """
        config = self.config
        x = self.conv_pre(mel)
        last_stage = len(self.ups) - 1
        blocks = len(config.resblock_kernel_sizes)
        for stage, up in enumerate(self.ups):
            x = up(F.leaky_relu(x, config.lrelu_slope))
            if stage == last_stage:
                x = F.pad(x, (1, 0), mode="reflect")  # the STFT has one frame more than hops
            x = x + self.source_resblocks[stage](self.source_downs[stage](spectrum))
            branches = self.resblocks[stage * blocks : (stage + 1) * blocks]
            x = torch.stack([branch(x) for branch in branches]).sum(dim=0) / blocks
        audio = self.waveform(self.conv_post(F.leaky_relu(x)))  # slope 0.01 here (Q24)
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

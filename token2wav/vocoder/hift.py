"""CosyVoice3's causal HiFT vocoder: F0 prediction, harmonic source, upsampling network, inverse STFT.

Parameter names are those of public `hift.pt` files. Remarks with a number (Q17 ...) are quirks of the public code that
checkpoints rely on; docs/parity.md lists them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

from token2wav.hift_config import HiFTConfig
from token2wav.vocoder import stft
from token2wav.vocoder.convolutions import CausalConv, DownConv, UpConv, ending
from token2wav.vocoder.f0 import F0_LOOKAHEAD, F0Predictor
from token2wav.vocoder.noise import SourceNoise
from token2wav.vocoder.source import HarmonicSource, Phase

_SNAKE_EPS = 1e-9
_LEAST_FOLDED = 1e-2  # slope below which the epsilon of `Snake` is not lost in rounding


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
        self.analysis, self.synthesis = stft.fourier_kernels(self.window)

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
        return self.waveform(self.features(mel, spectrum, history=history))

    def features(self, mel: torch.Tensor, spectrum: torch.Tensor, *, history: bool = False) -> torch.Tensor:
        """`network` without the inverse STFT at its end: (B, n_fft + 2, frames), see `stft.waveform`."""
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
        return self.conv_post(F.leaky_relu(x), history=history)  # slope 0.01 here (Q24)

    def spectrum(self, source: torch.Tensor) -> torch.Tensor:
        """STFT of the excitation, (B, 1, N) to (B, n_fft + 2, N / hop + 1): real parts, then imaginary parts."""
        return stft.spectrum(stft.reflected(source, self.config.n_fft), self.analysis, self.config.hop_len)

    def waveform(self, x: torch.Tensor, valid: torch.Tensor | None = None) -> torch.Tensor:
        """Audio of what `features` gives; of those frames that are `valid`, see `stft.waveform`."""
        audio = stft.waveform(x, self.synthesis, self.window, self.config.hop_len, valid)
        return audio.clamp(-self.config.audio_limit, self.config.audio_limit)

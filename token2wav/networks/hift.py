"""CosyVoice3's causal HiFT vocoder: F0 prediction, harmonic source, upsampling network, inverse STFT.

Parameter names are those of public `hift.pt` files. Remarks with a number (Q17 ...) are quirks of the public code that
checkpoints rely on.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

from token2wav.networks.configs import HiFTConfig
from token2wav.networks.f0 import F0_LOOKAHEAD, F0Predictor
from token2wav.networks.source import HarmonicSource, Phase
from token2wav.networks.source_noise import SourceNoise
from token2wav.networks.stft import Analysis, Synthesis
from token2wav.networks.streaming import WHOLE, Delay, Piece, StreamConv, causal_conv, lookahead_conv
from token2wav.networks.upsampling import UpConv

Decode = Callable[[torch.Tensor, torch.Tensor, Piece], torch.Tensor]  # as `HiFT.decode`

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

    def forward(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        scaled = x if self._takes_scaled else x * self.alpha[:, None]
        sine = torch.sin(scaled)
        if self._gives_scaled:
            return torch.addcmul(scaled, sine, sine, out=out)
        return torch.addcmul(x, sine, sine * (self._inverse() if self.training else self.inverse), out=out)

    def _inverse(self) -> torch.Tensor:
        return 1 / (self.alpha + _SNAKE_EPS)[:, None]


class ResBlock(nn.Module):
    """For each dilation: Snake, dilated convolution, Snake, convolution, added to the input."""

    def __init__(self, channels: int, kernel: int, dilations: tuple[int, ...], *, delay: int = 0) -> None:
        super().__init__()

        def conv(dilation: int) -> nn.Module:
            return weight_norm(causal_conv(channels, channels, kernel, dilation=dilation, delay=delay))

        self.convs1 = nn.ModuleList(conv(dilation) for dilation in dilations)
        self.convs2 = nn.ModuleList(conv(1) for _ in dilations)
        self.activations1 = nn.ModuleList(Snake(channels) for _ in dilations)
        self.activations2 = nn.ModuleList(Snake(channels) for _ in dilations)

    def freeze(self) -> None:
        layers = zip(self.activations1, self.convs1, self.activations2, self.convs2, strict=True)
        for snake1, conv1, snake2, conv2 in layers:
            snake1.fold(None, conv1)  # type: ignore[operator]
            snake2.fold(conv1, conv2)  # type: ignore[operator]

    def forward(self, x: torch.Tensor, piece: Piece = WHOLE) -> torch.Tensor:
        layers = zip(self.activations1, self.convs1, self.activations2, self.convs2, strict=True)
        for snake1, conv1, snake2, conv2 in layers:
            x = conv2(conv1(x, piece, snake1), piece, snake2).add_(x)
        return x


class HiFT(nn.Module):
    """The vocoder as one module, for whole utterances and for their pieces.

    Attributes:
        delay: samples by which the audio of a piece is late: it takes so much mel to its right.
    """

    def __init__(self, config: HiFTConfig) -> None:
        super().__init__()
        self.config = config
        bins = config.n_fft + 2  # real and imaginary part of n_fft / 2 + 1 bins
        channels = [config.base_channels >> stage for stage in range(len(config.upsample_rates) + 1)]
        samples, stride = config.samples_per_frame, config.samples_per_frame // config.hop_len
        # Mel and source meet at every stage. What comes earlier waits: by whole frames of mel, or by samples.
        edge = -(-config.n_fft // 2 // samples)  # frames that an STFT looks ahead
        late = max(config.conv_pre_look_right, F0_LOOKAHEAD + edge)
        self.mel_delay = Delay(config.in_channels, late - config.conv_pre_look_right)
        ahead = (late - F0_LOOKAHEAD) * samples - config.n_fft // 2
        self.source_delay = Delay(1, ahead, delay=F0_LOOKAHEAD * samples)
        self.m_source = HarmonicSource(config)
        self.stft = Analysis(config.n_fft, config.hop_len, delay=self.source_delay.delayed)
        pre = lookahead_conv(
            config.in_channels, channels[0], config.conv_pre_look_right + 1, delay=self.mel_delay.delayed
        )
        self.conv_pre = weight_norm(pre)
        self.ups = nn.ModuleList()
        self.source_downs = nn.ModuleList()
        self.source_resblocks = nn.ModuleList()
        self.resblocks = nn.ModuleList()
        delay = pre.delayed
        for stage, rate in enumerate(config.upsample_rates):
            width = channels[stage + 1]
            up = UpConv(channels[stage], width, config.upsample_kernel_sizes[stage], rate, delay=delay)
            stride //= rate  # STFT frames per position of a stage
            kernel = 2 * stride if stride > 1 else 1
            down = StreamConv(bins, width, kernel, left=stride - 1, stride=stride, delay=self.stft.delayed)
            delay = down.delayed  # as that of `up`, less the position that is mirrored before the last stage
            source_shape = config.source_resblock_kernel_sizes[stage], config.source_resblock_dilation_sizes[stage]
            self.ups.append(weight_norm(up))
            self.source_downs.append(down)
            self.source_resblocks.append(ResBlock(width, *source_shape, delay=delay))
            for shape in zip(config.resblock_kernel_sizes, config.resblock_dilation_sizes, strict=True):
                self.resblocks.append(ResBlock(width, *shape, delay=delay))
        self.conv_post = weight_norm(causal_conv(channels[-1], bins, 7, delay=delay))
        self.istft = Synthesis(config.n_fft, config.hop_len, delay=delay)
        self.delay = self.istft.delayed
        self.f0_predictor = F0Predictor(config)

    @property
    def device(self) -> torch.device:
        return self.stft.kernels.device

    @property
    def bands(self) -> int:
        return self.config.in_channels

    @property
    def frame_samples(self) -> int:
        return self.config.samples_per_frame

    @property
    def lookahead_frames(self) -> int:
        """Mel frames, rounded up, at the end of an unfinished mel that yield no audio yet."""
        return -(-self.delay // self.config.samples_per_frame)

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
            final: whether the utterance ends here; else the last `delay` samples are missing.
            phase: rounding of the source's phase, see `frame_sines`.

        Returns:
            (B, samples): samples_per_frame for every frame, less the delay.
        """
        samples = mel.shape[2] * self.config.samples_per_frame
        drawn = noise.window(0, samples).to(mel.device)
        return self(mel, self.m_source.merged(drawn), phase=phase)[:, : samples - (0 if final else self.delay)]

    def forward(
        self,
        mel: torch.Tensor,
        noise: torch.Tensor,
        piece: Piece = WHOLE,
        phase: Phase = "exact",
        decode: Decode | None = None,
    ) -> torch.Tensor:
        """Audio of a piece of mel.

        Args:
            mel: (B, bands, T) the next frames.
            noise: (N,) or (B, N) of the source, as `HarmonicSource.merged` gives it; in pieces as late as F0.
            piece: its place in the utterances.
            phase: rounding of the source's phase, see `frame_sines`.
            decode: in place of the method.

        Returns:
            (B, samples), `delay` late.
        """
        source = self.m_source(self.f0_predictor(mel, piece), noise, phase, piece)
        return (decode or self.decode)(mel, source, piece)

    def decode(self, mel: torch.Tensor, source: torch.Tensor, piece: Piece = WHOLE) -> torch.Tensor:
        """Audio (B, samples) of mel (B, bands, T) and its excitation (B, 1, T * samples_per_frame).

        In pieces the excitation is `F0_LOOKAHEAD` frames late, and the audio `delay` samples.
        """
        config = self.config
        spectrum = self.stft(self.source_delay(source, piece), piece)
        x = self.conv_pre(self.mel_delay(mel, piece), piece)
        last_stage = len(self.ups) - 1
        blocks = len(config.resblock_kernel_sizes)
        for stage, up in enumerate(self.ups):
            x = up(F.leaky_relu(x, config.lrelu_slope), piece)
            if stage == last_stage:
                x = self._mirrored(x, piece)
            x = self.source_resblocks[stage](self.source_downs[stage](spectrum, piece), piece).add_(x)
            branches = self.resblocks[stage * blocks : (stage + 1) * blocks]
            total, *others = [branch(x, piece) for branch in branches]
            for other in others:
                total += other
            x = total / blocks
        x = self.conv_post(F.leaky_relu(x), piece)  # slope 0.01 here (Q24)
        return self.istft(x, piece).clamp(-config.audio_limit, config.audio_limit)

    def _mirrored(self, x: torch.Tensor, piece: Piece) -> torch.Tensor:
        """One position more at the start, as the STFT has one window more than hops: in pieces, one less of delay."""
        if piece.state is None:
            return F.pad(x, (1, 0), mode="reflect")
        if piece.first:
            start = self.istft.overlap.delay
            x[:, :, start] = x[:, :, start + 2]
        return x

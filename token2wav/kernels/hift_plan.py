"""HiFT on kernels: the plan of its launches. `channels_last.py` makes launches from layers.

A step takes 61 launches for a network of the public size, for any number of streams and for any
places of the pieces in their streams.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import nn

from token2wav.kernels import source_filter
from token2wav.kernels.branches import fan_out, mean
from token2wav.kernels.channels_last import ChannelsLastLayers, ResidualChain, history, state_owner
from token2wav.kernels.convolution import Convolution
from token2wav.kernels.rounding import Precision
from token2wav.kernels.signals import PieceTensors, Signal, SignalLayout
from token2wav.layers.convolutions import StreamConv
from token2wav.layers.streaming import StateSpec
from token2wav.networks.hift import HiFT

_FRAMES_TILE = 64  # frames, or windows, of a tile
_BANDS_TILE = 16  # frames of a tile with all bands
_SAMPLES_TILE = 1024


@dataclass(frozen=True, eq=False)
class _Stage:
    """Stage of the network: upsampling, source branch, and residual blocks."""

    up: Convolution
    down: Convolution
    source: ResidualChain
    blocks: ResidualChain
    branches: torch.Tensor  # geometry of the results of the blocks
    out: SignalLayout
    slope: float
    mirror: bool


class HiFTPlan:
    """Plan of the launches of a HiFT network.

    Args:
        network: network after `freeze`, on its device.
        precision: arithmetic of the products of its generator. F0, source, STFT and inverse STFT
            are exact.
    """

    def __init__(self, network: HiFT, precision: Precision = "tf32") -> None:
        self.network, self.precision = network, precision
        self._layers = layers = ChannelsLastLayers(precision)
        config, source = network.config, network.m_source
        bins, bands = config.n_fft + 2, config.in_channels
        pre: Any = network.conv_pre
        predictor = [
            layer for layer in network.f0_predictor.condnet if isinstance(layer, StreamConv)
        ]
        # signals, from mel to audio
        self.mel = layers.signal(bands, 1, (0,), [[pre]])
        self.exact_mel = layers.signal(bands, 1, (0,), [predictor[:1]], dtype=torch.float64)
        self.f0, x = [], self.exact_mel
        for conv, reader in zip(predictor, [*predictor[1:], None], strict=True):
            delay = (conv.output.delay,)
            readers = [[reader]] if reader else []
            out = layers.signal(conv.out_channels, 1, delay, readers, dtype=torch.float64)
            self.f0.append(layers.conv([conv], x, out=out, activation="elu"))
            x = out
        self.f0.append(self._pitch(network.f0_predictor.classifier, x))
        self.carry = layers.reserve(config.nb_harmonics + 2, torch.float64)
        samples = config.samples_per_frame
        windows = samples // config.hop_len
        self.excitation = layers.signal(1, samples, (source.output.delay,), [[network.stft]])
        downs: list[Any] = list(network.source_downs)
        self.spectrum = layers.signal(
            bins, windows, (network.stft.output.delay,), [[down] for down in downs], extra=1
        )
        first_up: Any = network.ups[0]
        before = layers.signal(pre.out_channels, 1, (pre.output.delay,), [[state_owner(first_up)]])
        self.pre = layers.conv(
            [pre], self.mel, out=before, activation="leaky", slope=config.lrelu_slope
        )
        self.stages: list[_Stage] = []
        for stage in range(len(network.ups)):
            self.stages.append(self._stage(stage, before))
            before = self.stages[-1].out
        post: Any = network.conv_post
        self.windows = layers.signal(
            bins, windows, (post.output.delay,), [[network.istft.overlap]], extra=1
        )
        self.post = layers.conv([post], before, raw=self.windows)
        device = network.device
        course = source.course
        self._merge = torch.cat((source.l_linear.weight[0], source.l_linear.bias))
        self._begins = torch.zeros(config.nb_harmonics + 1, dtype=torch.float64, device=device)
        if course.begins is not None:
            self._begins.copy_(course.begins)
        self._course = course
        self._gains = network.fade_gains

    def state_specs(self) -> Mapping[nn.Module, StateSpec]:
        """Returns the states of a stream: one row for each dtype."""
        keys = {torch.float32: self.network, torch.float64: self.network.f0_predictor}
        return {
            keys[dtype]: StateSpec(f"halos {dtype}", (width,), dtype)
            for dtype, width in self._layers.widths.items()
        }

    def step(self, batch: PieceTensors, mel: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """Computes the audio (streams, samples), late by `output_delay`, of a batch of pieces.

        Args:
            mel: (bands, frames of all pieces) float32, contiguous.
            noise: (streams, (1 + frames) * samples_per_frame) noise of the source. It begins one
                frame before the piece, and has the same delay as F0.
        """
        mel_signal, exact_mel = self._take_in(batch, mel)
        spectrum = self._analyse(batch, self._excite(batch, exact_mel, noise))
        _, x = self.pre(batch, mel_signal)
        for stage in self.stages:
            assert x is not None
            x = self._run(stage, batch, x, spectrum)
        assert x is not None
        windows, _ = self.post(batch, x)
        assert windows is not None
        return self._synthesise(batch, windows)

    def _run(self, stage: _Stage, batch: PieceTensors, x: Signal, spectrum: Signal) -> Signal:
        """Computes a stage, and returns the input of the next stage."""
        up, _ = stage.up(batch, x)
        down, activated = stage.down(batch, spectrum)
        assert up is not None and down is not None and activated is not None  # noqa: PT018
        source = stage.source(batch, down, activated)
        blocks = stage.blocks
        total, activated = fan_out(
            batch,
            up,
            source,
            blocks.total,
            blocks.activated,
            blocks.slopes,
            mirror=stage.mirror,
            precision=self.precision,
        )
        return mean(
            batch,
            blocks(batch, total, activated),
            stage.branches,
            stage.out,
            stage.slope,
            precision=self.precision,
        )

    # Declaration of the layers.

    def _pitch(self, classifier: nn.Linear, x: SignalLayout) -> Convolution:
        """Declares the last layer of the F0 predictor."""
        out = SignalLayout(1, 1, x.delays, dtype=x.dtype)
        geometry = [(1, 0, x.first(0), 0, x.delays[0])]
        return self._layers.product(
            classifier.weight[None],
            classifier.bias[None],
            geometry,
            channels=x.channels,
            step=x.channels,
            rate=1,
            raw=out,
        )

    def _stage(self, stage: int, before: SignalLayout) -> _Stage:
        """Declares a stage of the network."""
        network, config = self.network, self.network.config
        width, last = len(config.resblock_kernel_sizes), stage == len(network.ups) - 1
        ups: Any = network.ups
        rate = before.rate * config.upsample_rates[stage]
        branches = range(stage * width, (stage + 1) * width)
        blocks: list[Any] = [network.resblocks[index] for index in branches]
        waits: list[Any] = [network.branch_waits[index] for index in branches]
        source: Any = network.source_resblocks[stage]
        up = self._layers.up(ups[stage], before)
        source_chain = self._layers.chain([source], rate, [], int(last))
        down = self._layers.conv(
            [network.source_downs[stage]],
            self.spectrum,
            snakes=[source.activations1[0]],
            raw=source_chain.total,
            out=source_chain.activated,
        )
        chain = self._layers.chain(blocks, rate, waits, int(last))
        reader: Any = network.conv_post if last else state_owner(ups[stage + 1])
        delay = max(wait.output.delay for wait in waits)
        out = self._layers.signal(chain.total.channels, rate, (delay,), [[reader]], extra=int(last))
        places = [
            (0, 0, 0, chain.result.first(history(wait, wait.input.delay)), 0) for wait in waits
        ]
        geometry = torch.tensor(places, dtype=torch.int32, device=network.device)
        # The slope of the last stage is torch's default, as in the public code.
        slope = 0.01 if last else config.lrelu_slope
        return _Stage(up, down, source_chain, chain, geometry, out, slope, last)

    # Launches of the kernels at both ends.

    def _take_in(self, batch: PieceTensors, mel: torch.Tensor) -> tuple[Signal, Signal]:
        mel_signal = Signal.empty(self.mel, batch)
        exact_signal = Signal.empty(self.exact_mel, batch)
        grid = 1 + triton.cdiv(batch.frames, _BANDS_TILE), batch.streams
        source_filter.take_in[grid](
            mel,
            mel.shape[1],
            mel.shape[0],
            *exact_signal.writing_alone,
            *batch.states(torch.float64),
            *mel_signal.writing_alone,
            *batch.states(torch.float32),
            batch.pieces,
            ROUND=self.precision == "tf32",
            TILE_FRAMES=_BANDS_TILE,
            TILE_BANDS=triton.next_power_of_2(mel.shape[0]),
        )
        return mel_signal, exact_signal

    def _excite(self, batch: PieceTensors, mel: Signal, noise: torch.Tensor) -> Signal:
        """Returns the excitation of a mel in double precision."""
        x: Signal | None = mel
        for conv in self.f0:
            assert x is not None
            raw, out = conv(batch, x)
            x = out or raw
        assert x is not None
        config, course = self.network.config, self._course
        harmonics, samples = config.nb_harmonics + 1, config.samples_per_frame
        streams, frames = batch.streams, batch.frames
        phases = mel.data.new_empty(streams, frames, harmonics, 2)
        voiced = noise.new_empty(streams, 1 + frames)
        source_filter.frame_phases[(streams,)](
            *x.reading[:2],
            frames,
            x.layout.delays[0],
            self._begins,
            phases,
            voiced,
            self.carry,
            *batch.states(torch.float64),
            batch.pieces,
            harmonics,
            float(config.sampling_rate),
            samples,
            float(config.nsf_voiced_threshold),
            ROUND=config.causal,
            ADVANCES=course.advances,
            MIDDLES=course.half_frame,
            TILE_FRAMES=_FRAMES_TILE,
            TILE_HARMONICS=triton.next_power_of_2(harmonics),
        )
        result = Signal.empty(self.excitation, batch)
        source_filter.excite[(1 + triton.cdiv(frames * samples, _SAMPLES_TILE), streams)](
            phases,
            voiced,
            noise,
            self._merge,
            frames,
            harmonics,
            samples,
            samples // 2 if course.half_frame else 0,
            course.offset,
            config.nsf_alpha,
            config.nsf_sigma,
            config.nsf_alpha / 3,
            *result.writing_alone,
            *batch.states(torch.float32),
            batch.pieces,
            self.excitation.delays[0],
            TILE=_SAMPLES_TILE,
        )
        return result

    def _analyse(self, batch: PieceTensors, excitation: Signal) -> Signal:
        stft, config = self.network.stft, self.network.config
        result = Signal.empty(self.spectrum, batch)
        rate, bins = self.spectrum.rate, self.spectrum.channels
        source_filter.analyse[(1 + triton.cdiv(batch.frames * rate, _FRAMES_TILE), batch.streams)](
            *excitation.reading[:2],
            self.excitation.first(history(stft, self.excitation.delays[0])),
            stft.kernels,
            bins,
            config.n_fft,
            config.hop_len,
            *result.writing_alone,
            *batch.states(torch.float32),
            batch.pieces,
            rate,
            self.spectrum.delays[0],
            ROUND=self.precision == "tf32",
            TILE_ROWS=_FRAMES_TILE,
            TILE_BINS=max(16, triton.next_power_of_2(bins)),
        )
        return result

    def _synthesise(self, batch: PieceTensors, windows: Signal) -> torch.Tensor:
        network, config = self.network, self.network.config
        istft, hop, rate = network.istft, config.hop_len, self.windows.rate
        overlap, delay = istft.overlap, self.windows.delays[0]
        audio = windows.data.new_empty(batch.streams, batch.frames * rate * hop)
        source_filter.synthesise[(triton.cdiv(batch.frames * rate, _FRAMES_TILE), batch.streams)](
            *windows.reading[:2],
            self.windows.first(history(overlap, delay)),
            istft.kernels,
            istft.weights,
            istft.bins,
            config.n_fft,
            hop,
            audio,
            batch.frames,
            batch.pieces,
            rate,
            delay,
            config.audio_limit,
            self._gains,
            0 if self._gains is None else len(self._gains) - 1,
            network.output_delay,
            OVERLAP=1 + (overlap.state_shape[-1] if overlap.state_shape else 0),
            TILE_ROWS=_FRAMES_TILE,
            TILE_HOP=max(16, triton.next_power_of_2(hop)),
        )
        return audio

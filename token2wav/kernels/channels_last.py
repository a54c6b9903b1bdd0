"""HiFT on kernels: every convolution is a matrix product over a signal in a channels-last buffer.

The plan is made from the layers of a network, which remains the reference. Kernel, dilation,
stride, delay and state of a convolution come from its layer. A *signal* is the input of a layer,
and its *halo* has the last rows of the previous piece (`kernels/signals.py`). The halo is long
enough for every layer that reads the signal. So layers that only delay a signal (`Delay`) need no
code: a reader of a delayed signal reads earlier rows.

A step takes 61 launches for a network of the public size, for any number of streams and for any
places of the pieces in their streams.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import nn

from token2wav.kernels import source_filter
from token2wav.kernels.branches import fan_out, mean
from token2wav.kernels.convolution import Activation, Convolution
from token2wav.kernels.rounding import Precision, rounded_weights
from token2wav.kernels.signals import PieceTensors, Signal, SignalLayout, aligned
from token2wav.layers.convolutions import StreamConv, StreamConvTranspose
from token2wav.layers.streaming import StateSpec, Streaming
from token2wav.networks.hift import HiFT
from token2wav.networks.hift_layers import FoldableSnake, ResBlock, UpConv

_FRAMES_TILE = 64  # frames, or windows, of a tile
_BANDS_TILE = 16  # frames of a tile with all bands
_SAMPLES_TILE = 1024


def history(layer: Streaming, delay: int) -> int:
    """Returns the number of rows before a piece that a layer reads.

    The signal of the layer is late by `delay`.
    """
    state_rows = layer.state_shape[-1] if layer.state_shape else 0
    return state_rows + layer.input.delay - delay


def upsampling_weights(up: UpConv | StreamConvTranspose) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns weights and bias of the convolution that computes an upsampling layer.

    A row of the results of the convolution holds `rate` rows of the results of the layer.

    Returns:
        Weights (rate * outputs, taps, inputs) and bias (rate * outputs,).
    """
    if isinstance(up, UpConv):
        # (outputs * rate, inputs, taps)
        weight = up.phases.unflatten(0, (-1, up.rate)).transpose(0, 1).flatten(0, 1)
        bias, rate = up.bias, up.rate
        weight = weight.transpose(1, 2)
    else:
        rate, taps = up.stride[0], history(up.overlap, up.overlap.input.delay) + 1
        kernel = F.pad(up.weight, (0, rate * taps - up.kernel_size[0]))
        # (inputs, outputs, taps, rate): the first tap belongs to the last input
        kernel = kernel.unflatten(2, (taps, rate)).flip(2)
        weight, bias = kernel.permute(3, 1, 2, 0).flatten(0, 1), up.bias
    if bias is None:
        bias = weight.new_zeros(len(weight) // rate)
    return weight.contiguous(), bias.repeat(rate)


@dataclass(frozen=True, eq=False)
class _Rows:
    """States of a stream: widths of the rows by dtype, which grow with each declared signal."""

    widths: dict[torch.dtype, int]

    def take(self, numbers: int, dtype: torch.dtype) -> int:
        """Reserves elements of a row, and returns the index of the first one."""
        offset = self.widths.get(dtype, 0)
        self.widths[dtype] = offset + aligned(numbers)
        return offset


@dataclass(frozen=True, eq=False)
class _Chain:
    """Residual blocks of parallel branches."""

    total: SignalLayout  # layout of the input, which is the first residual
    activated: SignalLayout  # layout of the activations of the input
    slopes: torch.Tensor  # (branches, 3, channels) coefficients of the first activations
    convs: list[tuple[Convolution, Convolution]]
    result: SignalLayout

    def __call__(self, batch: PieceTensors, total: Signal, activated: Signal) -> Signal:
        """Returns the results of all branches."""
        x: Signal | None = activated
        residual: Signal | None = total
        for first, second in self.convs:
            assert x is not None
            _, inner = first(batch, x)
            assert inner is not None
            residual, x = second(batch, inner, residual)
        assert residual is not None
        return residual


@dataclass(frozen=True, eq=False)
class _Stage:
    """Stage of the network: upsampling, source branch, and residual blocks."""

    up: Convolution
    down: Convolution
    source: _Chain
    blocks: _Chain
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
        self._rows = _Rows({})
        config, source = network.config, network.m_source
        bins, bands = config.n_fft + 2, config.in_channels
        pre: Any = network.conv_pre
        predictor = [
            layer for layer in network.f0_predictor.condnet if isinstance(layer, StreamConv)
        ]
        # signals, from mel to audio
        self.mel = self._signal(bands, 1, (0,), [[pre]])
        self.exact_mel = self._signal(bands, 1, (0,), [predictor[:1]], dtype=torch.float64)
        self.f0, x = [], self.exact_mel
        for conv, reader in zip(predictor, [*predictor[1:], None], strict=True):
            delay = (conv.output.delay,)
            readers = [[reader]] if reader else []
            out = self._signal(conv.out_channels, 1, delay, readers, dtype=torch.float64)
            self.f0.append(self._conv([conv], x, out=out, activation="elu"))
            x = out
        self.f0.append(self._pitch(network.f0_predictor.classifier, x))
        self.carry = self._rows.take(config.nb_harmonics + 2, torch.float64)
        samples = config.samples_per_frame
        windows = samples // config.hop_len
        self.excitation = self._signal(1, samples, (source.output.delay,), [[network.stft]])
        downs: list[Any] = list(network.source_downs)
        self.spectrum = self._signal(
            bins, windows, (network.stft.output.delay,), [[down] for down in downs], extra=1
        )
        first_up: Any = network.ups[0]
        before = self._signal(pre.out_channels, 1, (pre.output.delay,), [[_reader(first_up)]])
        self.pre = self._conv(
            [pre], self.mel, out=before, activation="leaky", slope=config.lrelu_slope
        )
        self.stages: list[_Stage] = []
        for stage in range(len(network.ups)):
            self.stages.append(self._stage(stage, before))
            before = self.stages[-1].out
        post: Any = network.conv_post
        self.windows = self._signal(
            bins, windows, (post.output.delay,), [[network.istft.overlap]], extra=1
        )
        self.post = self._conv([post], before, raw=self.windows)
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
            for dtype, width in self._rows.widths.items()
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

    def _signal(
        self,
        channels: int,
        rate: int,
        delays: Sequence[int],
        readers: Sequence[Sequence[Any]],
        *,
        extra: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> SignalLayout:
        """Declares a signal, with a halo for its readers.

        Args:
            channels, rate, extra, dtype: see `SignalLayout`.
            readers: groups of layers that read the signal, with one layer for each branch. If the
                signal has one branch, all layers of a group read it.
        """
        reach = [
            history(layer, delays[branch % len(delays)])
            for group in readers
            for branch, layer in enumerate(group)
        ]
        layout = SignalLayout(
            channels, rate, tuple(delays), extra, max(reach, default=0), dtype=dtype
        )
        return replace(layout, state_offset=self._rows.take(layout.width, dtype))

    def _conv(
        self,
        convs: Sequence[Any],
        x: SignalLayout,
        *,
        waits: Sequence[Any] = (),
        residual: SignalLayout | None = None,
        snakes: Sequence[Any] = (),
        activation: Activation = "none",
        **options: Any,
    ) -> Convolution:
        """Declares parallel convolutions, one for each branch."""
        # (outputs, taps, inputs) of each branch
        kernels = [conv.weight.detach().transpose(1, 2) for conv in convs]
        most = max(kernel.shape[1] for kernel in kernels)
        weights = torch.stack(
            [F.pad(kernel, (0, 0, 0, most - kernel.shape[1])).flatten(1) for kernel in kernels]
        )
        geometry = []
        for branch, conv in enumerate(convs):
            channels, taps = conv.in_channels, conv.kernel_size[0]
            if dense := conv.dilation[0] == 1 and len(convs) == 1:
                # Neighbouring taps are neighbours in the buffer, so they are read as one long tap.
                channels, taps = taps * channels, 1
            first = x.first(history(conv, x.delays[branch % len(x.delays)]))
            before = 0
            if residual:
                before = residual.first(
                    history(waits[branch], residual.delays[branch % len(residual.delays)])
                )
            step = conv.dilation[0] * conv.in_channels
            geometry.append((taps, 0 if dense else step, first, before, conv.output.delay))
        stride = convs[0].stride[0]
        return self._product(
            weights,
            torch.stack([_bias(conv) for conv in convs]),
            geometry,
            channels=channels,
            step=stride * convs[0].in_channels,
            rate=x.rate // stride,
            slopes=_slopes(snakes) if snakes else None,
            activation="snake" if snakes else activation,
            **options,
        )

    def _product(
        self,
        weights: torch.Tensor,
        bias: torch.Tensor,
        geometry: Sequence[tuple[int, ...]],
        **options: Any,
    ) -> Convolution:
        precision: Precision = "ieee" if weights.dtype == torch.float64 else self.precision
        return Convolution(
            rounded_weights(weights, precision),
            bias,
            torch.tensor(geometry, dtype=torch.int32, device=weights.device),
            precision=precision,
            **options,
        )

    def _pitch(self, classifier: nn.Linear, x: SignalLayout) -> Convolution:
        """Declares the last layer of the F0 predictor."""
        out = SignalLayout(1, 1, x.delays, dtype=x.dtype)
        geometry = [(1, 0, x.first(0), 0, x.delays[0])]
        return self._product(
            classifier.weight[None],
            classifier.bias[None],
            geometry,
            channels=x.channels,
            step=x.channels,
            rate=1,
            raw=out,
        )

    def _up(self, up: Any, x: SignalLayout) -> Convolution:
        """Declares an upsampling layer."""
        weight, bias = upsampling_weights(up)
        outputs, taps, inputs = weight.shape
        layer = _reader(up)
        rate = outputs // up.out_channels
        out = SignalLayout(up.out_channels, x.rate * rate, (up.output.delay,))
        geometry = [(1, 0, x.first(history(layer, x.delays[0])), 0, up.output.delay)]
        return self._product(
            weight.flatten(1)[None],
            bias[None],
            geometry,
            channels=taps * inputs,
            step=inputs,
            rate=x.rate,
            phases=rate,
            raw=out,
        )

    def _chain(
        self,
        blocks: Sequence[ResBlock],
        rate: int,
        waits: Sequence[Any],
        extra: int,
    ) -> _Chain:
        """Declares residual blocks of parallel branches.

        Args:
            rate: rows per frame.
            waits: delays of the results, one for each branch.
            extra: rows after the last frame.
        """
        firsts = _by_position([block.convs1 for block in blocks])
        seconds = _by_position([block.convs2 for block in blocks])
        delays = _by_position([block.waits for block in blocks])
        snakes1 = _by_position([block.activations1 for block in blocks])
        snakes2 = _by_position([block.activations2 for block in blocks])
        channels = firsts[0][0].in_channels

        def signal(branch_delays: Sequence[int], readers: Sequence[Sequence[Any]]) -> SignalLayout:
            return self._signal(channels, rate, branch_delays, readers, extra=extra)

        begin = [conv.input.delay for conv in firsts[0]]
        first_total = residual = signal(begin[:1], [delays[0]])
        x = first_x = signal(begin, [firsts[0]])
        convs = []
        for index in range(len(firsts)):
            inner_delays = [conv.output.delay for conv in firsts[index]]
            inner = signal(inner_delays, [seconds[index]])
            first = self._conv(firsts[index], x, snakes=snakes2[index], out=inner)
            result_delays = [conv.output.delay for conv in seconds[index]]
            last = index == len(firsts) - 1
            following = None if last else signal(result_delays, [firsts[index + 1]])
            result = signal(result_delays, [list(waits)] if last else [delays[index + 1]])
            second = self._conv(
                seconds[index],
                inner,
                waits=delays[index],
                residual=residual,
                snakes=() if last else snakes1[index + 1],
                raw=result,
                out=following,
            )
            convs.append((first, second))
            residual = result
            if following:
                x = following
        return _Chain(first_total, first_x, _slopes(snakes1[0]), convs, residual)

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
        up = self._up(ups[stage], before)
        source_chain = self._chain([source], rate, [], int(last))
        down = self._conv(
            [network.source_downs[stage]],
            self.spectrum,
            snakes=[source.activations1[0]],
            raw=source_chain.total,
            out=source_chain.activated,
        )
        chain = self._chain(blocks, rate, waits, int(last))
        reader: Any = network.conv_post if last else _reader(ups[stage + 1])
        delay = max(wait.output.delay for wait in waits)
        out = self._signal(chain.total.channels, rate, (delay,), [[reader]], extra=int(last))
        places = [
            (0, 0, 0, chain.result.first(history(wait, wait.input.delay)), 0)
            for wait, block in zip(waits, blocks, strict=True)
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


def _reader(up: UpConv | StreamConvTranspose) -> Streaming:
    """Returns the layer that declares the state of an upsampling layer."""
    return up if isinstance(up, UpConv) else up.overlap


def _by_position(branches: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Returns the layers of parallel branches, grouped by their position in the branch."""
    return list(zip(*branches, strict=True))


def _bias(conv: nn.Conv1d) -> torch.Tensor:
    return conv.weight.new_zeros(len(conv.weight)) if conv.bias is None else conv.bias.detach()


def _slopes(snakes: Sequence[FoldableSnake]) -> torch.Tensor:
    """Returns the coefficients (branches, 3, channels) of parallel Snake activations."""
    return torch.stack([snake.coefficients() for snake in snakes]).contiguous()

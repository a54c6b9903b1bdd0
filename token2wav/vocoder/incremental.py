"""HiFT on a mel that grows: every call costs only the new frames and the reach of the network.

Every output sample depends on a bounded stretch of mel, but for the phase of the harmonic source, which is one number
per harmonic to carry. So a window of mel and excitation that starts far enough before the first new sample gives the
same samples as the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from token2wav.groups import in_groups
from token2wav.hift_config import HiFTConfig
from token2wav.vocoder.convolutions import upsampling_reach
from token2wav.vocoder.f0 import F0_LEFT_REACH
from token2wav.vocoder.hift import HiFT
from token2wav.vocoder.noise import MergedNoise, SourceNoise
from token2wav.vocoder.source import Phase
from token2wav.vocoder.windows import run_together


def left_reach_frames(config: HiFTConfig) -> int:
    """Mel frames before a sample's own that can influence it, through mel or excitation. Worked out from back to front.

    The unit changes from stage to stage: positions of a stage, `stride` STFT frames each. Excitation and mel meet in
    every stage, so the longest of all ways counts.
    """
    edge = config.n_fft // 2 // config.hop_len  # STFT frames on each side that overlap with one
    per_frame = config.samples_per_frame // config.hop_len
    reach = edge + 1 + _LAST_CONV_REACH  # the inverse STFT, the reflected frame, conv_post
    longest = 0
    stride = 1
    stages = reversed(range(len(config.upsample_rates)))
    for stage in stages:
        reach += max(
            _resblock_reach(kernel, dilations)
            for kernel, dilations in zip(config.resblock_kernel_sizes, config.resblock_dilation_sizes, strict=True)
        )
        source = reach + _resblock_reach(
            config.source_resblock_kernel_sizes[stage], config.source_resblock_dilation_sizes[stage]
        )
        down = 2 * stride - 1 if stride > 1 else 0  # kernel of source_downs, less one
        longest = max(longest, source * stride + down + edge)
        rate = config.upsample_rates[stage]
        reach = -(-reach // rate) + upsampling_reach(config.upsample_kernel_sizes[stage], rate)
        stride *= rate
        longest = max(longest, reach * stride)
    return -(-longest // per_frame)


_LAST_CONV_REACH = 6  # conv_post: kernel 7


def _resblock_reach(kernel: int, dilations: tuple[int, ...]) -> int:
    """Positions to the left: every dilated convolution is followed by one of dilation 1."""
    return sum((kernel - 1) * (dilation + 1) for dilation in dilations)


@dataclass(eq=False)
class VocoderState:
    """One utterance. Frames and samples count from its start.

    Attributes:
        mel: (bands, n) frames from `mel_start` on: the mel cache.
        source: (1, 1, n) excitation from frame `mel_start` on, as far as there is F0.
        carry: phase of the harmonic source, see `frame_sines`.
        mel_start: first frame that is kept.
        speech_offset: samples sent so far.
    """

    mel: torch.Tensor
    source: torch.Tensor
    carry: torch.Tensor | None = None
    mel_start: int = 0
    speech_offset: int = 0


@dataclass(frozen=True, eq=False)
class _Window:
    """What the network is to see of an utterance, and which of the samples that come out are new.

    Attributes:
        mel: (1, bands, frames).
        source: (1, 1, samples) their excitation.
        final: whether the utterance ends here.
        history: whether the window holds all that the new samples depend on.
        first, last: new samples, counted from the end of those that come out.
    """

    mel: torch.Tensor
    source: torch.Tensor
    final: bool
    history: bool
    first: int
    last: int


VocoderNetwork = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # as `HiFT.network`


class IncrementalHiFT:
    """Vocodes utterances piece by piece. It has no state of its own.

    Args:
        hift: the vocoder.
        noise: of its source.
        phase: rounding of the source's phase, see `StreamConfig`.
        network: runs `HiFT.network` on another engine than torch.
    """

    def __init__(
        self, hift: HiFT, noise: SourceNoise, phase: Phase = "exact", network: VocoderNetwork | None = None
    ) -> None:
        self._hift = hift
        self._exported = network
        self._source_noise = noise
        self._noise = MergedNoise(noise, hift.m_source)
        self._phase = phase
        self._reach = left_reach_frames(hift.config)
        self._samples = hift.config.samples_per_frame

    def start(self) -> VocoderState:
        device = self._hift.window.device
        return VocoderState(
            mel=torch.empty(self._hift.config.in_channels, 0, device=device),
            source=torch.empty(1, 1, 0, device=device),
        )

    def whole(self, mel: torch.Tensor) -> torch.Tensor:
        """Audio of a whole mel (bands, frames) at once, (samples,)."""
        return self._hift.vocode(mel[None], self._source_noise, phase=self._phase)[0]

    @torch.inference_mode()
    def advance(self, state: VocoderState, mel: torch.Tensor, *, final: bool) -> torch.Tensor:
        """Takes mel frames (bands, n) and returns the samples (m,) that they make possible."""
        [audio] = self.advance_batch([(state, mel, final)])
        return audio

    @torch.inference_mode()
    def advance_batch(self, batch: Sequence[tuple[VocoderState, torch.Tensor, bool]]) -> list[torch.Tensor]:
        """Takes (state, mel, final) of several utterances and returns the new samples of each.

        Windows of one length, which those of streams at the same hop are, go through the network together.
        """
        results = [mel.new_empty(0) for _, mel, _ in batch]
        windows = {
            index: window
            for index, (state, mel, final) in enumerate(batch)
            if (window := self._window(state, mel, final)) is not None
        }
        rows = in_groups(list(windows.values()), lambda window: (window.final, window.history), self._run_alike)
        for (index, window), audio in zip(windows.items(), rows, strict=True):
            results[index] = audio[len(audio) - window.first : len(audio) - window.last]
            batch[index][0].speech_offset += window.first - window.last
        return results

    def _run_alike(self, windows: Sequence[_Window]) -> list[torch.Tensor]:
        network = partial(self._network, final=windows[0].final, history=windows[0].history)
        return run_together(network, [(window.mel, window.source) for window in windows])

    def _network(self, mel: torch.Tensor, source: torch.Tensor, *, final: bool, history: bool) -> torch.Tensor:
        inputs = self._hift.network_inputs(mel, source, final=final)
        return self._exported(*inputs) if self._exported else self._hift.network(*inputs, history=history)

    def _window(self, state: VocoderState, mel: torch.Tensor, final: bool) -> _Window | None:
        """What the network is to see for the samples that new frames make possible; None if they make none."""
        state.mel = torch.cat((state.mel, mel), dim=1)
        frames = state.mel_start + state.mel.shape[1]
        ready = frames if final else max(0, frames - self._hift.lookahead_frames)
        sent = state.speech_offset // self._samples
        if ready <= sent:
            return None
        self._extend_source(state, final)
        known = state.source.shape[2] // self._samples
        end = state.mel_start + known - (0 if final else self._hift.config.conv_pre_look_right)
        window = _Window(
            mel=state.mel[None, :, :known],
            source=state.source,
            final=final,
            history=sent - state.mel_start >= self._reach,
            first=(end - sent) * self._samples,
            last=(end - ready) * self._samples,
        )
        self._forget(state, ready)
        return window

    def _extend_source(self, state: VocoderState, final: bool) -> None:
        """Excitation of all frames whose F0 can be known."""
        known = state.source.shape[2] // self._samples  # frames after mel_start
        first = max(0, known - F0_LEFT_REACH)
        f0 = self._hift.f0_predictor(state.mel[None, :, first:], final)[:, known - first :]
        at = state.mel_start + known
        noise = self._noise.window(at * self._samples, (at + f0.shape[1]) * self._samples)
        source, carries = self._hift.m_source(f0, noise, self._phase, state.carry)
        state.carry = carries[:, -1]
        state.source = torch.cat((state.source, source), dim=2)

    def _forget(self, state: VocoderState, ready: int) -> None:
        """Drops what is out of reach of the next sample; F0 looks back less far than that."""
        drop = max(0, ready - self._reach - state.mel_start)
        state.mel = state.mel[:, drop:].clone()
        state.source = state.source[:, :, drop * self._samples :].clone()
        state.mel_start += drop

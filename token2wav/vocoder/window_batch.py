"""Windows of several streams as dense tensors of one shape that stay where they are, as a CUDA graph wants them.

A window is what the network sees of a stream for its new samples, as in `incremental.py`. Here windows are padded on
the right, which no sample that is cut out sees: the network is causal but for its look-ahead. Where an utterance ends,
the padding is what the network sees of nothing: mel frames of zeros, and the mirrored end of the excitation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from token2wav.vocoder import stft
from token2wav.vocoder.f0 import F0_LEFT_REACH, F0_LOOKAHEAD
from token2wav.vocoder.hift import HiFT
from token2wav.vocoder.noise_table import NoiseTable
from token2wav.vocoder.source import Phase
from token2wav.vocoder.stream_rows import RowLayout

WASTE = 0  # row of the streams' states that nobody owns: rows of a batch that stand for no stream write there


@dataclass(frozen=True, order=True)
class WindowShape:
    """Room in a batch.

    Attributes:
        streams: windows.
        frames: of mel in each.
        history: whether windows start in the middle of utterances, with all that a stream keeps; else at their start.
    """

    streams: int
    frames: int
    history: bool

    def fits(self, other: WindowShape) -> bool:
        """Whether a batch of this shape can run in another; windows have been padded to one of its lengths before."""
        return (self.frames, self.history) == (other.frames, other.history) and self.streams <= other.streams

    def volume(self) -> int:
        """What a batch of it costs, in arbitrary units."""
        return self.streams * self.frames


@dataclass(frozen=True, eq=False)
class Piece:
    """New mel of one stream.

    Attributes:
        layout: of what streams keep.
        row: where this stream's is kept.
        frames: that came before.
        mel: (bands, n).
        final: whether the utterance ends with it.
    """

    layout: RowLayout
    row: int
    frames: int
    mel: torch.Tensor
    final: bool

    @property
    def history(self) -> bool:
        """Whether all is kept that new samples depend on; else the window starts with the utterance."""
        return self.frames >= self.layout.frames

    @property
    def cached(self) -> int:
        """Frames of the window that are kept."""
        return min(self.frames, self.layout.frames)

    @property
    def valid(self) -> int:
        """Frames of the window that are mel."""
        return self.cached + self.mel.shape[1]

    @property
    def needs(self) -> int:
        """Frames of the smallest window that takes it: with room for the look-ahead behind the last sample."""
        return max(self.valid + (self.layout.lookahead if self.final else 0), self.layout.lookahead + 1)

    @property
    def new(self) -> slice:
        """The samples that are new, of those that come out."""
        sent = max(0, self.frames - self.layout.lookahead)
        ready = self.frames + self.mel.shape[1] - (0 if self.final else self.layout.lookahead)
        first = 0 if self.history else sent
        return slice(first * self.layout.samples, (first + max(0, ready - sent)) * self.layout.samples)


class WindowBatch:
    """Tensors of one shape, filled anew for every batch: S streams, W frames of mel, M of them new at most.

    Args:
        shape: room.
        hift: on the device that is to be used.
        layout: of what streams keep.
        phase: rounding of the source's phase, see `StreamConfig`.

    Attributes:
        mels: (1 + S * M, bands) the new frames of all streams behind one of zeros.
        before, after: (S, width) what the streams keep.
        rows: (S,) where that is.
        noise: (S * R, samples_per_frame) of the R frames that get an excitation.
        audio: (S, samples) what comes out; a stream's own is `Piece.new`.
    """

    def __init__(self, shape: WindowShape, hift: HiFT, layout: RowLayout, phase: Phase) -> None:
        self.shape = shape
        self._hift, self._layout, self._phase = hift, layout, phase
        device, streams = hift.window.device, shape.streams
        self._kept = layout.frames if shape.history else 0
        self._kept_source = layout.source_frames if shape.history else 0
        self._with_source = shape.frames - F0_LOOKAHEAD
        self._fresh = self._with_source - self._kept_source
        self.mels = torch.zeros(1 + streams * (shape.frames - self._kept), layout.bands, device=device)
        self.before, self.after = (torch.zeros(streams, layout.width, device=device) for _ in range(2))
        self.noise = torch.zeros(streams * self._fresh, layout.samples, device=device)
        come_out = shape.frames - layout.lookahead - (layout.reach if shape.history else 0)
        self.audio = torch.zeros(streams, come_out * layout.samples, device=device)
        # All whole numbers of a batch in one tensor, for one copy brings them.
        self._numbers = torch.zeros(streams * (5 + self._fresh), dtype=torch.int64, device=device)
        columns = self._numbers[: 5 * streams].unflatten(0, (5, streams))
        self.rows, self._cached, self._new, self._first, self._end = columns
        self._noise_rows = self._numbers[5 * streams :]
        self._frames = torch.arange(shape.frames, device=device)
        self._streams = torch.arange(streams, device=device)[:, None]

    def fill(self, pieces: Sequence[Piece], states: torch.Tensor, noise: NoiseTable) -> None:
        """Puts a batch in; it may have fewer streams than there is room for.

        Args:
            pieces: at most `shape.streams`, all with or all without history, none that needs a longer window.
            states: (N, width) of all streams.
            noise: of the source.
        """
        streams, ends = self.shape.streams, self._with_source
        # Always another tensor: the last one's copy may still be on its way.
        numbers = torch.zeros(len(self._numbers), dtype=torch.int64, pin_memory=self._numbers.is_cuda)
        columns = numbers.numpy()[: 5 * streams].reshape(5, streams)
        rows, cached, new, first, end = columns
        rows[:], end[:] = WASTE, ends
        for index, piece in enumerate(pieces):
            rows[index], cached[index], new[index] = piece.row, piece.cached, piece.mel.shape[1]
            end[index] = piece.valid if piece.final else ends
        first[:] = 1 + np.cumsum(new) - new
        starts = np.zeros(streams, np.int64)
        if self.shape.history:
            starts[: len(pieces)] = [piece.frames - F0_LOOKAHEAD for piece in pieces]
        counts = np.minimum(cached + new, ends) - self._kept_source
        counts[len(pieces) :] = 0
        numbers.numpy()[5 * streams :] = noise.find(starts, counts, self._fresh).ravel()
        self._numbers.copy_(numbers, non_blocking=True)
        torch.cat([piece.mel.T for piece in pieces], out=self.mels[1 : 1 + int(new.sum())])
        torch.index_select(states, 0, self.rows, out=self.before)
        torch.index_select(noise.rows, 0, self._noise_rows, out=self.noise)

    @torch.inference_mode()
    def compute(self) -> None:
        """Fills `audio` and `after`. Nothing here waits for the device or depends on what is in the tensors."""
        hift, config = self._hift, self._hift.config
        window = self._window()
        mel = window.transpose(1, 2)
        source, carries = self._source(mel)
        after = config.conv_pre_look_right * config.samples_per_frame // config.hop_len
        spectrum = stft.spectrum(self._mirrored(source), hift.analysis, config.hop_len)[..., :-after]
        x = hift.features(mel[:, :, : self._with_source], spectrum, history=self.shape.history)
        audio = hift.waveform(x, self._valid(x.shape[2]))
        self.audio.copy_(audio[:, : -config.samples_per_frame][:, -self.audio.shape[1] :])
        self._keep(window, source, carries)

    def _window(self) -> torch.Tensor:
        """(S, W, bands) what was kept, then what is new, then zeros."""
        kept = self._layout.views(self.before).mel
        place = self._frames - self._cached[:, None]
        is_new = (place >= 0) & (place < self._new[:, None])
        index = ((self._first[:, None] + place) * is_new)[:, self._kept :]
        new = self.mels.index_select(0, index.flatten()).unflatten(0, index.shape)
        if self.shape.history:
            return torch.cat((kept, new), dim=1)
        old = kept.index_select(1, self._frames.clamp(max=self._layout.frames - 1))
        return torch.where((place < 0)[..., None], old, new)

    def _source(self, mel: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Excitation (S, 1, samples) of all frames with F0, and the carries of those that had none yet."""
        kept = self._layout.views(self.before)
        first = max(0, self._kept_source - F0_LEFT_REACH)
        f0 = self._hift.f0_predictor(mel[:, :, first:], final=False)[:, self._kept_source - first :]
        noise = self.noise.view(len(f0), -1)
        carry = kept.carry if self.shape.history else None
        source, carries = self._hift.m_source(f0, noise, self._phase, carry)
        if self.shape.history:
            source = torch.cat((kept.source.flatten(1)[:, None], source), dim=2)
        return source, carries

    def _mirrored(self, source: torch.Tensor) -> torch.Tensor:
        """The excitation as the STFT takes it, mirrored where the utterance ends, or else where the window does."""
        n_fft = self._hift.config.n_fft
        padded, edge = stft.reflected(source, n_fft)[:, 0], n_fft // 2
        end = (edge + self._end * self._layout.samples)[:, None]
        behind = torch.arange(edge, device=end.device)
        return padded.scatter_(1, end + behind, padded.gather(1, end - 2 - behind))[:, None]

    def _valid(self, count: int) -> torch.Tensor:
        """(S, 1, count) ones for the last `count` frames of the inverse STFT, zeros behind the end of an utterance."""
        config = self._hift.config
        per_frame = config.samples_per_frame // config.hop_len
        last = (self._with_source - config.conv_pre_look_right) * per_frame
        frames = torch.arange(last + 1 - count, last + 1, device=self._end.device)
        return (frames <= self._end[:, None] * per_frame)[:, None].to(self.audio.dtype)

    def _keep(self, window: torch.Tensor, source: torch.Tensor, carries: torch.Tensor) -> None:
        """What the streams keep from here on, into `after`."""
        layout, kept = self._layout, self._layout.views(self.after)
        valid = self._cached + self._new
        first = (valid - layout.frames).clamp(min=0)[:, None]
        kept.mel.copy_(self._from(window, first, layout.frames))
        kept.source.copy_(self._from(source[:, 0].unflatten(1, (-1, layout.samples)), first, layout.source_frames))
        last = (valid - F0_LOOKAHEAD - self._kept_source - 1).clamp(0, self._fresh - 1)
        kept.carry.copy_(self._from(carries, last[:, None], 1)[:, 0])

    def _from(self, values: torch.Tensor, first: torch.Tensor, count: int) -> torch.Tensor:
        """`count` values of every stream from its `first` (S, 1) on, (S, count, ...) of (S, n, ...)."""
        total = values.shape[1]
        offsets = torch.arange(count, device=first.device)
        index = (first + offsets).clamp(max=total - 1) + self._streams * total
        return values.flatten(0, 1).index_select(0, index.flatten()).unflatten(0, index.shape)

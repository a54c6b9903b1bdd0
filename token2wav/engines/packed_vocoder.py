"""HiFT for batches of streams on a GPU: a batch is a few launches and, in shapes known beforehand, one CUDA graph.

What streams keep lives in the device's memory, a row for each. So a batch reads all its streams' rows at once, and
writes them back at once; nothing is done stream by stream, and nothing comes from the host but a list of numbers.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from token2wav.engines.incremental_vocoder import IncrementalVocoderEngine
from token2wav.engines.plans import Plan, Plans
from token2wav.execution.cuda_graphs import GraphPool
from token2wav.groups import in_groups
from token2wav.vocoder.hift import HiFT
from token2wav.vocoder.noise import SourceNoise
from token2wav.vocoder.noise_table import NoiseTable
from token2wav.vocoder.source import Phase
from token2wav.vocoder.stream_rows import RowLayout
from token2wav.vocoder.window_batch import WASTE, Piece, WindowBatch, WindowShape

_FIRST_ROWS = 64
_PREPARED_BLOCKS = 60  # of noise, a minute; later ones are drawn when a stream gets there


@dataclass(eq=False)
class PackedStream:
    """One utterance.

    Attributes:
        row: where its state is.
        frames: of mel so far.
    """

    row: int
    frames: int = 0


class PackedHiFT:
    """Vocodes utterances piece by piece. The result is that of `IncrementalHiFT` up to float rounding.

    Args:
        hift: on the device that is to be used.
        noise: of the source.
        phase: rounding of the source's phase, see `StreamConfig`.
        shapes: to prepare beforehand, and to pad batches to; other batches run in a shape of their own.
        graphs: where shapes are captured as CUDA graphs; None for none.
    """

    def __init__(
        self,
        hift: HiFT,
        noise: SourceNoise,
        phase: Phase = "exact",
        *,
        shapes: Sequence[WindowShape] = (),
        graphs: GraphPool | None = None,
    ) -> None:
        self._hift = hift
        self._source_noise = noise
        self._phase = phase
        self._layout = RowLayout(hift)
        self._noise = NoiseTable(noise, hift.m_source)
        self._states = torch.zeros(_FIRST_ROWS, self._layout.width, device=hift.window.device)
        self._free = list(range(_FIRST_ROWS - 1, WASTE, -1))
        self._lock = threading.Lock()  # rows have one owner, and a plan's tensors hold one batch at a time
        self._lengths = {
            history: sorted({shape.frames for shape in shapes if shape.history == history}) for history in (False, True)
        }
        if graphs is not None:
            self._noise.prepare(_PREPARED_BLOCKS)
        self._plans = Plans(self._plan, shapes, graphs)

    @property
    def device(self) -> torch.device:
        return self._states.device

    @torch.inference_mode()
    def start(self) -> PackedStream:
        with self._lock:
            if not self._free:
                count = len(self._states)
                self._states = torch.cat((self._states, torch.zeros_like(self._states)))
                self._free = list(range(2 * count - 1, count - 1, -1))
            return PackedStream(self._free.pop())

    def release(self, stream: PackedStream) -> None:
        """Frees what a stream keeps."""
        with self._lock:
            self._free.append(stream.row)
            stream.row = WASTE  # should it still be about to run, it harms nobody

    def whole(self, mel: torch.Tensor) -> torch.Tensor:
        """Audio of a whole mel (bands, frames) at once, (samples,)."""
        return self._hift.vocode(mel[None], self._source_noise, phase=self._phase)[0]

    @torch.inference_mode()
    def advance_batch(self, batch: Sequence[tuple[PackedStream, torch.Tensor, bool]]) -> list[torch.Tensor]:
        """See `IncrementalVocoder`. Pieces whose windows get one length go through the network together."""
        results = [torch.empty(0, device=self.device)] * len(batch)
        with self._lock:
            pieces = {
                index: Piece(self._layout, stream.row, stream.frames, mel, final)
                for index, (stream, mel, final) in enumerate(batch)
                if mel.shape[1] or (final and stream.frames)
            }
            rows = in_groups(list(pieces.values()), lambda piece: (piece.history, self._frames_for(piece)), self._run)
            for (index, piece), audio in zip(pieces.items(), rows, strict=True):
                results[index] = audio
                batch[index][0].frames += piece.mel.shape[1]
        return results

    def _run(self, pieces: list[Piece]) -> list[torch.Tensor]:
        return [audio for part in self._plans.parts(pieces) for audio in self._run_together(part)]

    def _run_together(self, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        plan = self._plans.of(WindowShape(len(pieces), self._frames_for(pieces[0]), pieces[0].history))
        plan.batch.fill(pieces, self._states, self._noise)
        plan.run()
        self._states.index_copy_(0, plan.batch.rows, plan.batch.after)
        audio = plan.batch.audio[: len(pieces)].clone()
        return [row[piece.new] for row, piece in zip(audio, pieces, strict=True)]

    def _frames_for(self, piece: Piece) -> int:
        """Length of the window that a piece runs in."""
        needs = piece.needs
        return next((frames for frames in self._lengths[piece.history] if frames >= needs), needs)

    def _plan(self, shape: WindowShape) -> Plan[WindowBatch]:
        batch = WindowBatch(shape, self._hift, self._layout, self._phase)
        return Plan(batch, batch.compute)


class PackedVocoderEngine(IncrementalVocoderEngine[PackedStream]):
    """`PackedHiFT` as an engine. The result is that of `RecomputeVocoderEngine` up to float rounding.

    Args:
        vocoder: what computes.
    """

    def __init__(self, vocoder: PackedHiFT) -> None:
        super().__init__(vocoder, vocoder.device)
        self._packed = vocoder

    def close(self, handle: int) -> None:
        if (stream := self._streams.remove(handle)) is not None:
            self._packed.release(stream)

"""Pieces of a vocoder on kernels equal the network on torch, in any mixture of a batch.

Every signal begins as NaN. So a number that is read before it is written shows up in the audio.
"""

from __future__ import annotations

import pytest
import torch

from testkit.kernel_vocoder import BANDS, DEVICE, ROUNDING, a_network, a_stage, spoken
from token2wav.stages.stage import FrameChunk

# on a GPU, the tests belong to the tests that the GPU must pass
pytestmark = [
    pytest.mark.usefixtures("nan_in_new_signals"),
    *([pytest.mark.gpu] if DEVICE.type == "cuda" else []),
]


@pytest.mark.parametrize(
    "name", ["causal", "faded", pytest.param("symmetric", marks=pytest.mark.slow)]
)
def test_pieces_of_mixed_batches_equal_the_whole(name: str) -> None:
    """Starts, middles and ends of different lengths run in one batch.

    One chunk is longer than the longest piece, two are shorter than the frames held back, and one
    stream starts where a slot holds the NaN of an earlier stream.
    """
    network = a_network(name)
    stage, held = a_stage(network), network.lookahead_frames
    broken = stage.open()
    nan = torch.full((BANDS, held + 1), torch.nan, device=DEVICE)
    [samples] = stage.advance([(broken, FrameChunk(nan, last=False))])
    assert not torch.isfinite(samples).any()
    stage.close(broken)
    utterances: dict[int, list[int | None]] = {
        held + 10: [held + 6, held + 7, held + 10],
        held + 4: [2, held + 4, None],
        3: [None, None, 3],
    }
    for mel, audio in spoken(stage, utterances):
        whole = stage.whole(mel)
        assert audio.shape == whole.shape
        torch.testing.assert_close(audio, whole, atol=ROUNDING, rtol=0)
    assert stage.open_streams == stage.store.used == 0


def test_extrapolated_audio_leaves_no_trace() -> None:
    """Audio that is sent early differs, and the audio after it is exact again.

    The first audio comes before the look-ahead is complete.
    """
    network = a_network("causal")
    held = network.lookahead_frames
    exact, extrapolating = a_stage(network), a_stage(network, lookahead_frames=1)
    utterances: dict[int, list[int | None]] = {held + 5: [2, held + 1, held + 5]}
    [(_, one)], [(_, other)] = (list(spoken(stage, utterances)) for stage in (exact, extrapolating))
    assert one.shape == other.shape
    border = held * network.frame_samples
    torch.testing.assert_close(one[border:], other[border:], atol=ROUNDING, rtol=0)

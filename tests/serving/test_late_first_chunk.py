"""A first chunk that becomes ready while the batch of 63 streams runs, on simulated time."""

from __future__ import annotations

from functools import partial

import pytest

from testkit.models.sized import public_configs
from testkit.simulation.listener import Listener
from testkit.simulation.server import Costs, Events, ServerKind, SimulatedServer
from token2wav import StreamConfig
from token2wav.config import LimitConfig
from token2wav.serving.policy import Policy

# As on an H200: 150 ms for 25 tokens of 64 streams, 15 ms for a first chunk with its prompt.
COSTS = Costs(batch_s=0.011, token_s=0.139 / 1600, open_s=0.001)
STREAM = StreamConfig(first_tokens=0, max_hop_tokens=25)
LIMITS = LimitConfig(batch_streams=64)
STREAMS, BATCH_AT = 63, 2.0  # time at which the streams get the tokens of a chunk


def waited(offset: float) -> float:
    """Returns the seconds that a stream waits for its first audio. Its tokens arrive `offset`
    seconds after those of the others.
    """
    events = Events()
    kind = ServerKind(public_configs()["CosyVoice3"], COSTS, STREAM, LIMITS)
    server = SimulatedServer(kind, events)
    arrivals = [[(0.0, 78), (BATCH_AT, 25), (10.0, 1)]] * STREAMS + [[(BATCH_AT + offset, 28)]]
    listeners = [Listener(coming, events, buffer_s=0.2) for coming in arrivals]
    for listener in listeners:
        events.at(listener.begins, partial(listener.connect, server))
        listener.feed()
    events.run(8.0)
    assert not any(listener.playback.underruns for listener in listeners)
    return listeners[-1].first_s


def test_a_late_first_chunk_waits_for_two_steps_and_not_for_the_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    offsets = [0.02 * number for number in range(1, 9)]
    assert max(map(waited, offsets)) < 0.05
    monkeypatch.setattr(Policy, "may_interrupt", lambda *_: False)
    assert max(map(waited, offsets)) > 0.13

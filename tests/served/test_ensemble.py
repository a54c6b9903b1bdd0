"""The stages as models of their own, on a real server: many streams in a batch, and nothing left
behind. `test_streaming.py`, `test_bad_requests.py` and `test_takeover.py` test the ensemble like
the model in one process.
"""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor

from testkit.models.golden import GoldenSet
from testkit.rigs.server_rig import Rig
from tests.served.conftest import IDLE_SECONDS
from token2wav_client import Client, ClientVoice
from token2wav_server.launcher.supervisor import Canary

MODEL = "token2wav_ensemble"
IDLE = f"in ensemble '{MODEL}', stream: no tokens for {IDLE_SECONDS} s, so it was closed"


def batches(rig: Rig, stage: str) -> tuple[int, int]:
    """Returns the number of batches that a stage has run, and of batches with one stream only."""
    text = rig.metrics()
    [alone] = re.findall(rf'token2wav_batch_streams_bucket{{le="1.0",model="{stage}"}} (\d+)', text)
    [count] = re.findall(rf'token2wav_batch_streams_count{{model="{stage}"}} (\d+)', text)
    return int(count), int(alone)


def test_the_canary_of_the_supervisor_can_speak_with_it(rig: Rig) -> None:
    canary = Canary(60.0, 60.0, [MODEL])
    assert canary.start(rig.server.grpc_url).result() is None


def test_eight_streams_share_batches(rig: Rig, golden: GoldenSet, voice: ClientVoice) -> None:
    def synthesize(_: int) -> int:
        with Client(rig.server.grpc_url, model=MODEL) as client:
            return sum(len(chunk.audio) for chunk in client.synthesize([golden.tokens], voice))

    before = {stage: batches(rig, stage) for stage in ("flow", "vocoder")}
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(synthesize, range(8))) == {960 * len(golden.tokens)}
    for stage, (count, alone) in before.items():
        now, alone_now = batches(rig, stage)
        assert alone_now - alone < now - count


def test_abandoned_streams_are_freed_in_all_stages(limited: Rig, golden: GoldenSet) -> None:
    with limited.connect(MODEL) as connection:
        connection.send(golden.tokens[:60], golden.voice, "abandoned", start=True)
        assert len(connection.answers().chunks) == 1
        assert limited.open_streams() == {"scheduler": 1, "engine": 1, "flow": 1, "vocoder": 1}
        connection.send(golden.tokens, golden.voice)  # and leaves while this is computed
    limited.wait_until_empty()
    with limited.connect(MODEL) as connection:
        connection.send(golden.tokens[60:], None, "abandoned", end=True)
        assert connection.answers().errors == [IDLE]
        connection.send([1], golden.voice, "silent", start=True)
        while not (errors := connection.answers().errors):
            time.sleep(0.2)
            connection.send([], None, "silent")  # an empty message does not count as activity
        assert errors == [IDLE]
        # The id is free again.
        connection.send([1], golden.voice, "abandoned", start=True, end=True)
        assert connection.answers().audio.shape == (960,)

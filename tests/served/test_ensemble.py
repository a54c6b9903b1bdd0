"""The stages as models of their own, on a real server: streams share batches, and all stages free a
stream whose client leaves. `test_streaming.py`, `test_bad_requests.py` and `test_takeover.py` test
the ensemble like the model in one process.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from testkit.models.golden import GoldenSet
from testkit.rigs.server_rig import Rig, request_input
from token2wav_client import Client, ClientVoice
from token2wav_server.launcher.supervisor import Canary

MODEL = "token2wav_ensemble"
pytestmark = pytest.mark.python_models


def batches(rig: Rig) -> tuple[float, float]:
    """Returns the number of batches, and of batches with one stream only."""
    metrics, name = rig.metrics(), "token2wav_batch_streams"
    return metrics[f"{name}_count"], metrics[f'{name}_bucket{{le="1.0"}}']


def test_the_canary_of_the_supervisor_can_speak_with_it(rig: Rig) -> None:
    canary = Canary(60.0, 60.0, [MODEL])
    assert canary.start(rig.server.grpc_url).result() is None


def test_eight_streams_share_batches(rig: Rig, golden: GoldenSet, voice: ClientVoice) -> None:
    def synthesize(_: int) -> int:
        with Client(rig.server.grpc_url, model=MODEL) as client:
            return sum(len(chunk.audio) for chunk in client.synthesize([golden.tokens], voice))

    count, alone = batches(rig)
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(synthesize, range(8))) == {960 * len(golden.tokens)}
    now, alone_now = batches(rig)
    assert alone_now - alone < now - count


def test_all_stages_free_a_stream_whose_client_leaves(rig: Rig, golden: GoldenSet) -> None:
    """The idle timeout of this server is longer than the patience of the test."""
    with rig.connect(MODEL) as connection:
        parameters = {"keep_open": True}
        connection.send(golden.tokens[:60], golden.voice, 7, start=True, parameters=parameters)
        connection.first_chunk()
        assert rig.open_streams() == {"scheduler": 1, "engine": 1, "flow": 1, "vocoder": 1}
    rig.wait_until_empty()


def test_a_client_cannot_call_a_stage(rig: Rig) -> None:
    with rig.connect() as connection:
        for content in (b"", b"\1" * 100):
            call = request_input("call", np.frombuffer(content, np.uint8))
            with pytest.raises(InferenceServerException):
                connection.client.infer("flow", [call])
